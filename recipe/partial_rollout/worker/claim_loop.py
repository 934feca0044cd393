"""The loop that claims samples and keeps a worker's slots full.

Its control flow::

    claim (long poll) ----> start or resume samples ----> finished / interrupted ----> report
          ^                  (they wait for the round)                                   |
          +------------------- grants for the slots that came free ----------------------+

A sample keeps its coroutine over interruptions; only its slot goes back to the manager. A finished turn is reported with
the next event: an interruption, or the end of the sample. If a tool or its reward takes long, the turn is reported and the
slot goes back; the sample asks for one again with its next engine call. The end of a round leaves nothing unreported.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NoReturn

from recipe.partial_rollout.checkpoint.plain_state import UnsaveableError
from recipe.partial_rollout.manager.types import (
    Added,
    Event,
    Failed,
    Finished,
    Grant,
    Interrupted,
    Parked,
    Report,
    SampleOutput,
)
from recipe.partial_rollout.waits import FirstErrors, ReplicaError, ToldError, result_of, wait
from recipe.partial_rollout.worker.live_sample import LiveSample, SlotState
from recipe.partial_rollout.worker.rewards import RewardError, RewardWorkersLostError

GRANT_S = 7200.0
"""seconds that a sample may wait for its slot in an open round: longer than any step, so that only a trainer that has
stopped stepping ends a run by it"""
_BEGIN_S = 0.01
"""seconds of this process that a loop takes until its first engine call: to read the chat template, in an executor"""


class GrantTimeoutError(TimeoutError):
    """A sample waited too long for its slot."""


class Outbox:
    """Collects what happens to samples and reports it, one report at a time.

    What happens while one is under way goes out with the next.

    Args:
        worker: name in the reports.
        manager: handle of the manager actor.
        granted: called with the grants in the answer to each report.
    """

    def __init__(self, worker: str, manager: Any, granted: Callable[[list[Grant]], None]) -> None:
        self._manager = manager
        self._granted = granted
        self.unsent = Report(worker)
        """what happened since the last report"""
        self._known = asyncio.Event()
        """set once the manager has what is unsent now"""
        self._sends = asyncio.Event()
        """set while a report is to be sent"""
        self._errors = FirstErrors()

    async def serve(self) -> NoReturn:
        """Send what is to be sent. The content of a report that fails is lost: its error ends the worker."""
        while True:
            await self._sends.wait()
            self._sends.clear()
            report, self.unsent = self.unsent, Report(self.unsent.worker)
            known, self._known = self._known, asyncio.Event()
            if report:
                self._granted(await self._manager.report.remote(report))
            known.set()

    def send(self) -> None:
        """Send a report now, or as soon as the one under way has been answered."""
        self._sends.set()

    async def sent(self) -> None:
        """As ``send``; returns once the manager knows. It never knows what a report said that failed."""
        known = self._known
        self.send()
        await known.wait()

    def note(self, sample: LiveSample) -> None:
        """Add what the manager does not know about ``sample`` to the next report."""
        if sample.unsent:
            self.unsent.events.append(Added(sample.id, sample.unsent))
            sample.unsent = []

    def note_error(self, error: BaseException) -> ToldError:
        """Add ``error`` to the next report if it is the first of its kind; returns it as text."""
        told = ToldError.of(error)
        if self._errors.note(told):
            self.unsent.errors.append(told)
        return told

    def note_rescored(self, error: RewardError) -> None:
        """Report a reward that failed and is asked for again."""
        self.unsent.rescored += 1
        self.note_error(error)

    def report_now(self, sample: LiveSample, *events: Event) -> None:
        """Send what the manager does not know about ``sample``, then ``events``, and all else that is unsent."""
        self.note(sample)
        self.unsent.events += events
        self.send()


class ClaimLoop:
    """Claims samples from the manager, runs them, and grants them its slots; it alone writes ``LiveSample.slot``.

    Args:
        name: this worker's name at the manager.
        manager: handle of the manager actor.
        capacity: most samples that may hold a slot here at once.
        run: runs the agent loop of a granted sample to its end.
        sample_s: seconds that an agent loop may spend between two engine calls; None: no limit.
        release_after_s: seconds without an engine call after which a sample gives its slot to another.
    """

    def __init__(
        self,
        name: str,
        manager: Any,
        capacity: int,
        run: Callable[[LiveSample], Coroutine[Any, Any, SampleOutput]],
        *,
        sample_s: float | None,
        release_after_s: float = math.inf,
    ) -> None:
        self.name = name
        self.manager = manager
        self._run_agent_loop = run
        self._sample_s = sample_s
        self.capacity = capacity
        self._release_after_s = release_after_s
        self._tasks: set[asyncio.Task[None]] = set()
        self.samples: dict[str, LiveSample] = {}
        """those whose agent loops have begun here and not ended, by id"""
        self._beginning: set[str] = set()
        """of these, those that have made no engine call"""
        self._running = 0
        """requests that no replica has answered"""
        self.open = asyncio.Event()
        """set while the round is open: slots are granted before, while the trainer updates, and samples wait for it"""
        self._ended = asyncio.Event()
        """set whenever a request ends"""
        self._any_finished = False
        self.outbox = Outbox(name, manager, granted=self.run)

    async def serve(self) -> None:
        """Claim and run samples for as long as the training lasts; ends only with an error.

        Raises:
            RuntimeError: the manager and this worker disagree on a sample. Any error of a report is raised, too.
        """
        await self.manager.register_worker.remote(self.name, self.capacity)
        await wait(self._claim(), None, "claiming samples", watches=[self.outbox.serve()])

    async def _claim(self) -> NoReturn:
        while True:
            self.run(await result_of(self.manager.claim.remote(self.name)))

    async def reported(self) -> None:
        """Wait until no engine call runs and the manager knows everything; sends what it does not know."""
        while self._running:
            self._ended.clear()
            await self._ended.wait()
        for sample in self.samples.values():
            # A sample in a tool or reward call, which may outlast a checkpoint, has a finished turn to report.
            self.outbox.note(sample)
        await self.outbox.sent()

    # -- samples ---------------------------------------------------------------------------------------------------

    def run(self, grants: list[Grant]) -> None:
        """Let each granted sample continue, or start it if it is new here.

        Raises:
            RuntimeError: the manager and this worker disagree on whether the sample is live here.
        """
        for grant in grants:
            sample = self.samples.get(grant.sample_id)
            if grant.held != (sample is not None):
                raise RuntimeError(
                    f"sample {grant.sample_id}: {self.name} {'has lost' if grant.held else 'still has'} the conversation "
                    f"that the manager thinks it {'holds' if grant.held else 'does not hold'}"
                )
            if sample is None:
                sample = self.samples[grant.sample_id] = LiveSample(grant, self, self._sample_s)
                self._beginning.add(sample.id)
                task = asyncio.create_task(self._run_sample(sample), name=sample.id)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            sample.slot = SlotState.HELD
            sample.granted.set()
            if grant.held:
                self._settle(sample)

    async def _run_sample(self, sample: LiveSample) -> None:
        try:
            output = await sample.clock.run(self._begin(sample))
            await self._end(sample)
        # A library may cancel what it awaits and let that out: the sample has failed like any other.
        except (Exception, asyncio.CancelledError) as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            await self._fail(sample, error)
        else:
            self._any_finished = True
            # It stands for all that is not reported yet.
            self.outbox.unsent.events.append(Finished(sample.id, output))
        del self.samples[sample.id]
        self._beginning.discard(sample.id)
        self._settle(sample)
        self.outbox.send()

    async def _begin(self, sample: LiveSample) -> SampleOutput:
        # Only now: of hundreds that are granted at once the last begins long after the first.
        self._settle(sample)
        return await self._run_agent_loop(sample)

    async def _fail(self, sample: LiveSample, error: BaseException) -> None:
        ends_the_run = _ends_the_run(error, first=not self._any_finished)
        if not ends_the_run:
            try:
                await self._end(sample)
            except GrantTimeoutError as late:
                error, ends_the_run = late, True
        told, outbox = self.outbox.note_error(error), self.outbox
        if ends_the_run:
            outbox.unsent.fatal = told.line
            return
        times = error.times if isinstance(error, RewardError) else 1
        outbox.report_now(sample, Failed(sample.id, told.line, times))

    async def _end(self, sample: LiveSample) -> None:
        """Silence the calls that the agent loop has left behind; returns once the sample's end can be reported."""
        sample.ended = True
        if sample.slot is SlotState.ASKED:
            # The loop no longer awaits the call that asks, and the manager may be granting the slot at this moment.
            async with self._grant_in_time(sample):
                await sample.granted.wait()

    # -- slots ---------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def engine_call(self, sample: LiveSample) -> AsyncIterator[None]:
        """Entered once the sample holds a slot in an open round; several calls of a sample share it.

        All together they are no more requests than the worker has slots: a second call of a sample takes the place of a
        sample that has a slot and does not decode, or waits.

        Raises:
            asyncio.CancelledError: the agent loop has ended and left the call behind.
        """
        _require_listener(sample)
        sample.calling += 1
        self._beginning.discard(sample.id)
        if sample.slot is SlotState.AWAY:
            self._ask_for_slot(sample)
        try:
            async with self._grant_in_time(sample):
                while (obstacle := self._obstacle(sample)) is not None:
                    await obstacle.wait()
            _require_listener(sample)
            self._running += 1
            try:
                yield
            finally:
                self._running -= 1
        finally:
            sample.calling -= 1
            self._settle(sample)
            self._ended.set()

    def _obstacle(self, sample: LiveSample) -> asyncio.Event | None:
        """What a call of ``sample`` has to wait for; None: it may run."""
        if not sample.granted.is_set():
            return sample.granted
        if not self.open.is_set():
            return self.open
        if self._running < self.capacity or self._running < sum(
            each.granted.is_set() for each in self.samples.values()
        ):
            return None
        self._ended.clear()
        return self._ended

    @contextlib.asynccontextmanager
    async def _grant_in_time(self, sample: LiveSample) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(GRANT_S):
                yield
        except TimeoutError as error:
            raise GrantTimeoutError(
                f"sample {sample.id} was not granted a slot in an open round within {GRANT_S:g} s; "
                "is the trainer still stepping?"
            ) from error

    def release_slot(self, sample: LiveSample) -> None:
        """Inside ``engine_call``, whose request was interrupted: give the slot back, and ask for one again."""
        _require_listener(sample)
        if sample.slot is SlotState.HELD:
            sample.granted.clear()
            self._ask_for_slot(sample)
        else:
            # A call beside this one has asked.
            self.outbox.report_now(sample)

    def _settle(self, sample: LiveSample) -> None:
        """See to it that a sample without engine calls leaves its slot."""
        if sample.late is not None:
            sample.late.cancel()
            sample.late = None
        alive = self.samples.get(sample.id) is sample
        if alive and not sample.calling and self._release_after_s < math.inf:
            # Of hundreds that begin at once each waits for the others.
            begin_s = _BEGIN_S * len(self._beginning) if sample.id in self._beginning else 0
            seconds = self._release_after_s + begin_s
            sample.late = asyncio.get_running_loop().call_later(seconds, self._leave, sample)

    def _ask_for_slot(self, sample: LiveSample) -> None:
        """Have the manager grant a slot again."""
        sample.slot = SlotState.ASKED
        self.outbox.report_now(sample, Interrupted(sample.id))

    def _leave(self, sample: LiveSample) -> None:
        """The slot goes to another sample: this one has made no engine call for a while, whatever it awaits."""
        if sample.calling or sample.slot is not SlotState.HELD:
            return
        sample.slot = SlotState.AWAY
        sample.granted.clear()
        self.outbox.report_now(sample, Parked(sample.id))


def _require_listener(sample: LiveSample) -> None:
    """Cancel an engine call that an agent loop has left behind: it may not hold or ask for the slot of another sample."""
    if sample.ended:
        raise asyncio.CancelledError


def _ends_the_run(error: BaseException, *, first: bool) -> bool:
    """Whether a retry cannot help: no replica or reward worker is left, its slot did not come in time, or the ``first``
    sample to finish has an output that no checkpoint can hold, as all the others probably will."""
    if isinstance(error, UnsaveableError):
        return first
    lost = isinstance(error, ReplicaError) and error.dead
    return lost or isinstance(error, GrantTimeoutError | RewardWorkersLostError)
