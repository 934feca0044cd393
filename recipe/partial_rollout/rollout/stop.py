"""Handles Ctrl-C, SIGTERM and SIGHUP: a start ends at once, a training stops at a safe point."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, NoReturn

from recipe.partial_rollout.terminal import bars, known_end, say
from recipe.partial_rollout.waits import NoAnswerError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_LOOK_EVERY_S = 0.2
"""seconds between two looks whether a signal has come"""
_SAME_ORDER_S = 5.0
"""seconds after a signal in which SIGTERM and SIGHUP are ignored as its repetition: a scheduler may signal the trainer
and its batch script, which passes the signal on. A key is pressed on purpose, so Ctrl-C always counts"""

_GRACE_S = 10.0
"""seconds that an agent-loop worker has to answer once a signal has come; Kubernetes kills 30 s after its own"""
_END_WITHIN_S = 20.0
"""seconds until a process that received the signal to end at once is killed; Ray's shutdown must fit into them"""


class StopTraining(Exception):
    """The user asked to end the training; raised at a point where it can end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        """as a shell reports a process that the signal ended"""


class StopSignals:
    """The signals that end a run: SIGINT, SIGTERM, SIGHUP. They are handled within ``in_force``.

    A signal raises ``KeyboardInterrupt`` in the main thread. Within ``caught`` the first signal is only remembered, and a
    second one raises. Within ``behind`` the first signal raises at the end of the block. A SIGTERM or SIGHUP within five
    seconds after the last signal is ignored, because a scheduler may send it twice.

    A signal does not raise ``SystemExit``, because Ray then aborts with a stack dump. Ray's waits let a
    ``KeyboardInterrupt`` through.
    """

    _of_process: ClassVar[StopSignals | None] = None

    def __init__(self) -> None:
        self._number: int | None = None
        self._since_s = 0.0
        self._waits = False
        """whether the first signal is remembered instead of obeyed"""
        self._ours: list[signal.Signals] = []
        self._set_handler = signal.signal
        self._process = os.getpid()
        self._too_late: threading.Timer | None = None

    @classmethod
    def of_process(cls) -> StopSignals:
        """Return the ``StopSignals`` that this process has entered (``in_force``), or new ones if there are none."""
        return cls._of_process or cls()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """While entered, handle the signals here, and ignore the handlers that Ray and SwanLab set. Main thread only.

        A SIGHUP that is ignored before, as under nohup, stays ignored.
        """
        self._set_handler = set_handler = signal.signal
        self._ours = [each for each in _SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
        before = {number: set_handler(number, self._note) for number in self._ours}

        def keep_ours(number: int, handler: Any) -> Any:
            return signal.getsignal(number) if number in self._ours else set_handler(number, handler)

        signal.signal = keep_ours  # type: ignore[assignment]
        StopSignals._of_process = self
        try:
            yield
        finally:
            StopSignals._of_process, self._ours = None, []
            signal.signal = set_handler
            for number, handler in before.items():
                set_handler(number, handler)
            if self._too_late is not None:
                self._too_late.cancel()

    @contextmanager
    def behind(self) -> Iterator[None]:
        """While entered, delay the first signal: it raises ``KeyboardInterrupt`` at the end of the block.

        ``ray.init`` needs this. It forks, and during a fork Python swallows an exception that a handler raises. It also
        installs a SIGTERM handler below Python's, which dumps the stack; the block's end sets the handlers here again.
        """
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
            for number in self._ours:
                self._set_handler(number, self._note)
            if self._number is not None:
                self._end_within()
                raise KeyboardInterrupt(signal.Signals(self._number).name)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """While entered, remember the first signal instead of raising. Main thread only.

        Raises:
            StopTraining: on entry, if a signal has come before and a library has swallowed its ``KeyboardInterrupt``.
        """
        with nullcontext() if StopSignals._of_process is self else self.in_force():
            self.check()
            self._waits = True
            try:
                yield
            finally:
                self._waits = False

    def _note(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:
            # A forked child, such as a pool's, which is ended by SIGTERM. Ctrl-C and SIGHUP are left to the parent.
            if number == signal.SIGTERM:
                self._set_handler(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        again = self._number is not None
        if again and number != signal.SIGINT and time.monotonic() < self._since_s + _SAME_ORDER_S:
            return
        self._number, self._since_s = number, time.monotonic()
        if again or not self._waits:
            self._end_within()
            raise KeyboardInterrupt(signal.Signals(number).name)
        # Who signals each child too, as `ray job stop` does, ends the data loader's workers. torch reports that from its
        # handler of SIGCHLD, as an error wherever this process happens to be; no more data is needed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        say(
            f"\n{signal.Signals(number).name}: stopping at the next safe point; once more ends the training at once",
            error=True,
        )

    def _end_within(self) -> None:
        """Kill the process after ``_END_WITHIN_S``: Ray may hang, or a library swallow the ``KeyboardInterrupt``."""
        if self._too_late is None:
            self._too_late = threading.Timer(_END_WITHIN_S, self.end)
            # It must not keep a process alive that ends in time.
            self._too_late.daemon = True
            self._too_late.start()

    def end(self) -> NoReturn:
        """Print one line, and exit with the last signal's code. A normal exit would wait for running threads."""
        number = self._number or signal.SIGINT
        # Without the lock that a thread at work may hold.
        print(f"training stopped by {signal.Signals(number).name}", file=bars(), flush=True)
        known_end()
        # No handlers of exit, which may wait for Ray. The code is what a shell reports of a process that the signal ended.
        os._exit(128 + number)

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._number is not None

    def check(self) -> None:
        """Raise ``StopTraining`` if a signal has come."""
        if self._number is not None:
            raise StopTraining(self._number)

    async def watch(self) -> NoReturn:
        """Check for a signal again and again; runs until it is cancelled.

        A signal handler cannot wake the driver's event loop, so the loop has to look itself.

        Raises:
            StopTraining: a signal has come.
        """
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self.check()

    async def grace(self) -> NoReturn:
        """Wait for a signal, and then ``_GRACE_S`` seconds. The guard runs it beside each wait for a worker's answer.

        Raises:
            NoAnswerError: the seconds after the signal have passed.
        """
        while not self.requested:
            await asyncio.sleep(_LOOK_EVERY_S)
        await asyncio.sleep(_GRACE_S)
        raise NoAnswerError(f"no answer within {_GRACE_S:g} s after the stop signal")
