"""Reports from a worker to the manager: collected here and sent one at a time.

What happens while a report is under way goes out with the next one. The content of a failed report is lost, so the
outbox keeps the error, and its worker ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from recipe.partial_rollout.manager.messages import Report
from recipe.partial_rollout.manager.types import Grant, Progress, SampleOutput
from recipe.partial_rollout.worker.live_sample import LiveSample


@dataclass(slots=True)
class _Unsent:
    """The next report, while it is being written."""

    progress: list[Progress] = field(default_factory=list)
    interrupted: list[str] = field(default_factory=list)
    away: list[str] = field(default_factory=list)
    finished: list[tuple[str, SampleOutput]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    told: list[asyncio.Future[None]] = field(default_factory=list)
    """futures resolved once the manager has this report"""

    def __bool__(self) -> bool:
        events = (self.progress, self.interrupted, self.away, self.finished, self.failed, self.told)
        return any(events)

    def report(self, worker: str) -> Report:
        return Report(
            worker,
            progress=tuple(self.progress),
            interrupted=tuple(self.interrupted),
            away=tuple(self.away),
            finished=tuple(self.finished),
            failed=tuple(self.failed),
        )


class Outbox:
    """Collects what happens to samples and reports it.

    Args:
        worker: name in the reports.
        manager: handle of the manager actor.
        granted: called with the grants in the answer to each report.
        idle: called whenever a report has been answered and nothing is left to send.
    """

    def __init__(
        self, worker: str, manager: Any, granted: Callable[[list[Grant]], None], idle: Callable[[], None]
    ) -> None:
        self._worker = worker
        self._manager = manager
        self._granted = granted
        self._idle = idle
        self._unsent = _Unsent()
        self._sending: asyncio.Task[None] | None = None
        self._error: Exception | None = None
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

    def finish(self, sample: LiveSample, output: SampleOutput) -> None:
        """Report that ``sample`` has ended with ``output``."""
        self._unsent.finished.append((sample.id, output))

    def fail(self, sample: LiveSample, error: str) -> None:
        """Report that the agent loop of ``sample`` raised ``error``."""
        self.note(sample)
        self._unsent.failed.append((sample.id, error))

    async def tell(self, sample: LiveSample) -> None:
        """Send what the manager does not know about ``sample``; returns once it knows.

        Raises:
            RuntimeError: the manager no longer takes reports of this worker.
        """
        told = asyncio.get_running_loop().create_future()
        self.note(sample)
        self._unsent.told.append(told)
        self.send()
        await told

    def send(self) -> None:
        """Send a report now, or as soon as the one under way has been answered."""
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())

    def empty(self) -> bool:
        """Whether the manager knows everything; sends what it does not know."""
        if self._unsent:
            self.send()
        return self._sending is None or self._sending.done()

    def raise_error(self) -> None:
        """Raise the error of a failed report, if any."""
        if self._error is not None:
            raise self._error

    async def _send_all(self) -> None:
        sent = self._unsent
        try:
            while self._unsent:
                sent, self._unsent = self._unsent, _Unsent()
                self._granted(await self._manager.report.remote(sent.report(self._worker)))
                for waiting in sent.told:
                    # The sample that waited may have been given up.
                    if not waiting.done():
                        waiting.set_result(None)
        except Exception as error:
            # The report's content is lost: the worker must not continue as if the manager knew it.
            self._error = self._error or error
            self.broken.set()
            for waiting in [*sent.told, *self._unsent.told]:
                waiting.cancel()
        self._idle()
