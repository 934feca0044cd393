"""The loop that claims samples and keeps a worker's slots full.

Its control flow::

    claim (long poll) ----> start or resume samples ----> finished / interrupted ----> report
          ^                  (they wait for the round)                                   |
          +------------------- grants for the slots that came free ----------------------+

A sample keeps its coroutine over interruptions; only its slot goes back to the manager. A finished turn is reported with
the next event: an interruption, a tool call, the end of the sample. If a tool or its reward takes long, the turn is
reported and the slot goes back; the sample asks for one again with its next engine call. The end of a round leaves nothing
unreported.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from recipe.partial_rollout.checkpoint.plain_codec import UnsaveableError
from recipe.partial_rollout.manager.types import Grant, Progress, Report, SampleOutput
from recipe.partial_rollout.waits import FirstErrors, ReplicaError, ToldError, result_of
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample
from recipe.partial_rollout.worker.rewards import RewardError, RewardWorkersLostError

GRANT_S = 7200.0
"""seconds that a sample may wait for its slot in an open round: longer than any step, so that only a trainer that has
stopped stepping ends a run by it"""


class GrantTimeoutError(TimeoutError):
    """A sample waited too long for its slot."""


class SlotState(StrEnum):
    """Of a live sample, as its worker knows it."""

    HELD = "held"
    """It may call the engine."""
    GIVING_BACK = "giving back"
    """A call was interrupted; the slot goes back once no other call of the sample runs."""
    ASKED = "asked for"
    """The manager will grant it."""
    AWAY = "away"
    """The sample has made no engine call for a while, and goes on without a slot until it makes one."""


@dataclass(slots=True, eq=False)
class Seat:
    """A live sample's slot, and the engine calls that share it."""

    sample: LiveSample
    state: SlotState = SlotState.HELD
    """written by ``ClaimLoop`` alone, as are the others"""
    calls: int = 0
    """engine calls that run or wait"""
    running: int = 0
    """of these, those that a replica has not answered"""
    granted: asyncio.Event = field(default_factory=asyncio.Event)
    """set while HELD"""
    late: asyncio.TimerHandle | None = None
    """makes it AWAY"""


class Outbox:
    """Collects what happens to samples and reports it, one report at a time.

    What happens while one is under way goes out with the next. The content of a failed report is lost, so the outbox keeps
    the error, and its worker ends.

    Args:
        worker: name in the reports.
        manager: handle of the manager actor.
        granted: called with the grants in the answer to each report.
        idle: called whenever a report has been answered and nothing is left to send.
    """

    def __init__(
        self, worker: str, manager: Any, granted: Callable[[list[Grant]], None], idle: Callable[[], None]
    ) -> None:
        self._manager = manager
        self._granted = granted
        self._idle = idle
        self._unsent = Report(worker)
        self._told: list[asyncio.Future[None]] = []
        """resolved once the manager has what is unsent now"""
        self._sending: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._errors = FirstErrors()
        self.broken = asyncio.Event()
        """set by the first report that fails"""

    def note(self, sample: LiveSample) -> None:
        """Add what the manager does not know about ``sample`` to the next report."""
        segments, tool_results = sample.take_unsent()
        if segments or tool_results:
            self._unsent.progress.append(Progress(sample.id, segments, tool_results))

    def interrupt(self, sample: LiveSample) -> None:
        """Report that ``sample`` has given its slot back."""
        self.note(sample)
        self._unsent.interrupted.append(sample.id)
        self.send()

    def leave(self, sample: LiveSample) -> None:
        """Report that ``sample`` is away: it has given its slot back and lives on."""
        self.note(sample)
        self._unsent.away.append(sample.id)
        self.send()

    def come_back(self, sample: LiveSample) -> None:
        """Report that ``sample``, which was away, needs a slot again."""
        self._unsent.back.append(sample.id)
        self.send()

    def finish(self, sample: LiveSample, output: SampleOutput) -> None:
        """Report that ``sample`` has ended with ``output``, which stands for all that is not reported yet."""
        sample.take_unsent()
        self._unsent.finished.append((sample.id, output))

    def fail(self, sample: LiveSample, error: ToldError, times: int) -> None:
        """Report that the agent loop of ``sample`` raised ``error``, or its reward ``times`` in a row."""
        self.note(sample)
        self._note(error)
        self._unsent.failed.append((sample.id, error.line, times))

    def note_error(self, error: Exception) -> None:
        """Report an error that fails no sample: a tool's, which is its answer, or of a reward that is asked for again."""
        self._unsent.rescored += isinstance(error, RewardError)
        self._note(ToldError.of(error))

    def _note(self, error: ToldError) -> None:
        if self._errors.note(error):
            self._unsent.errors.append(error)

    def report_now(self, sample: LiveSample) -> None:
        """Send what the manager does not know about ``sample``, which keeps its slot."""
        self.note(sample)
        self.send()

    async def tell(self, sample: LiveSample) -> None:
        """As ``report_now``; returns once the manager knows.

        Raises:
            RuntimeError: the manager no longer takes reports of this worker.
        """
        told = asyncio.get_running_loop().create_future()
        self.note(sample)
        self._told.append(told)
        self.send()
        await told

    def send(self) -> None:
        """Send a report now, or as soon as the one under way has been answered."""
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())

    def empty(self) -> bool:
        """Whether the manager knows everything; sends what it does not know."""
        if self._unsent or self._told:
            self.send()
        return self._sending is None or self._sending.done()

    def raise_error(self) -> None:
        """Raise the error of a failed report, if any."""
        if self._error is not None:
            raise self._error

    async def _send_all(self) -> None:
        told: list[asyncio.Future[None]] = []
        try:
            while self._unsent or self._told:
                report, self._unsent = self._unsent, Report(self._unsent.worker)
                told, self._told = self._told, []
                self._granted(await self._manager.report.remote(report))
                for waiting in told:
                    # The sample that waited may have been given up.
                    if not waiting.done():
                        waiting.set_result(None)
        except Exception as error:
            # The report's content is lost: the worker must not continue as if the manager knew it.
            self._error = self._error or error
            self.broken.set()
            for waiting in [*told, *self._told]:
                waiting.cancel()
        self._idle()


