"""A training in a session of its own, so that all of it can be killed at one stroke."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

_KILL_DEADLINE_S = 60.0


class Victim:
    """One process tree of ``main_ppo``.

    Args:
        overrides: hydra's, the config name first.
        log: where the terminal's output goes; appended.
        output: where the training appends what libraries print.
        environment: variables beside this process's.
    """

    def __init__(
        self, overrides: list[str], log: Path, output: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log, self._output = log, output
        self.started = time.time()
        """unix seconds"""
        self._starts = {each: each.stat().st_size if each.exists() else 0 for each in (log, output)}
        with log.open("a") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "recipe.partial_rollout.main_ppo", *overrides],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        self.pid = self._process.pid

    @property
    def terminal(self) -> str:
        """What it has printed on the terminal."""
        return self._of_this_life(self._log)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def last_words(self) -> str | None:
        """The line with which it ended: its error, if it has one; None while it runs, or after its last step."""
        if not self.exit_code:
            return None
        lines = [line for line in self.terminal.splitlines() if line.strip()]
        return next((line for line in reversed(lines) if "training failed: " in line), lines[-1] if lines else "")

    def _of_this_life(self, path: Path) -> str:
        if not path.exists():
            return ""
        with path.open(errors="replace") as file:
            file.seek(self._starts[path])
            return file.read()

    def wait_for(self, text: str, deadline_s: float) -> None:
        """Return once a library has printed ``text``, or the training has ended.

        Raises:
            TimeoutError: neither within ``deadline_s``.
        """
        deadline = time.monotonic() + deadline_s
        while text not in self._of_this_life(self._output) and self.exit_code is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the training did not print {text!r} within {deadline_s:g} s; see {self._output}")
            time.sleep(0.2)

    def wait(self, deadline_s: float) -> int | None:
        """Its exit code, or None if it still runs after ``deadline_s``."""
        try:
            return self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> float:
        """End all of it at once; returns the moment, unix seconds."""
        moment = time.time()
        kill_session(self._process)
        return moment


def kill_session(leader: subprocess.Popen) -> None:
    """SIGKILL to every process of the session, and to those that they start meanwhile.

    Raises:
        TimeoutError: some live on after a minute; the message has their pids.
    """
    deadline = time.monotonic() + _KILL_DEADLINE_S
    while survivors := processes_of_session(leader.pid):
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in survivors)
            raise TimeoutError(f"processes {pids} outlive SIGKILL by {_KILL_DEADLINE_S:g} s; end them by hand")
        for process in survivors:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(survivors, timeout=5.0)
    leader.wait(10)


def processes_of_session(leader: int, title: str = "") -> list[psutil.Process]:
    """Live processes of the session whose leader has pid ``leader``, and whose command line contains ``title``."""
    found = []
    for process in psutil.process_iter():
        try:
            alive = os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE
            if alive and title in " ".join(process.cmdline()):
                found.append(process)
        # psutil.ZombieProcess is a NoSuchProcess.
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found
