"""Patch: an engine that is asked for new weights before their sender listens tries again after 1 ms, not after 100 ms.

verl starts the engine's receiver first and binds the sender's socket then (``ServerAdapter.update_weights``). Whichever is
quicker decides: a receiver that finds no socket waits for ZeroMQ's default reconnect interval, and the engine stands still
meanwhile. About every second sync of a small model did, for 120 to 160 ms of the 20 ms that it takes.
"""

import functools

import wrapt
import zmq

from verl_ext.guard import VERL, require

_TARGET = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
RETRY_MS = 1


def _quicken(module) -> None:
    receiver = module.BucketedWeightReceiver
    original = receiver._init_socket
    if getattr(original, "_is_quick", False):
        return

    @functools.wraps(original)
    def _init_socket(self) -> None:
        # The context is the process's own, and vLLM's sockets keep their intervals: only the next socket has this one.
        options = self.zmq_context.sockopts
        options[zmq.RECONNECT_IVL] = RETRY_MS
        try:
            original(self)
        finally:
            del options[zmq.RECONNECT_IVL]

    _init_socket._is_quick = True  # type: ignore[attr-defined]
    receiver._init_socket = _init_socket


def install() -> None:
    require("verl", VERL, "quick_weight_socket")
    wrapt.register_post_import_hook(_quicken, _TARGET)