class ClaimLoop:
    """Claims samples from the manager, runs them, and grants them its slots.

    Args:
        name: this worker's name at the manager.
        manager: handle of the manager actor.
        capacity: most samples that may hold a slot here at once.
        run: runs the agent loop of a granted sample to its end, with ``LIVE_SAMPLE`` set.
        sample_s: seconds that an agent loop may spend between two engine calls; None: no limit.
        release_after_s: seconds without an engine call after which a sample gives its slot to another.
    """

    def __init__(
        self,
        name: str,
        manager: Any,
        capacity: int,
        run: Callable[[Grant], Coroutine[Any, Any, SampleOutput]],
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
        self._seats: dict[str, Seat] = {}
        """by sample"""
        self._running = 0
        """requests that no replica has answered"""
        self.open = asyncio.Event()
        """set while the round is open: slots are granted before, while the trainer updates, and samples wait for it"""
        self._freed = asyncio.Event()
        """set whenever a request ends"""
        self._any_finished = False
        self._quiet = asyncio.Event()
        """set whenever an engine call or the sending of reports ends, so that ``reported`` checks again"""
        self.outbox = Outbox(name, manager, granted=self.run, idle=self._quiet.set)

    async def serve(self) -> None:
        """Claim and run samples for as long as the training lasts; ends only with an error.

        Raises:
            RuntimeError: the manager and this worker disagree on a sample. Any error of a report is raised, too.
        """
        await self.manager.register_worker.remote(self.name, self.capacity)
        broken = asyncio.create_task(self.outbox.broken.wait())
        while True:
            claim = asyncio.ensure_future(result_of(self.manager.claim.remote(self.name)))
            await asyncio.wait({claim, broken}, return_when=asyncio.FIRST_COMPLETED)
            self.outbox.raise_error()
            self.run(claim.result())

    @property
    def live(self) -> int:
        """Samples whose agent loops have begun here and not ended."""
        return len(self._seats)

    async def reported(self) -> None:
        """Wait until no engine call runs and the manager knows everything."""
        self.outbox.raise_error()
        while not self._all_reported():
            self._quiet.clear()
            await self._quiet.wait()
            self.outbox.raise_error()

    def _all_reported(self) -> bool:
        """Whether no engine call runs and the manager knows everything; sends what it does not know."""
        if self._running:
            return False
        for seat in self._seats.values():
            # A sample in a tool or reward call, which may outlast a checkpoint, has a finished turn to report.
            self.outbox.note(seat.sample)
        return self.outbox.empty()

    # -- samples ---------------------------------------------------------------------------------------------------

    def run(self, grants: list[Grant]) -> None:
        """Let each granted sample continue, or start it if it is new here.

        Raises:
            RuntimeError: the manager and this worker disagree on whether the sample is live here.
        """
        for grant in grants:
            seat = self._seats.get(grant.sample_id)
            if grant.held != (seat is not None):
                raise RuntimeError(
                    f"sample {grant.sample_id}: {self.name} {'has lost' if grant.held else 'still has'} the conversation "
                    f"that the manager thinks it {'holds' if grant.held else 'does not hold'}"
                )
            if seat is None:
                seat = self._seats[grant.sample_id] = Seat(self._live_sample(grant))
                task = asyncio.create_task(self._run_sample(grant, seat), name=grant.sample_id)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            seat.state = SlotState.HELD
            seat.granted.set()
            self._settle(seat)

    def _live_sample(self, grant: Grant) -> LiveSample:
        return LiveSample(
            grant.sample_id,
            keeper=self,
            priority=grant.order,
            group=grant.group_uid,
            restored=grant.segments,
            restored_tools={result["call"]: result for result in grant.tool_results},
            deadline_s=self._sample_s,
        )

    async def _run_sample(self, grant: Grant, seat: Seat) -> None:
        sample = seat.sample
        LIVE_SAMPLE.set(sample)
        try:
            output = await sample.clock.run(self._run_agent_loop(grant))
            await self._end(seat)
        # A library may cancel what it awaits and let that out: the sample has failed like any other.
        except (Exception, asyncio.CancelledError) as error:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            await self._fail(seat, error)
        else:
            self._any_finished = True
            self.outbox.finish(sample, output)
        if seat.late is not None:
            seat.late.cancel()
        del self._seats[sample.id]
        self.outbox.send()

    async def _fail(self, seat: Seat, error: BaseException) -> None:
        ends_the_run = _ends_the_run(error, first=not self._any_finished)
        if not ends_the_run:
            try:
                await self._end(seat)
            except GrantTimeoutError as late:
                error, ends_the_run = late, True
        told = ToldError.of(error)
        if ends_the_run:
            await self.manager.abandon.remote(told.line, told)
        else:
            self.outbox.fail(seat.sample, told, error.times if isinstance(error, RewardError) else 1)

    async def _end(self, seat: Seat) -> None:
        """Withdraw what the agent loop has left behind; returns once the manager can be told of the sample's end."""
        await seat.sample.end()
        if seat.state is SlotState.ASKED:
            # The loop no longer awaits the call that asks, and the manager may be granting the slot at this moment.
            async with self._grant_in_time(seat):
                await seat.granted.wait()

    # -- slots ---------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def engine_call(self, sample: LiveSample) -> AsyncIterator[None]:
        """Entered once the sample holds a slot in an open round; several calls of a sample share it.

        All together they are no more requests than the worker has slots: a second call of a sample takes the place of a
        sample that has a slot and does not decode, or waits.
        """
        sample.require_life()
        seat = self._seats[sample.id]
        seat.calls += 1
        if seat.state is SlotState.AWAY:
            seat.state = SlotState.ASKED
            self.outbox.come_back(sample)
        try:
            with sample.clock.stopped():
                async with self._grant_in_time(seat):
                    while (obstacle := self._obstacle(seat)) is not None:
                        await obstacle.wait()
                seat.running += 1
                self._running += 1
                try:
                    yield
                finally:
                    seat.running -= 1
                    self._running -= 1
        finally:
            seat.calls -= 1
            self._settle(seat)
            self._freed.set()
            self._quiet.set()

    def _obstacle(self, seat: Seat) -> asyncio.Event | None:
        """What a call of ``seat`` has to wait for; None: it may run."""
        if not seat.granted.is_set():
            return seat.granted
        if not self.open.is_set():
            return self.open
        if self._running < self.capacity or self._running < sum(each.granted.is_set() for each in self._seats.values()):
            return None
        self._freed.clear()
        return self._freed

    @contextlib.asynccontextmanager
    async def _grant_in_time(self, seat: Seat) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(GRANT_S):
                yield
        except TimeoutError as error:
            raise GrantTimeoutError(
                f"sample {seat.sample.id} was not granted a slot in an open round within {GRANT_S:g} s; "
                "is the trainer still stepping?"
            ) from error

    def release_slot(self, sample: LiveSample) -> None:
        """Inside ``engine_call``: give the slot back once no other call of the sample runs."""
        if (seat := self._seats.get(sample.id)) is not None:
            seat.state = SlotState.GIVING_BACK
            seat.granted.clear()

    def _settle(self, seat: Seat) -> None:
        """Give the slot back if a call was interrupted; see to it that a sample without engine calls leaves it."""
        if seat.late is not None:
            seat.late.cancel()
            seat.late = None
        if seat.running or seat.sample.id not in self._seats:
            return
        if seat.state is SlotState.GIVING_BACK and not seat.sample.ended:
            seat.state = SlotState.ASKED
            self.outbox.interrupt(seat.sample)
        elif not seat.calls and self._release_after_s < math.inf:
            seat.late = asyncio.get_running_loop().call_later(self._release_after_s, self._leave, seat)

    def _leave(self, seat: Seat) -> None:
        """The slot goes to another sample: this one has made no engine call for a while, whatever it awaits."""
        if seat.calls or seat.state not in (SlotState.HELD, SlotState.GIVING_BACK):
            return
        seat.state = SlotState.AWAY
        seat.granted.clear()
        self.outbox.leave(seat.sample)


def _ends_the_run(error: BaseException, *, first: bool) -> bool:
    """Whether a retry cannot help: no replica or reward worker is left, its slot did not come in time, or the ``first``
    sample to finish has an output that no checkpoint can hold, as all the others probably will."""
    if isinstance(error, UnsaveableError):
        return first
    lost = isinstance(error, ReplicaError) and error.dead
    return lost or isinstance(error, GrantTimeoutError | RewardWorkersLostError)
