"""Patch: an engine that is asked for new weights before their sender listens tries again after 1 ms, not after 100 ms.

verl starts the engine's receiver first and binds the sender's socket then (``ServerAdapter.update_weights``). Whichever is
quicker decides: a receiver that finds no socket waits for ZeroMQ's default reconnect interval, and the engine stands still
meanwhile. With a small model about every second sync did: loading took 120 to 190 ms instead of 20.
"""

import wrapt
import zmq

from verl_ext.guard import VERL, require

_TARGET = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
RETRY_MS = 1


def _quicken(module) -> None:
    def _init_socket(self) -> None:
        self.socket = self.zmq_context.socket(zmq.REP)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RETRY_MS)
        self.socket.connect(self.zmq_handle)

    module.BucketedWeightReceiver._init_socket = _init_socket


def install() -> None:
    require("verl", VERL, "quick_weight_socket")
    wrapt.register_post_import_hook(_quicken, _TARGET)
