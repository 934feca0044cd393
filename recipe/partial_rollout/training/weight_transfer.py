"""How new weights get from the trainer into the engines, in two parts: ``stage`` while they decode, ``load`` while held.

Each part has a deadline, and an eye on the replicas: verl's sender waits for the receiver's answer without looking at the
receiver's error, so a sync that fails in an engine would hang whoever sends to it. A replica that is dead before the sync
is restarted for it (PR); one that dies during it ends the run. What else PR does around a sync is the driver's::

    transfer.stage -> driver.loading -> transfer.load -> (end of driver.loading)

===========  =========================================  ==================================================================
backend      ``stage``                                  ``load``
===========  =========================================  ==================================================================
``naive``    nothing                                    each trainer sends to the engine on its own devices
with cache   the trainer packs its weights (``shm``)    the worker beside each engine reads them, at no cost to the trainer
the others   nothing                                    verl's gather and broadcast (``nccl``); not run, for lack of GPUs
===========  =========================================  ==================================================================
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NoReturn

from ray.exceptions import RayActorError, RayError
from verl.checkpoint_engine import CheckpointEngineManager
from verl.checkpoint_engine.base import CheckpointEngineWithCache
from verl.utils.ray_utils import auto_await
from verl.workers.rollout.replica import RolloutReplica

from recipe.partial_rollout.records.run_log import Phase
from recipe.partial_rollout.rollout.session import RunSession
from recipe.partial_rollout.waits import finished, is_out_of_reach, one_line, result_of, wait

_LOOK_EVERY_S = 1.0
"""interval at which replicas are asked whether the sync failed on their side; a sync that succeeds never waits for it"""
_ANSWER_S = 10.0


class WeightSyncError(RuntimeError):
    """New weights did not reach the replicas."""


class WeightTransfer:
    """Between trainers and engines that share their devices, and the seam for others.

    Both parts raise ``WeightSyncError``, which names the trainer or the replica that failed, or ``NoAnswerError``.

    Args:
        verls: the checkpoint manager that verl made.
        deadline_s: seconds for each part.
    """

    def __init__(self, verls: CheckpointEngineManager, deadline_s: float) -> None:
        self._verls = verls
        self._deadline_s = deadline_s

    async def stage(self, version: int) -> bool:
        """Do all that can be done while the engines decode; returns whether that was anything."""
        return False

    async def load(self, version: int) -> None:
        """Every engine, idle and alive, gets the weights and learns their version."""
        what = f"weight sync of version {version}"
        await self._watched(self._sent(version, what), what, self._verls.replicas)

    async def _watched(self, part: Awaitable[Any], what: str, replicas: Sequence[RolloutReplica] = ()) -> None:
        """Wait for ``part``, which raises if its own side fails, while ``replicas`` are asked for the error of theirs."""
        names = ", ".join(replica.server_address for replica in replicas)
        whose = f"{what} to vLLM replicas {names}" if names else f"{what} by the trainer"
        try:
            await wait(part, self._deadline_s, whose, "weight_sync_s", watches=[_watch(replicas, what)])
        except WeightSyncError:
            # What fails here may fail because a replica has failed before: its error is the one to report.
            await _raise_failure(replicas, what)
            raise

    async def _sent(self, version: int, what: str) -> None:
        trainers: Any = self._verls.actor_wg
        sending = trainers.update_weights(global_steps=version, mode=self._verls.backend)
        await _all(sending, f"{what} failed in the trainer")


def transfer_of(verls: CheckpointEngineManager, deadline_s: float) -> WeightTransfer:
    """The transfer for ``rollout.checkpoint_engine.backend``."""
    if verls.backend == "naive":
        return WeightTransfer(verls, deadline_s)
    if issubclass(verls.backend_cls, CheckpointEngineWithCache):
        return CachedTransfer(verls, deadline_s)
    return HeldTransfer(verls, deadline_s)


class CachedTransfer(WeightTransfer):
    """The trainer is done when its weights are packed; the engines load them on their own.

    A replica that has died, and was restarted since, loads like the others. One that dies while it loads ends the run.
    """

    def __init__(self, verls: CheckpointEngineManager, deadline_s: float) -> None:
        super().__init__(verls, deadline_s)
        self._met = False
        self._freeing: list[Any] = []
        """references to the trainers' removal of what was loaded"""

    async def stage(self, version: int) -> bool:
        what = f"staging of version {version}"
        if not self._met:
            await self._watched(self._meet(), "the first meeting of trainers and engines")
            self._met = True
        # What the engines have loaded is removed meanwhile, and the trainer must be done with that.
        freed, self._freeing = self._freeing, []
        await self._watched(_all(freed, f"{what} failed in the trainer"), what)
        await self._watched(self._sent(version, what), what)
        return True

    async def load(self, version: int) -> None:
        what, replicas = f"loading of version {version}", self._verls.replicas
        loads = [
            _all(
                [worker.update_weights.remote(global_steps=version) for worker in replica.workers],
                f"{what} failed in vLLM replica {replica.server_address}",
            )
            for replica in replicas
        ]
        await self._watched(asyncio.gather(*loads), what, replicas)
        self._freeing = self._ask_trainers("finalize")

    async def _meet(self) -> None:
        """Have the backend refuse places between which it cannot transfer, such as two nodes."""
        verls = self._verls
        workers: list[Any] = [worker for replica in verls.replicas for worker in replica.workers]
        asked = [*self._ask_trainers("prepare"), *[w.execute_checkpoint_engine.remote("prepare") for w in workers]]
        places = await _all(asked, "the first meeting of trainers and engines failed")
        try:
            verls.backend_cls.build_topology(len(places) - len(workers), len(workers), places)
        except ValueError as error:
            raise WeightSyncError(str(error)) from error

    def _ask_trainers(self, method: str) -> list[Any]:
        trainers: Any = self._verls.actor_wg
        return trainers.execute_checkpoint_engine([method] * trainers.world_size)


