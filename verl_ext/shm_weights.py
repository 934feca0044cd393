"""Checkpoint engine ``shm``: trainers send weights to engines, any number of each, by a file in shared memory.

Trainer rank 0 writes ``/dev/shm/verl-weights-JOB/VERSION``; the worker beside each engine maps it. The file appears
under this name only when it is complete. The trainer does not wait for the engines, which may load the file at any
later time: verl calls this a ``CheckpointEngineWithCache``. ``finalize`` removes the folder. A run that is killed
during a sync leaves it behind. Trainers and engines must be on one host.

verl finds it by two keys, in its own trainers too::

    actor_rollout_ref.rollout.checkpoint_engine.backend=shm
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_ext.shm_weights

It may go when verl has an engine that needs neither a GPU nor its own process group.
"""

from __future__ import annotations

import asyncio
import json
import math
import mmap
import shutil
from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngineWithCache

from verl_ext.guard import VERL, require
from verl_ext.sockets import job_key

require("verl", VERL, "shm_weights")

BACKEND = "shm"
Named = tuple[str, torch.Tensor]
_POLL_S = 0.005
"""seconds between two looks whether the trainer has written a version"""
_ALIGNMENT, _LENGTH_BYTES = 64, 8


class ShmCheckpointEngine(CheckpointEngineWithCache):
    """One end of the transfer: a trainer's (rank 0 is the master), or an engine's.

    Args:
        bucket_size: verl's; not used, the whole model is one file.
        is_master: whether this is the trainer that writes.
        root: folder of shared memory (``checkpoint_engine.engine_kwargs.shm.root``).
    """

    def __init__(self, bucket_size: int, is_master: bool = False, root: str = "/dev/shm") -> None:
        self.is_master = is_master
        self._root = root
        self._folder = Path(root) / f"verl-weights-{job_key()}"
        self._newest = self._folder / "none"

    def prepare(self) -> dict[str, Any]:
        return {"node_id": ray.get_runtime_context().get_node_id()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return no arguments for either side: there is nothing to connect.

        Raises:
            ValueError: trainers and engines are on several nodes.
        """
        nodes = {each["node_id"] for each in metadata}
        if len(nodes) > 1:
            raise ValueError(
                f"checkpoint_engine.backend=shm: trainers and engines are on {len(nodes)} nodes, and must be on one: "
                "use nccl across nodes"
            )
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        """Do nothing: there is no process group."""

    def finalize(self) -> None:
        """Remove the files, after all engines have loaded them. A process that has mapped one keeps its memory."""
        if self.is_master:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def send_weights(self, weights: Iterable[Named], global_steps: int | None = None) -> None:
        """Write the file of version ``global_steps``; each rank must iterate, because gathering a tensor takes them all.

        Raises:
            OSError: shared memory is full.
        """
        with torch.no_grad():
            if not self.is_master:
                for _ in weights:
                    pass
                return
            try:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                write_file(self._folder / str(global_steps), weights)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"{error.strerror}: {self._root} must hold the whole model (checkpoint_engine.engine_kwargs.shm.root)",
                ) from error

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[Named, None]:
        """The tensors of version ``global_steps``, once the trainer has written them; the caller sets the deadline."""
        path = self._folder / str(global_steps)
        while not path.exists():
            await asyncio.sleep(_POLL_S)
        self._newest = path
        async for named in self.get_weights():
            yield named

    async def get_weights(self) -> AsyncGenerator[Named, None]:
        """The tensors of the version received last, unless it has been removed since."""
        for named in read_file(self._newest):
            yield named


CheckpointEngineRegistry.register(BACKEND)(ShmCheckpointEngine)  # type: ignore[attr-defined]


# -- a file of named tensors -------------------------------------------------------------------------------------------


def write_file(path: Path, tensors: Iterable[Named]) -> None:
    """Write ``tensors``, of any device, shape and dtype, and replace ``path`` by the result.

    Layout: the bytes of each tensor, at a multiple of 64; an index, as JSON; the length
    of the index in 8 bytes. (safetensors puts its index first, so it needs all tensors at once. Here the trainer
    gathers one after the other and never holds the whole model.)

    Raises:
        OSError: there is no room. Then nothing is left of the new file, and ``path`` is as it was.
    """
    part = path.with_name(f"{path.name}.part")
    index = []
    try:
        with part.open("wb") as file:
            for name, tensor in tensors:
                at = file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
                flat = tensor.detach().reshape(-1).to("cpu")
                index.append((name, str(flat.dtype).removeprefix("torch."), list(tensor.shape), at))
                file.write(flat.view(torch.uint8).numpy().data)
            words = json.dumps(index).encode()
            file.write(words + len(words).to_bytes(_LENGTH_BYTES, "little"))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_file(path: Path) -> Iterator[Named]:
    """The tensors of the file, in the order of their writing, on the CPU and without a copy.

    They stay as they are when the file is removed or replaced, and writing to one changes neither the file nor what
    other processes read.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    end = len(mapped) - _LENGTH_BYTES
    length = int.from_bytes(mapped[end:], "little")
    for name, dtype, shape, at in json.loads(mapped[end - length : end]):
        kind, count = getattr(torch, dtype), math.prod(shape)
        flat = torch.frombuffer(mapped, dtype=kind, count=count, offset=at) if count else torch.empty(0, dtype=kind)
        yield name, flat.view(shape)
