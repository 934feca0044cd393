"""The time that a sample's agent loop spends between engine calls, so that a hung tool ends its sample and not the run.

The clock runs between two engine calls: in tools, in environments, in the loop's own code. It stops while something else
has a deadline: while the sample waits for its slot, for a round, for the engine or for its reward. It restarts after each
engine call, so a long conversation may take any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class SampleTimeoutError(TimeoutError):
    """An agent loop made no engine call for too long."""


class SampleClock:
    """The clock of a sample that is live in a worker.

    Args:
        sample_id: for the error.
        deadline_s: seconds between two engine calls (``partial_rollout.failures.sample_timeout_s``); None: no deadline.
    """

    def __init__(self, sample_id: str, deadline_s: float | None = None) -> None:
        self._sample_id = sample_id
        self._deadline_s = deadline_s
        self._timeout: asyncio.Timeout | None = None
        self._stops = 0
        self._error: Exception | None = None

    async def run(self, agent_loop: Awaitable[T]) -> T:
        """``agent_loop``'s result.

        Raises:
            SampleTimeoutError: the clock ran for longer than its deadline.
            Exception: the one given to ``end``.
        """
        limit = asyncio.timeout(self._deadline_s)
        try:
            async with limit as self._timeout:
                output = await agent_loop
        except TimeoutError as error:
            if error is self._error or not limit.expired():
                raise
            raise self._error or SampleTimeoutError(
                f"the agent loop of sample {self._sample_id} made no engine call for {self._deadline_s:g} s "
                f"(partial_rollout.failures.sample_timeout_s)"
            ) from error
        finally:
            self._timeout = None
        if self._error is not None:
            # An agent loop may also catch its cancellation.
            raise self._error
        return output

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock while entered; it restarts afterwards. Calls may overlap."""
        self._stops += 1
        self._set(None)
        try:
            yield
        finally:
            self._stops -= 1
            if not self._stops:
                self._set(self._deadline_s)

    def end(self, error: Exception) -> None:
        """Cancel the agent loop and have ``run`` raise ``error``: an agent loop may catch what its tools raise."""
        self._error = self._error or error
        self._set(0.0)

    def _set(self, seconds: float | None) -> None:
        if self._timeout is None or self._timeout.expired():
            return
        if self._error is not None:
            seconds = 0.0
        self._timeout.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)
