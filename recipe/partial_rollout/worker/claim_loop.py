"""The loop that claims samples and keeps a worker's slots full.

Its control flow::

    claim (long poll) ----> start or resume samples ----> finished / interrupted ----> report
          ^                  (calls wait for the round)                                   |
          +------------------- leases for the slots that came free ----------------------+

A sample keeps its coroutine across interruptions; only its slot goes back to the manager. The tokens of a finished turn
are reported with the sample's next event: an interruption, the release of its slot, or its end. A sample that makes no
engine call for ``release_after_s``, in a tool or its reward, reports its tokens and releases its slot; its next engine
call asks for a slot again. At the end of a round the worker reports all that is not reported yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NoReturn

from recipe.partial_rollout.manager.types import (
    Added,
    Event,
    Failed,
    Finished,
    Interrupted,
    Lease,
    Parked,
    Report,
    SampleOutput,
)
from recipe.partial_rollout.waits import ErrorText, InfraError, is_cancelled, result_of, wait
from recipe.partial_rollout.worker.live_sample import LiveSample, SampleClock
from recipe.partial_rollout.worker.rewards import RewardError

_LEFT_BEHIND_S = 0.1
"""seconds until a call is refused whose agent loop has ended"""
_BEGIN_S = 0.02
"""seconds that ``_arm_release_timer`` adds for each sample that is leased in the same answer: agent loops that start
together delay each other's first engine calls"""


class Outbox:
    """Collects the events of samples and sends them in reports, one report at a time.

    Events that come while a report is under way go out with the next report.

    Args:
        worker: name in the reports.
        manager: handle of the manager actor.
        on_leases: called with the leases (granted slots) in the answer to each report.
    """

    def __init__(self, worker: str, manager: Any, on_leases: Callable[[list[Lease]], None]) -> None:
        self._manager = manager
        self._on_leases = on_leases
        self.unsent = Report(worker)
        """what happened since the last report"""
        self._known = asyncio.Event()
        """set once the manager has the events in ``unsent``; each report has an event of its own"""
        self._sends = asyncio.Event()
        """set when ``serve`` shall send a report"""
        self._reported: set[tuple[str, str]] = set()
        """kinds of the errors that were reported (``ErrorText.kind``): type and place"""

    async def serve(self) -> NoReturn:
        """Send each report until the worker ends. An error while sending ends the worker, and that report is lost."""
        while True:
            await self._sends.wait()
            # Cleared before the content is taken: an event from here on sets it again.
            self._sends.clear()
            report, self.unsent = self.unsent, Report(self.unsent.worker)
            # A call of ``sent`` from here on waits for the next report, which has the events added since.
            known, self._known = self._known, asyncio.Event()
            self._on_leases(await self._manager.report.remote(report))
            known.set()

    async def sent(self) -> None:
        """Send what is unsent, and return once the manager knows it."""
        known = self._known
        self._sends.set()
        await known.wait()

    def report(self, sample: LiveSample, *events: Event) -> None:
        """Report the tokens of ``sample`` that the manager does not know, then ``events``, and all else that is unsent.

        They go out now, or as soon as the report under way has been answered.
        """
        if sample.unsent:
            self.unsent.events.append(Added(sample.id, sample.unsent))
            sample.unsent = []
        self.unsent.events += events
        self._sends.set()

    def record_error(self, error: BaseException) -> ErrorText:
        """Add ``error`` to the next report if it is the first of its kind; returns it as text."""
        text = ErrorText.from_error(error)
        if text.kind not in self._reported:
            self._reported.add(text.kind)
            self.unsent.errors.append(text)
        return text

    def record_rescored(self, error: RewardError) -> None:
        """Count a reward that failed and will be computed again.

        ``error`` goes out with the next report if it is the first of its kind.
        """
        self.unsent.rescored += 1
        self.record_error(error)


