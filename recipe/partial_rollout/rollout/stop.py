"""Ctrl-C and SIGTERM: the training stops at a point where nothing is lost, not where the signal happens to arrive."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_LOOK_EVERY_S = 0.2
"""interval of the checks: a signal handler cannot wake an event loop that Ray's driver runs one call at a time"""


class StopTraining(Exception):
    """The user asked to end the training; raised at a point where it can end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        """as a shell reports a process that the signal ended"""


class StopSignals:
    """Remembers the first signal; the second one ends the process at once."""

    def __init__(self) -> None:
        self._number: int | None = None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """While entered, the first signal is remembered instead of obeyed. Main thread only."""
        before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: Any) -> None:
        if self._number is not None:
            sys.exit(128 + number)
        self._number = number
        # Who signals each child too, as `ray job stop` does, ends the data loader's workers. torch reports that from its
        # handler of SIGCHLD, as an error wherever this process happens to be; no more data is needed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        print(
            f"\n{signal.Signals(number).name}: stopping at the next safe point; once more ends the training at once",
            file=sys.stderr,
        )

    def check(self) -> None:
        """Raise ``StopTraining`` if a signal has come."""
        if self._number is not None:
            raise StopTraining(self._number)

    async def unless_stopped(self, awaitable: Awaitable[T]) -> T:
        """``awaitable``'s result; ``StopTraining`` if a signal comes first."""
        task = asyncio.ensure_future(awaitable)
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=_LOOK_EVERY_S)
                if done:
                    return task.result()
                self.check()
        finally:
            task.cancel()
