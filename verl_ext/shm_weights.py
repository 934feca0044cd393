"""Checkpoint engine ``shm``: weights travel through a file in shared memory, from any number of trainers to any of engines.

Trainer rank 0 writes ``/dev/shm/verl-weights-JOB/VERSION``; the worker beside each engine maps it. The file is whole when
it appears, and the trainer is done when it is, so an engine may load it at any later time: verl calls this a
``CheckpointEngineWithCache``. ``finalize`` removes it. One host only.

verl finds it by two keys, in its own trainers too::

    actor_rollout_ref.rollout.checkpoint_engine.backend=shm
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=verl_ext.shm_weights
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

import ray
import torch
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.checkpoint_engine.base import CheckpointEngineWithCache

from verl_ext import job_folder, weight_file
from verl_ext.guard import VERL, require
from verl_ext.weight_socket import job_key

require("verl", VERL, "shm_weights")

BACKEND = "shm"
_POLL_S = 0.005


class ShmCheckpointEngine(CheckpointEngineWithCache):
    """One end of the transfer: a trainer's (rank 0 is the master), or an engine's.

    Args:
        bucket_size: verl's; not used, the whole model is one file.
        is_master: whether this is the trainer that writes.
        root: folder of shared memory (``checkpoint_engine.engine_kwargs.shm.root``).
        deadline_s: seconds that an engine's end waits for the file (``engine_kwargs.shm.deadline_s``).
    """

    def __init__(
        self, bucket_size: int, is_master: bool = False, root: str = "/dev/shm", deadline_s: float = 600.0
    ) -> None:
        self.is_master = is_master
        self._root = root
        self._deadline_s = deadline_s
        self._folder = job_folder.folder_of(Path(root), job_key())
        self._newest: Path | None = None
        # Kept for as long as this process lives: the lock says that the folder is in use.
        self._lock = job_folder.claim(Path(root), job_key()) if is_master else None

    def prepare(self) -> dict[str, Any]:
        return {"node_id": ray.get_runtime_context().get_node_id()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Nothing to connect.

        Raises:
            ValueError: trainers and engines are on several nodes.
        """
        nodes = {each["node_id"] for each in metadata}
        if len(nodes) > 1:
            raise ValueError(
                f"checkpoint_engine.backend=shm: trainers and engines are on {len(nodes)} nodes, and must be on one: "
                "nccl crosses nodes"
            )
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        """There is none."""

    def finalize(self) -> None:
        """Remove what was sent; all engines have loaded it."""
        if self.is_master:
            job_folder.clear(self._folder)

    async def send_weights(self, weights: Iterable[weight_file.Named], global_steps: int | None = None) -> None:
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
                weight_file.write(self._folder / str(global_steps), weights)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"{error.strerror}: {self._root} must hold the whole model (checkpoint_engine.engine_kwargs.shm.root)",
                ) from error

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[weight_file.Named, None]:
        """The tensors of version ``global_steps``, once the trainer has written them.

        Raises:
            TimeoutError: it has not, within ``deadline_s``.
            PermissionError: the folder may be another user's.
        """
        path = self._folder / str(global_steps)
        deadline = time.monotonic() + self._deadline_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the trainer did not write {path} within {self._deadline_s:g} s "
                    "(rollout.checkpoint_engine.engine_kwargs.shm.deadline_s)"
                )
            await asyncio.sleep(_POLL_S)
        job_folder.check(self._folder)
        self._newest = path
        async for named in self.get_weights():
            yield named

    async def get_weights(self) -> AsyncGenerator[weight_file.Named, None]:
        """The tensors of the version received last, unless it has been removed since."""
        if self._newest is None:
            raise RuntimeError("no weights have been received yet")
        for named in weight_file.read(self._newest):
            yield named


CheckpointEngineRegistry.register(BACKEND)(ShmCheckpointEngine)  # type: ignore[attr-defined]
