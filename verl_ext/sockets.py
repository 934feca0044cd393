"""Patches of verl's sockets: a trainer and its engine meet at a name that no other run has, trainers at a free port.

They may go when verl names the first by the run, and listens on the port that it finds.
"""

from __future__ import annotations

import hashlib
import os
import random
from typing import Any

import ray

from verl_ext.guard import around


def job_key() -> str:
    """Names this job among all that this machine runs: Ray's job id and a digest of its session.

    verl takes the job id, which tells jobs of one cluster apart. The first job of every cluster has the same one, so
    that two trainings that start Ray themselves meet in one file, and an engine can load the other one's weights
    without a word. A socket's path may have 107 characters, so the session's own name is too long for it.
    """
    context = ray.get_runtime_context()
    session = hashlib.sha256(context.get_session_name().encode()).hexdigest()[:12]
    return f"{context.get_job_id()}-{session}"


def name_sender(module: Any) -> None:
    """Name the trainer's end of the weight sync's socket by this job."""

    @around(module.ServerAdapter, "__init__")
    def __init__(verls: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        verls(self, *args, **kwargs)
        job_id = ray.get_runtime_context().get_job_id()
        self.zmq_handle = self.zmq_handle.replace(f"-{job_id}-replica-", f"-{job_key()}-replica-")


def name_receiver(module: Any) -> None:
    """Let the engine's end look for the socket that ``name_sender`` has named."""

    @around(module.vLLMHttpServer, "__init__")
    def __init__(verls: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        verls(self, *args, **kwargs)
        # The engine's processes, started later, take it from the environment.
        os.environ["VERL_RAY_JOB_ID"] = job_key()


def choose_port(module: Any) -> None:
    """Let the trainers of a group meet at a port below those that Linux assigns (32,768 and up).

    verl finds a free port and listens on it seconds later, in another process. By then one of Ray's many connections
    may have taken a port that the kernel assigns, and the training fails to start with EADDRINUSE.
    """

    @around(module.RayWorkerGroup, "__init__")
    def __init__(verls: Any, *args: Any, **kwargs: Any) -> None:
        first = random.randrange(10_000, 31_000)
        verls(*args, **{"master_port_range": [first, first + 1_000], **kwargs})
