"""Processes that train: one for each run, or one for all runs that fit the engines of the first (``warm``)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.studies.arm import MAIN

METRICS, TERMINAL = "metrics.jsonl", "terminal.log"
DEADLINE_S = 3600.0
"""for one run: twenty times what it takes on two cores"""
UNFIT = 75
"""what a warm process answers instead of an exit code where a run needs other engines than it has"""
SEPARATE = "partial_rollout.placement=separate"
_END_S = 60.0
"""seconds for a warm process to end its engines"""


def run_fresh(command: Sequence[str], directory: Path) -> int:
    """Run ``command`` with its records in ``directory``; returns its exit code.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``DEADLINE_S``.
    """
    env = {**os.environ, "VERL_FILE_LOGGER_PATH": str((directory / METRICS).absolute())}
    with (directory / TERMINAL).open("w") as log:
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=env, timeout=DEADLINE_S).returncode


class WarmProcess:
    """Runs commands like ``run_fresh``, but the recipe's own trainings in one process that keeps its engines.

    The process is replaced where a run does not fit its engines, after a run that failed, by any other program, and by a
    run whose engines have devices of their own, which are not kept.

    Args:
        program: of the process.
    """

    def __init__(self, program: Sequence[str] = (sys.executable, "-m", "tests.studies.warm")) -> None:
        self._program = program
        self._child: subprocess.Popen[bytes] | None = None
        self._line: socket.socket
        """its stdin, on which it answers too: what it imports may print"""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def run(self, command: Sequence[str], directory: Path) -> int:
        """See ``run_fresh``."""
        if tuple(command[2:3]) != MAIN or SEPARATE in command:
            self.close()
            return run_fresh(command, directory)
        code = self._ask(command, directory)
        if code == UNFIT:
            self.close()
            code = self._ask(command, directory)
        if code:
            self.close()
        return code

    def _ask(self, command: Sequence[str], directory: Path) -> int:
        if self._child is None:
            self._line, theirs = socket.socketpair()
            self._line.settimeout(DEADLINE_S)
            with theirs:
                self._child = subprocess.Popen(self._program, stdin=theirs.fileno())
        asked = {"arguments": command[3:], "directory": str(directory.absolute())}
        try:
            self._line.sendall(json.dumps(asked).encode() + b"\n")
            answer = self._line.recv(16)
        except ConnectionError:
            answer = b""
        except TimeoutError as error:
            self._child.kill()
            self.close()
            raise subprocess.TimeoutExpired(command, DEADLINE_S) from error
        return int(answer) if answer else self._child.wait() or 1

    def close(self) -> None:
        """End the process, if there is one, and its engines."""
        child, self._child = self._child, None
        if child is None:
            return
        self._line.close()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
