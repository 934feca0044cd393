"""The loop that claims samples and keeps a worker's slots full.

Its control flow::

    claim (long poll) ----> start or resume samples ----> finished / interrupted ----> report
          ^                  (they wait for the round)                                   |
          +------------------- grants for the slots that came free ----------------------+

A sample keeps its coroutine over interruptions; only its slot goes back to the manager. A finished turn is reported with
the next event: an interruption, a tool call, the end of the sample. If a reward call delays that, the turn is reported
and the slot goes back: the sample needs no engine any more. The end of a round leaves nothing unreported.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from recipe.partial_rollout.checkpoint.plain_codec import UnsaveableError
from recipe.partial_rollout.manager import garbage
from recipe.partial_rollout.manager.types import Grant, SampleOutput
from recipe.partial_rollout.waits import ReplicaError, one_line, result_of
from recipe.partial_rollout.worker.grant_gate import GrantGate, GrantTimeoutError
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample
from recipe.partial_rollout.worker.outbox import Outbox


class ClaimLoop:
    """Claims samples from the manager and runs them; it is their ``SlotKeeper``.

    Args:
        name: this worker's name at the manager.
        manager: handle of the manager actor.
        capacity: most samples that may hold a slot here at once.
        run: runs the agent loop of a granted sample to its end, with ``LIVE_SAMPLE`` set.
        grant_s: seconds that a sample may wait for its slot in an open round.
        sample_s: seconds that an agent loop may spend between two engine calls; None: no limit.
        rounds_end: whether garbage collections can wait for the end of a round; that of separate placement never ends.
    """

    def __init__(
        self,
        name: str,
        manager: Any,
        capacity: int,
        run: Callable[[Grant], Awaitable[SampleOutput]],
        *,
        grant_s: float,
        sample_s: float | None,
        rounds_end: bool = True,
    ) -> None:
        self._name = name
        self._manager = manager
        self._run_agent_loop = run
        self._sample_s = sample_s
        self._rounds_end = rounds_end
        self.capacity = capacity
        self._gate = GrantGate(grant_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._live: set[LiveSample] = set()
        self._calling: set[str] = set()
        self._any_finished = False
        self._quiet = asyncio.Event()
        """set whenever an engine call or the sending of reports ends, so that ``flush`` checks again"""
        self._outbox = Outbox(name, manager, granted=self.run, idle=self._quiet.set)

    async def serve(self) -> None:
        """Claim and run samples for as long as the training lasts; ends only with an error.

        Raises:
            RuntimeError: the manager and this worker disagree on a sample. Any error of a report is raised, too.
        """
        await self._manager.register_worker.remote(self._name, self.capacity)
        broken = asyncio.create_task(self._outbox.broken.wait())
        while True:
            claim = asyncio.ensure_future(result_of(self._manager.claim.remote(self._name)))
            await asyncio.wait({claim, broken}, return_when=asyncio.FIRST_COMPLETED)
            self._outbox.raise_error()
            self.run(claim.result())

    def open_round(self) -> None:
        """Engine calls are allowed from here on."""
        if self._rounds_end:
            garbage.hold()
        self._gate.open()

    def close_round(self) -> None:
        """Allow no new engine call; running ones end when their replica aborts them."""
        self._gate.close()

    async def flush(self) -> None:
        """Wait until no engine call runs and the manager knows everything; then tell it that nothing is left to report."""
        self._outbox.raise_error()
        while not self._all_reported():
            self._quiet.clear()
            await self._quiet.wait()
            self._outbox.raise_error()
        garbage.release()
        await self._manager.flushed.remote(self._name)

    def _all_reported(self) -> bool:
        """Whether no engine call runs and the manager knows everything; sends what it does not know."""
        if self._calling:
            return False
        for sample in self._live:
            # A sample in a tool or reward call, which may outlast a checkpoint, has a finished turn to report.
            self._outbox.note(sample)
        return self._outbox.empty()

    # -- samples ---------------------------------------------------------------------------------------------------

    def run(self, grants: list[Grant]) -> None:
        """Let each granted sample continue, or start it if it is new here.

        Raises:
            RuntimeError: the manager and this worker disagree on whether the sample is live here.
        """
        for grant in grants:
            if grant.held != self._gate.holds(grant.sample_id):
                raise RuntimeError(
                    f"sample {grant.sample_id}: {self._name} {'has lost' if grant.held else 'still has'} the conversation "
                    f"that the manager thinks it {'holds' if grant.held else 'does not hold'}"
                )
            self._gate.grant(grant.sample_id)
            if not grant.held:
                task = asyncio.create_task(self._run_sample(grant), name=grant.sample_id)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _run_sample(self, grant: Grant) -> None:
        sample = LiveSample(
            grant.sample_id,
            keeper=self,
            priority=grant.order,
            group=grant.group_uid,
            restored=deque(grant.segments),
            restored_tools={result["call"]: result for result in grant.tool_results},
            deadline_s=self._sample_s,
        )
        LIVE_SAMPLE.set(sample)
        self._live.add(sample)
        try:
            output = await sample.clock.run(self._run_agent_loop(grant))
        # A library may cancel what it awaits and let that out: the sample has failed like any other.
        except (Exception, asyncio.CancelledError) as error:
            if _ends_the_run(error, first=not self._any_finished):
                await self._manager.abandon.remote(one_line(error))
            else:
                self._outbox.fail(sample, one_line(error))
        else:
            self._any_finished = True
            self._outbox.finish(sample, output)
        self._live.discard(sample)
        self._gate.forget(grant.sample_id)
        self._outbox.send()

    # -- slots (``SlotKeeper``) ------------------------------------------------------------------------------------

    def holds_slot(self, sample_id: str) -> bool:
        """Whether ``sample_id`` may call the engine once its round is open."""
        return self._gate.granted(sample_id)

    @contextlib.asynccontextmanager
    async def engine_call(self, sample: LiveSample) -> AsyncIterator[None]:
        """Entered once the sample holds a slot in an open round."""
        if sample.has_unsent and not self._gate.is_open:
            # A checkpoint may be taken before its next call.
            self.report_now(sample)
        with sample.clock.stopped():
            await self._gate.wait(sample.id)
            self._calling.add(sample.id)
            try:
                yield
            finally:
                self._calling.discard(sample.id)
                self._quiet.set()

    def release_slot(self, sample: LiveSample) -> None:
        """Give the slot back, and report what the manager does not know about the sample."""
        self._gate.revoke(sample.id)
        self._outbox.interrupt(sample)
        self._outbox.send()

    def report_now(self, sample: LiveSample) -> None:
        """Report what the manager does not know about the sample."""
        self._outbox.note(sample)
        self._outbox.send()

    def leave(self, sample: LiveSample) -> None:
        """As ``release_slot``, for a sample that goes on without an engine: its reward or a tool takes long."""
        self._outbox.leave(sample)
        self._outbox.send()

    async def tell(self, sample: LiveSample) -> None:
        """As ``report_now``; returns once the manager knows.

        Raises:
            RuntimeError: the manager no longer takes reports of this worker.
        """
        await self._outbox.tell(sample)


def _ends_the_run(error: BaseException, *, first: bool) -> bool:
    """Whether a retry cannot help: no replica is left, its slot did not come in time, or the ``first`` sample to finish
    has an output that no checkpoint can hold, as all the others probably will."""
    if isinstance(error, UnsaveableError):
        return first
    return isinstance(error, GrantTimeoutError) or (isinstance(error, ReplicaError) and error.dead)
