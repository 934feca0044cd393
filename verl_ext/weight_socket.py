"""Patch: two trainings on one machine, each in a Ray of its own, send their weights through sockets of their own.

verl names the socket between a trainer's worker and its engine by Ray's job id, which tells jobs of one cluster apart. The
first job of every cluster has the same id, so that two trainings that start Ray themselves meet in one file, and an engine
can load the other one's weights without a word. Here the name has Ray's session too, on both sides.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from typing import Any

import ray
import wrapt

from verl_ext.guard import VERL, require

_SENDER = "verl.workers.rollout.vllm_rollout.vllm_rollout"
_RECEIVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"


def job_key() -> str:
    """Names this job among all that this machine runs: Ray's job id and a digest of its session.

    A socket's path may have 107 characters, so the session's own name is too long for it.
    """
    context = ray.get_runtime_context()
    session = hashlib.sha256(context.get_session_name().encode()).hexdigest()[:12]
    return f"{context.get_job_id()}-{session}"


def _name_sender(adapter: Any) -> None:
    job_id = ray.get_runtime_context().get_job_id()
    adapter.zmq_handle = adapter.zmq_handle.replace(f"-{job_id}-replica-", f"-{job_key()}-replica-")


def _name_receiver(server: Any) -> None:
    # The engine's processes, started later, take it from the environment.
    os.environ["VERL_RAY_JOB_ID"] = job_key()


def _patch(owner: Any, name: Callable[[Any], None]) -> None:
    original = owner.__init__
    if getattr(original, "_names_its_socket", False):
        return

    @functools.wraps(original)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        name(self)

    __init__._names_its_socket = True  # type: ignore[attr-defined]
    owner.__init__ = __init__


def install() -> None:
    require("verl", VERL, "weight_socket")
    wrapt.register_post_import_hook(lambda module: _patch(module.ServerAdapter, _name_sender), _SENDER)
    wrapt.register_post_import_hook(lambda module: _patch(module.vLLMHttpServer, _name_receiver), _RECEIVER)
