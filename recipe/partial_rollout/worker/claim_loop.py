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
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from recipe.partial_rollout.checkpoint.plain_codec import UnsaveableError
from recipe.partial_rollout.manager import garbage
from recipe.partial_rollout.manager.messages import Report
from recipe.partial_rollout.manager.types import Grant, Progress, SampleOutput
from recipe.partial_rollout.waits import FirstErrors, ReplicaError, ToldError, result_of
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample


class GrantTimeoutError(TimeoutError):
    """A sample waited too long for its slot."""


class GrantGate:
    """Lets samples that hold a slot pass once the round is open.

    Slots are granted before the round opens, while the trainer updates, so the samples already wait when it opens.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._granted: dict[str, asyncio.Event] = {}
        self._open = asyncio.Event()

    def open(self) -> None:
        """Open the round: samples that hold a slot may call the engine."""
        self._open.set()

    def close(self) -> None:
        """Close the round: no new engine calls."""
        self._open.clear()

    def grant(self, sample_id: str) -> None:
        """Give ``sample_id`` a slot."""
        self._granted.setdefault(sample_id, asyncio.Event()).set()

    def revoke(self, sample_id: str) -> None:
        """Take the slot of ``sample_id``."""
        self._granted.setdefault(sample_id, asyncio.Event()).clear()

    def forget(self, sample_id: str) -> None:
        """Forget ``sample_id``, which has ended."""
        self._granted.pop(sample_id, None)

    def granted(self, sample_id: str) -> bool:
        """Whether ``sample_id`` holds a slot."""
        return sample_id in self._granted and self._granted[sample_id].is_set()

    def holds(self, sample_id: str) -> bool:
        """Whether ``sample_id`` is live here, with or without a slot."""
        return sample_id in self._granted

    async def wait(self, sample_id: str) -> None:
        """Return once ``sample_id`` holds a slot in an open round.

        Raises:
            GrantTimeoutError: it got none within the deadline.
        """
        granted = self._granted[sample_id]
        try:
            async with asyncio.timeout(self._deadline_s):
                await granted.wait()
                # The gate may close again before a sample that it woke runs.
                while not self._open.is_set():
                    await self._open.wait()
        except TimeoutError as error:
            raise GrantTimeoutError(
                f"sample {sample_id} was not granted a slot in an open round within {self._deadline_s:g} s "
                f"(partial_rollout.deadlines.grant_s); is the trainer still stepping?"
            ) from error


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

    def leave(self, sample: LiveSample) -> None:
        """Report that ``sample`` is away: it has given its slot back and lives on."""
        self.note(sample)
        self._unsent.away.append(sample.id)

    def come_back(self, sample: LiveSample) -> None:
        """Report that ``sample``, which was away, needs a slot again."""
        self._unsent.back.append(sample.id)

    def finish(self, sample: LiveSample, output: SampleOutput) -> None:
        """Report that ``sample`` has ended with ``output``."""
        self._unsent.finished.append((sample.id, output))

    def fail(self, sample: LiveSample, error: ToldError) -> None:
        """Report that the agent loop of ``sample`` raised ``error``."""
        self.note(sample)
        self.note_error(error)
        self._unsent.failed.append((sample.id, error.line))

    def note_error(self, error: ToldError) -> None:
        """Add ``error`` to the next report if it is the first of its kind."""
        if self._errors.note(error):
            self._unsent.errors.append(error)

    async def tell(self, sample: LiveSample) -> None:
        """Send what the manager does not know about ``sample``; returns once it knows.

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
        self._away: set[str] = set()
        """samples that have left their slot"""
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
            told = ToldError.of(error)
            if _ends_the_run(error, first=not self._any_finished):
                await self._manager.abandon.remote(told.line, told)
            else:
                self._outbox.fail(sample, told)
        else:
            self._any_finished = True
            self._outbox.finish(sample, output)
        self._live.discard(sample)
        self._away.discard(sample.id)
        self._gate.forget(sample.id)
        self._outbox.send()

    # -- slots (``SlotKeeper``) ------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def engine_call(self, sample: LiveSample) -> AsyncIterator[None]:
        """Entered once the sample holds a slot in an open round."""
        if sample.id in self._away:
            self._away.discard(sample.id)
            self._outbox.come_back(sample)
            self._outbox.send()
        sample.engine_calls += 1
        try:
            with sample.clock.stopped():
                await self._gate.wait(sample.id)
                self._calling.add(sample.id)
                yield
        finally:
            sample.engine_calls -= 1
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
        """As ``release_slot``, for a sample that goes on without an engine; nothing if it has no slot, or uses it."""
        if sample.engine_calls or not self._gate.granted(sample.id):
            return
        self._gate.revoke(sample.id)
        self._away.add(sample.id)
        self._outbox.leave(sample)
        self._outbox.send()

    def note_error(self, error: Exception) -> None:
        """Tell the manager of an error that fails no sample, with the next report."""
        self._outbox.note_error(ToldError.of(error))

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
