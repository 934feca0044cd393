"""Transfers new weights into the engines: packs them while the engines decode, loads them while the engines are held.

Each part has a deadline and watches the replicas: verl's sender waits for the receiver's answer without looking at the
receiver's error, so a sync that fails in an engine would hang its sender. A replica that is dead before the sync is
restarted for it (PR); one that dies during it ends the run. The driver does the rest of what PR does around a sync::

    stage -> driver.loading -> load_staged or send -> (end of driver.loading)

===========  =========================================  ==================================================================
backend      while they decode: ``stage``               while they are held: ``load_staged`` with a cache, else ``send``
===========  =========================================  ==================================================================
``naive``    nothing                                    each trainer sends to the engine on its own devices
with cache   the trainer packs its weights (``shm``)    the worker beside each engine reads them, at no cost to the trainer
the others   nothing                                    verl's gather and broadcast (``nccl``); not run, for lack of GPUs
===========  =========================================  ==================================================================
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn

from ray.exceptions import RayActorError, RayError
from verl.checkpoint_engine import CheckpointEngineManager
from verl.checkpoint_engine.base import CheckpointEngineWithCache
from verl.utils.ray_utils import auto_await
from verl.workers.rollout.replica import RolloutReplica

from recipe.partial_rollout.manager.types import RolloutFailedError
from recipe.partial_rollout.records.run_log import Phase
from recipe.partial_rollout.rollout.driver import Driver
from recipe.partial_rollout.rollout.recorder import Recorder
from recipe.partial_rollout.waits import in_thread, is_out_of_reach, one_line, result_of, wait

_LOOK_EVERY_S = 1.0
"""interval at which replicas are asked whether the sync failed on their side; a sync that succeeds never waits for it"""
_ANSWER_S = 10.0
"""seconds in which a replica's server must say whether the sync failed; a server that is late is taken to be loading"""


class RecipeCheckpointManager:
    """Stands in for verl's manager in its ``fit``, and sends weights to engines that are idle or held.

    A replica that has died, and was restarted since, loads like the others. One that dies while it loads ends the run.

    Args:
        verls: the checkpoint manager that verl made.
        recorder: the run's recorder; its settings have the deadline of each part.
        end_step: ends the step whose number it is given, unless the step has ended; returns the last step that has ended.
        driver: PR's driver. None under noPR, and for a validation alone, which starts no version.
    """

    def __init__(
        self,
        verls: CheckpointEngineManager,
        recorder: Recorder,
        end_step: Callable[[int | None], int],
        driver: Driver | None,
    ) -> None:
        self._verls, self._recorder, self._end_step, self._driver = verls, recorder, end_step, driver
        # Ask the class, not the backend's name: a user may register a backend of their own with a cache.
        self._cached = issubclass(verls.backend_cls, CheckpointEngineWithCache)
        self._freeing: list[Any] = []
        """Ray references of the calls in which the trainers delete the packed weights that the engines have loaded"""
        if self._cached:
            # Now, before a step is trained whose weights could not be transferred.
            asyncio.run(self._watched(self._meet(), "preparation of the weight transfer"))

    @auto_await
    async def sleep_replicas(self) -> None:
        """Put the replicas to sleep once verl has a batch. PR leaves out dead ones, and separate ones decode on."""
        await (self._verls if self._driver is None else self._driver).sleep_replicas()

    def update_weights(self, global_steps: int | None = None) -> None:
        """End the step ``global_steps``, and send its weights to every replica as the policy version of that number.

        verl's loops call it once an update is done, also one of the critic alone. None: the version sent last, again.

        Raises:
            RolloutFailedError: a replica or the trainer failed; the message names it.
            NoAnswerError: the deadline passed.
        """
        version, start = self._end_step(global_steps), time.time()
        # noPR sends as PR does, for the deadline and for the name of the engine that fails.
        asyncio.run(self._transfer(version, start))
        self._recorder.log.add(Phase("sync", version, start, time.time()))

    async def _transfer(self, version: int, start: float) -> None:
        if self._cached:
            await self.stage(version)
            self._recorder.phase("stage", version, start)
        async with self._driver.loading(version) if self._driver else nullcontext():
            await (self.load_staged if self._cached else self.send)(version)

    async def send(self, version: int) -> None:
        """Send the weights as ``version`` to every engine by a backend without a cache; all are idle or held."""
        what, verls = f"weight sync of version {version}", self._verls
        if verls.backend == "naive":
            sync = self._sent(version)
        else:
            held = HeldCheckpointManager(verls.config, verls.actor_wg, verls.replicas)
            # verl blocks its thread until both sides are done.
            sync = [in_thread(partial(held.update_weights, version))]
        await self._watched(_all(sync, f"{what} failed in the trainer"), what, verls.replicas)

    async def stage(self, version: int) -> None:
        """Have the trainers pack their weights while the engines decode."""
        what = f"staging of version {version}"
        # The trainers may still be removing the weights that the engines loaded last.
        freed, self._freeing = self._freeing, []
        await self._watched(_all(freed, f"{what} failed in the trainer"), what)
        await self._watched(_all(self._sent(version), f"{what} failed in the trainer"), what)

    async def load_staged(self, version: int) -> None:
        """Have every engine load what is packed, and wait. The trainers' removal of it is awaited by the next ``stage``."""
        what, replicas = f"loading of version {version}", self._verls.replicas
        # By replica, so that the error names the one that failed.
        loads = [
            _all(
                [worker.update_weights.remote(global_steps=version) for worker in replica.workers],
                f"{what} failed in vLLM replica {replica.server_address}",
            )
            for replica in replicas
        ]
        await self._watched(asyncio.gather(*loads), what, replicas)
        # Not awaited, or the trainer would wait for it; the next staging does.
        self._freeing = self._ask_trainers("finalize")

    def _sent(self, version: int) -> list[Any]:
        """Have the trainers send or pack their weights; return a Ray reference for each trainer."""
        trainers: Any = self._verls.actor_wg
        return trainers.update_weights(global_steps=version, mode=self._verls.backend)

    async def _watched(self, part: Awaitable[Any], what: str, replicas: Sequence[RolloutReplica] = ()) -> None:
        """Wait for ``part``, which raises if the sending side fails, and ask ``replicas`` for errors of theirs."""
        deadline_s = self._recorder.settings.deadlines.weight_sync_s
        names = ", ".join(replica.server_address for replica in replicas)
        whose = f"{what} to vLLM replicas {names}" if names else f"{what} by the trainer"
        try:
            await wait(part, deadline_s, whose, "weight_sync_s", watches=[_watch(replicas, what)])
        except RolloutFailedError:
            # What fails here may fail because a replica has failed before: its error is the one to report.
            await _raise_failure(replicas, what)
            raise

    async def _meet(self) -> None:
        """Collect the nodes of trainers and engines; the backend raises if it cannot transfer between them."""
        verls = self._verls
        workers: list[Any] = [worker for replica in verls.replicas for worker in replica.workers]
        pending = [*self._ask_trainers("prepare"), *[w.execute_checkpoint_engine.remote("prepare") for w in workers]]
        nodes = await _all(pending, "preparation of the weight transfer failed")
        try:
            verls.backend_cls.build_topology(len(nodes) - len(workers), len(workers), nodes)
        except ValueError as error:
            raise RolloutFailedError(str(error)) from error

    def _ask_trainers(self, method: str) -> list[Any]:
        trainers: Any = self._verls.actor_wg
        return trainers.execute_checkpoint_engine([method] * trainers.world_size)


