"""Ctrl-C and SIGTERM: the training stops at a point where nothing is lost, not where the signal happens to arrive."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from recipe.partial_rollout.waits import NoAnswerError

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_LOOK_EVERY_S = 0.2
_SAME_ORDER_S = 5.0
"""seconds in which a further SIGTERM repeats the first signal: a scheduler may signal the trainer and its batch script,
which passes the signal on. A key is pressed on purpose, so Ctrl-C always counts"""

_GRACE_S = 10.0
"""seconds that an agent-loop worker has to answer once a signal has come; Kubernetes kills 30 s after its own"""


class StopTraining(Exception):
    """The user asked to end the training; raised at a point where it can end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        """as a shell reports a process that the signal ended"""


class StopSignals:
    """Remembers the first signal; the second one ends the process at once, but for a SIGTERM within five seconds."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._since_s = 0.0

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
            if number == signal.SIGTERM and time.monotonic() < self._since_s + _SAME_ORDER_S:
                return
            sys.exit(128 + number)
        self._number, self._since_s = number, time.monotonic()
        # Who signals each child too, as `ray job stop` does, ends the data loader's workers. torch reports that from its
        # handler of SIGCHLD, as an error wherever this process happens to be; no more data is needed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        print(
            f"\n{signal.Signals(number).name}: stopping at the next safe point; once more ends the training at once",
            file=sys.stderr,
        )

    @property
    def asked(self) -> bool:
        """Whether a signal has come."""
        return self._number is not None

    def check(self) -> None:
        """Raise ``StopTraining`` if a signal has come."""
        if self._number is not None:
            raise StopTraining(self._number)

    async def watch(self) -> NoReturn:
        """Look for a signal, for ever: a handler cannot wake an event loop that Ray's driver runs one call at a time.

        Raises:
            StopTraining: one has come.
        """
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.check()

    async def within(self, awaitable: Awaitable[T], deadline_s: float) -> T:
        """``awaitable``'s result, within ``deadline_s`` seconds, or within ten of a signal.

        Raises:
            NoAnswerError: there was none.
        """
        task, began = asyncio.ensure_future(awaitable), time.monotonic()
        until = began + deadline_s
        try:
            while True:
                if self.asked:
                    until = min(until, time.monotonic() + _GRACE_S)
                left_s = until - time.monotonic()
                if (await asyncio.wait({task}, timeout=max(0.0, min(_LOOK_EVERY_S, left_s))))[0]:
                    return task.result()
                if left_s <= 0:
                    raise NoAnswerError(time.monotonic() - began)
        finally:
            task.cancel()