class ClaimLoop:
    """Claims samples from the manager, runs them, and shares the worker's slots out among their engine calls.

    Args:
        name: this worker's name at the manager.
        manager: handle of the manager actor.
        capacity: most samples that may hold a slot here at once; a lease may change it.
        run: runs the agent loop of a granted sample to its end.
        sample_s: most seconds from one engine call of an agent loop to its next; None: no limit.
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
        self.samples: dict[str, LiveSample] = {}
        """samples by id whose agent loops have begun here and not ended"""
        self._running = 0
        """engine calls that run: sent to a replica and not answered"""
        self.open = asyncio.Event()
        """set while this worker's gate is open. A lease may come while it is closed (the trainer updates); its calls
        wait"""
        self._ended = asyncio.Event()
        """set whenever a request ends"""
        self.outbox = Outbox(name, manager, on_leases=self.run)

    async def serve(self) -> None:
        """Claim and run samples for as long as the training lasts; ends only with an error.

        Raises:
            RuntimeError: the manager and this worker disagree on a sample. Any error of a report is raised, too.
        """
        # Before the first claim: the manager refuses claims of workers that it does not know.
        await self.manager.register_worker.remote(self.name, self.capacity)
        await wait(self._claim(), None, "claiming samples", watches=[self.outbox.serve()])

    async def _claim(self) -> NoReturn:
        while True:
            self.run(await result_of(self.manager.claim.remote(self.name)))

    async def reported(self) -> None:
        """Wait until no engine call runs, and report everything; returns once the manager knows it."""
        # The gate is shut, so no call begins any more; running ones end as their replicas abort them.
        while self._running:
            self._ended.clear()
            await self._ended.wait()
        for sample in self.samples.values():
            # A sample in a tool or reward call, which may outlast a checkpoint, has a finished turn to report.
            self.outbox.report(sample)
        await self.outbox.sent()

    # -- samples ---------------------------------------------------------------------------------------------------

    def run(self, leases: list[Lease]) -> None:
        """Let each granted sample continue, or start it if it is new here.

        Raises:
            RuntimeError: the manager and this worker disagree on whether the sample is live here.
        """
        for lease in leases:
            self.capacity = lease.slots or self.capacity
            sample = self.samples.get(lease.sample_id)
            if lease.resident != (sample is not None):
                raise RuntimeError(
                    f"sample {lease.sample_id}: the manager leased it as {'live on' if lease.resident else 'new to'} "
                    f"{self.name}, which {'does not run' if lease.resident else 'still runs'} it: a bug of the recipe"
                )
            if sample is None:
                sample = self.samples[lease.sample_id] = LiveSample(
                    lease, SampleClock(f"sample {lease.sample_id}", self._sample_s)
                )
                sample.task = asyncio.create_task(self._run_sample(sample), name=sample.id)
            sample.slot_requested = False
            sample.leased.set()
            # Hundreds of agent loops may start at once and delay each other, so the timer allows for all of them.
            self._arm_release_timer(sample, _BEGIN_S * len(leases))

    async def _run_sample(self, sample: LiveSample) -> None:
        try:
            event = await self._outcome(sample)
            if sample.slot_requested:
                # A call that the loop left behind has asked for a slot, which the manager may be granting just now.
                await sample.leased.wait()
        except InfraError as error:
            self.outbox.unsent.fatal = self.outbox.record_error(error).line
            self.outbox.report(sample)
        else:
            self.outbox.report(sample, event)
        # After the report: the answer may lease the sample anew (a retry), which must not find it here.
        del self.samples[sample.id]
        self._arm_release_timer(sample)

    async def _outcome(self, sample: LiveSample) -> Event:
        """Run the agent loop of ``sample``, and return how it ended.

        Raises:
            InfraError: a part of the machinery is lost (a replica, all reward workers), so the run must end.
        """
        try:
            output = await sample.clock.run(self._run_agent_loop(sample))
        # A library may cancel a task of its own and raise CancelledError: then the sample has failed like any other.
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, InfraError) or is_cancelled():
                raise
            times = error.times if isinstance(error, RewardError) else 1
            return Failed(sample.id, self.outbox.record_error(error).line, times)
        finally:
            # Silences the calls that the agent loop has left behind.
            sample.ended = True
        # The output has all tokens of the sample, so segments need no report.
        sample.unsent = []
        return Finished(sample.id, output)

    # -- slots ---------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def engine_call(self, sample: LiveSample) -> AsyncIterator[None]:
        """Enclose an engine call of ``sample``: wait until the sample has a slot and the gate is open, then enter.

        Calls of one sample share its slot. A worker never runs more calls than it has slots. So a second call of a
        sample waits until some slot is not in use: it is free, or its sample is not decoding.

        Raises:
            asyncio.CancelledError: the agent loop has ended, and nobody awaits this call any more.
        """
        await _require_listener(sample)
        sample.calling += 1
        if not sample.slot_requested and not sample.leased.is_set():
            self._ask_for_slot(sample)
        try:
            # Without a deadline of its own: a wait that does not end stalls the round, which has one (``stall_s``).
            while (obstacle := self._obstacle(sample)) is not None:
                await obstacle.wait()
            # Once more: its agent loop may have ended while the call waited.
            await _require_listener(sample)
            self._running += 1
            try:
                yield
            finally:
                self._running -= 1
        finally:
            # Also if the call never ran: other calls may wait for a free slot, and ``reported`` for the last call.
            sample.calling -= 1
            self._arm_release_timer(sample)
            self._ended.set()

    def _obstacle(self, sample: LiveSample) -> asyncio.Event | None:
        """Return the event that a call of ``sample`` has to wait for before it asks again; None if the call may run."""
        if not sample.leased.is_set():
            return sample.leased
        if not self.open.is_set():
            return self.open
        # After a resize to fewer slots, samples that have a slot keep it. So the limit is the larger of the two numbers.
        if self._running < self.capacity or self._running < sum(each.leased.is_set() for each in self.samples.values()):
            return None
        self._ended.clear()
        return self._ended

    def release_slot(self, sample: LiveSample) -> None:
        """Give the slot of ``sample`` back and ask for one again. Call it inside ``engine_call`` after an interruption."""
        # Without a slot: a concurrent call has asked already. The tokens of this call go out with the next report.
        if sample.leased.is_set() and not sample.ended:
            self._ask_for_slot(sample)

    def _arm_release_timer(self, sample: LiveSample, begin_s: float = 0.0) -> None:
        """Restart the timer that releases the slot of an idle sample; stop it if the sample calls the engine or has ended.

        Args:
            begin_s: extra seconds for an agent loop that has just got its lease, to make its first engine call.
        """
        if sample.release_timer is not None:
            sample.release_timer.cancel()
            sample.release_timer = None
        idle = self.samples.get(sample.id) is sample and not sample.calling
        if idle and self._release_after_s < math.inf:
            seconds = self._release_after_s + begin_s
            sample.release_timer = asyncio.get_running_loop().call_later(seconds, self._park, sample)

    def _ask_for_slot(self, sample: LiveSample) -> None:
        """Have the manager lease a slot again."""
        sample.slot_requested = True
        sample.leased.clear()
        self.outbox.report(sample, Interrupted(sample.id))

    def _park(self, sample: LiveSample) -> None:
        """Release the slot: this sample has made no engine call for a while, whether it awaits a tool or its reward."""
        # A call may have begun since the timer was set, or the slot gone with an interruption.
        if not sample.calling and sample.leased.is_set():
            sample.leased.clear()
            self.outbox.report(sample, Parked(sample.id))


async def _require_listener(sample: LiveSample) -> None:
    """Raise ``CancelledError`` if the agent loop of ``sample`` has ended: the call must not take a slot."""
    if sample.ended:
        # A task that the loop has left behind may call again and again, and must not keep the other samples waiting.
        await asyncio.sleep(_LEFT_BEHIND_S)
        raise asyncio.CancelledError(
            f"sample {sample.id} has ended: its agent loop has returned, so it can make no engine call any more"
        )