class HeldCheckpointManager(CheckpointEngineManager):
    """verl's manager for engines that the driver holds, with their requests and KV cache. Not run on a GPU."""

    @auto_await
    async def abort_replicas(self, reject_request: bool = False) -> None:
        """Do nothing: a held engine makes no token, and its requests go on with their cache when the driver resumes it."""

    # verl would otherwise wait for the held requests to end, and give their cache away.
    resume_generation_replicas = release_kv_cache_replicas = resume_kv_cache_replicas = abort_replicas


async def _all(refs: Iterable[Awaitable[Any]], failed: str) -> list[Any]:
    """Await ``refs``; the first error of Ray's becomes a ``RolloutFailedError`` that begins with ``failed``."""
    try:
        return await asyncio.gather(*refs)
    except RayError as error:
        raise RolloutFailedError(f"{failed}: {one_line(error)}") from error


async def _watch(replicas: Sequence[RolloutReplica], what: str) -> NoReturn:
    """Ask ``replicas`` again and again; raise ``RolloutFailedError`` once one reports a failed sync or has died."""
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        await _raise_failure(replicas, what)


async def _raise_failure(replicas: Sequence[RolloutReplica], what: str) -> None:
    """Raise ``RolloutFailedError`` if one of ``replicas`` reports that the sync failed on its side, or has died."""
    for replica, error in zip(replicas, await asyncio.gather(*map(_failure_of, replicas)), strict=True):
        if error is not None:
            raise RolloutFailedError(f"{what} failed in vLLM replica {replica.server_address}: {error}")


async def _failure_of(replica: RolloutReplica) -> str | None:
    try:
        return await asyncio.wait_for(result_of(replica.server_handle.weight_sync_error.remote()), _ANSWER_S)
    except TimeoutError:
        # A server that is busy loading has not failed; the deadline of the sync ends the wait.
        return None
    except RayActorError as died:
        return None if is_out_of_reach(died) else f"the server died: {one_line(died)}"
