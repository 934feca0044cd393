"""Patches of the socket between a trainer's worker and its engine: a name that no other run has, and a quick second try.

They may go when verl names it by the run, and binds it before it asks the engine to connect.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import ray
import zmq

from verl_ext.guard import around

RETRY_MS = 1


def job_key() -> str:
    """Names this job among all that this machine runs: Ray's job id and a digest of its session.

    verl takes the job id, which tells jobs of one cluster apart. The first job of every cluster has the same one, so that
    two trainings that start Ray themselves meet in one file, and an engine can load the other one's weights without a
    word. A socket's path may have 107 characters, so the session's own name is too long for it.
    """
    context = ray.get_runtime_context()
    session = hashlib.sha256(context.get_session_name().encode()).hexdigest()[:12]
    return f"{context.get_job_id()}-{session}"


def name_sender(module: Any) -> None:
    """The trainer's end has a socket of this job."""

    @around(module.ServerAdapter, "__init__")
    def __init__(verls: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        verls(self, *args, **kwargs)
        job_id = ray.get_runtime_context().get_job_id()
        self.zmq_handle = self.zmq_handle.replace(f"-{job_id}-replica-", f"-{job_key()}-replica-")


def name_receiver(module: Any) -> None:
    """The engine's end looks for the same."""

    @around(module.vLLMHttpServer, "__init__")
    def __init__(verls: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        verls(self, *args, **kwargs)
        # The engine's processes, started later, take it from the environment.
        os.environ["VERL_RAY_JOB_ID"] = job_key()


def retry_at_once(module: Any) -> None:
    """An engine that is asked for new weights before their sender listens tries again after 1 ms, not after 100 ms.

    verl starts the engine's receiver first and binds the sender's socket then (``ServerAdapter.update_weights``). Whichever
    is quicker decides: a receiver that finds no socket waits for ZeroMQ's default reconnect interval, and the engine stands
    still meanwhile. With a small model about every second sync did: loading took 120 to 190 ms instead of 20.
    """

    def _init_socket(self: Any) -> None:
        self.socket = self.zmq_context.socket(zmq.REP)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RETRY_MS)
        self.socket.connect(self.zmq_handle)

    module.BucketedWeightReceiver._init_socket = _init_socket