class HeldTransfer(WeightTransfer):
    """verl's own sync, without its abort: the engines are held instead. Not run on a GPU."""

    def __init__(self, verls: CheckpointEngineManager, deadline_s: float) -> None:
        super().__init__(verls, deadline_s)
        self._held = HeldCheckpointManager(verls.config, verls.actor_wg, verls.replicas)
        # verl blocks its thread. asyncio would wait for a thread of its own at the end, even after a failure.
        self._thread = ThreadPoolExecutor(1)

    async def load(self, version: int) -> None:
        what = f"weight sync of version {version}"

        async def sync() -> None:
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._held.update_weights, version)
            except RayError as error:
                raise WeightSyncError(f"{what} failed in the trainer or beside an engine: {one_line(error)}") from error

        await self._watched(sync(), what, self._held.replicas)


class HeldCheckpointManager(CheckpointEngineManager):
    """verl's manager for engines that are held while it transfers, and keep their requests and their KV cache."""

    @auto_await
    async def abort_replicas(self, reject_request: bool = False) -> None:
        """The engines are held already."""

    @auto_await
    async def resume_generation_replicas(self) -> None:
        """Who has held them resumes them."""

    @auto_await
    async def release_kv_cache_replicas(self) -> None:
        """It holds the cache of requests that go on. verl would first wait for them to end."""

    @auto_await
    async def resume_kv_cache_replicas(self) -> None:
        """It was not released."""


async def _all(refs: Iterable[Awaitable[Any]], failed: str) -> list[Any]:
    """The results of Ray's ``refs``; the first error becomes a ``WeightSyncError`` that begins with ``failed``."""
    try:
        return await asyncio.gather(*refs)
    except RayError as error:
        raise WeightSyncError(f"{failed}: {one_line(error)}") from error


async def _watch(replicas: Sequence[RolloutReplica], what: str) -> NoReturn:
    """Ask the replicas, for ever, for the error of their side."""
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        await _raise_failure(replicas, what)


async def _raise_failure(replicas: Sequence[RolloutReplica], what: str) -> None:
    """Raise ``WeightSyncError`` if one of ``replicas`` reports that the sync failed on its side, or has died."""
    for replica, error in zip(replicas, await asyncio.gather(*map(_failure_of, replicas)), strict=True):
        if error is not None:
            raise WeightSyncError(f"{what} failed in vLLM replica {replica.server_address}: {error}")


async def _failure_of(replica: RolloutReplica) -> str | None:
    try:
        return await asyncio.wait_for(result_of(replica.server_handle.weight_sync_error.remote()), _ANSWER_S)
    except TimeoutError:
        return None
    except RayActorError as died:
        return None if is_out_of_reach(died) else f"the server died: {one_line(died)}"


class RecipeCheckpointManager:
    """Stands in for verl's manager in its ``fit``.

    Args:
        verls: the checkpoint manager that verl made.
        session: of the run.
    """

    def __init__(self, verls: CheckpointEngineManager, session: RunSession) -> None:
        self._verls = verls
        self._transfer = transfer_of(verls, session.settings.deadlines.weight_sync_s)
        self._session = session
        # A validation alone starts no version: the engines load the weights as under noPR.
        self._driver = session.driver if session.settings.enable and session.trains else None

    @auto_await
    async def sleep_replicas(self) -> None:
        """As verl's, which calls it when it has a batch. PR: a dead replica is left out; separate ones decode on."""
        if self._driver is None:
            await self._verls.sleep_replicas()
        elif not self._session.settings.separate:
            await self._session.control.sleep()

    def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """End the step ``global_steps``, and send its weights to every replica as the policy version of that number.

        verl's loops call it once an update is done, also one of the critic alone. None: the version sent last, again.

        Raises:
            WeightSyncError: a replica or the trainer failed; the message names it.
            NoAnswerError: the deadline passed.
        """
        version = self._session.completed_step if global_steps is None else global_steps
        self._session.complete_step(version)
        start = time.time()
        sent: Any = {}
        if self._driver is None and self._verls.backend != "naive":
            sent = self._verls.update_weights(global_steps)  # type: ignore[arg-type]
        else:
            finished(self._send(version))
        self._session.log.add(Phase("sync", version, start, time.time()))
        return sent

    async def _send(self, version: int) -> None:
        start = time.time()
        if await self._transfer.stage(version):
            self._session.note_phase("stage", version, start, time.time())
        async with self._driver.loading(version) if self._driver else nullcontext():
            await self._transfer.load(version)
