"""A process under limits: processor seconds, memory, processes, output and time, for itself and all that it starts.

Each runs under a supervisor (``supervisor.py``) that counts what the whole tree uses every 20 ms and ends the tree with
the process. What else holds depends on what the machine permits; a line says once what is missing:

- A pid namespace (``unshare``): nothing can outlive the process, and it neither sees nor signals any other. Without it
  the supervisor kills whatever descends from the process.
- Landlock (Linux 5.13): no file can be made, written or removed, but in the one folder that the caller gives. Without it
  the folder does not bound what is written, and where there is none, empty files can be made.

They bound what a response uses up, not what it can see: it has the user's files and network. Code that nobody trusts
belongs in bubblewrap, gVisor or a service besides.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from recipe.partial_rollout.tasks.sandboxed import supervisor

logger = logging.getLogger(__name__)

_GRACE_S = 30.0
"""for the supervisor to start and, past its time limit, to end what there is"""
_SIGNALS = {-number.value: number.name for number in signal.Signals}


class SandboxError(RuntimeError):
    """The sandbox or the check failed, so the response has no score."""


class Limit(StrEnum):
    """A limit that ended a process."""

    CPU = "cpu"
    MEMORY = "memory"
    PROCESSES = "processes"
    OUTPUT = "output"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a process and all that it starts may use together.

    Raises:
        ValueError: one is not above 0.
    """

    cpu_s: float = 2.0
    """processor time"""
    memory_mb: int = 512
    """memory in use, MiB; no process may have more than this in addresses"""
    timeout_s: float = 10.0
    """from its start to its end"""
    processes: int = 64
    """at once"""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: want a number above 0")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Limits:
        """The limits that a tool's ``config`` names among other things."""
        return cls(**{item.name: config[item.name] for item in fields(cls) if item.name in config})


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended."""

    output: str
    """what it printed, errors included; at most ``supervisor.MOST_OUTPUT`` bytes"""
    status: int
    """its exit status; negative: minus the number of the signal that ended it; 0 if a limit did"""
    over: Limit | None
    """the limit that ended it"""
    cpu_s: float = 0.0
    """processor time that it used, with all that it started"""
    starved: bool = False
    """whether it ran out of time because it got no core or no answer of a disk"""

    @property
    def last_line(self) -> str:
        """The last line that is not blank, or nothing."""
        return next((line.strip() for line in reversed(self.output.splitlines()) if line.strip()), "")

    @property
    def how(self) -> str:
        """`exit status 1`, or `SIGSEGV`."""
        return _SIGNALS.get(self.status, f"exit status {self.status}")

    @property
    def answer(self) -> str:
        """What it printed, and how it ended if not well, as a tool tells a model."""
        how = f"over its limit: {self.over}" if self.over is not None else self.how if self.status else ""
        return "\n".join(part for part in (self.output.rstrip(), f"({how})" if how else "") if part)


@functools.cache
def namespace(python: str) -> tuple[str, ...]:
    """The command that runs ``python`` in a pid namespace; nothing where that is not permitted. Says what is missing."""
    missing = []
    found = next(filter(functools.partial(_works, python), _namespaces()), ())
    if not found:
        missing.append("no pid namespace (unshare): a response can signal the user's processes")
    if (version := supervisor.landlock_version()) < 1:
        missing.append("no Landlock: a response can make empty files and remove the user's")
    elif version < 6 and not found:
        missing.append(f"Landlock {version} of 6: a response can end its supervisor, and so outlive its check")
    if missing:
        logger.warning("the sandbox of rewards lacks: %s", "; ".join(missing))
    else:
        print("the sandbox of rewards has a pid namespace and Landlock", flush=True)
    return found


def _namespaces() -> list[tuple[str, ...]]:
    if (unshare := shutil.which("unshare")) is None:
        return []
    return [
        (unshare, *user, "--pid", "--fork", "--kill-child", *proc)
        for user in (("--user", "--map-current-user"), ())
        for proc in (("--mount-proc",), ())
    ]


def _works(python: str, within: tuple[str, ...]) -> bool:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        # Started as a sandbox is: a user namespace may keep its user from the interpreter's files.
        return not subprocess.run([*within, python, "-I", "-S", "-c", ""], capture_output=True, timeout=10).returncode
    return False


async def run_limited(
    command: Sequence[str], given: bytes, limits: Limits, files: Sequence[int] = (), folder: str = ""
) -> Ended:
    """Run ``command`` with ``given`` as its input, an empty environment and the open ``files``, in ``folder``, which it may
    change.

    Many can be awaited at once. Whoever cancels the call ends the process and what it has started, too.

    Raises:
        SandboxError: it did not start, or its supervisor ended without a report.
        OSError: the supervisor did not start.
    """
    most = (limits.cpu_s, limits.memory_mb, limits.timeout_s, limits.processes)
    # A file in memory, not a pipe: uvloop, Ray's event loop, raises if a process ends before it has read its input.
    with open(os.memfd_create("input"), "w+b") as file:
        file.write(given)
        file.seek(0)
        process = await asyncio.create_subprocess_exec(
            *namespace(sys.executable),
            *(sys.executable, "-I", "-S", supervisor.__file__, *map(str, most), folder),
            *command,
            stdin=file,
            stdout=PIPE,
            stderr=STDOUT,
            env={},
            start_new_session=True,
            pass_fds=files,
        )
    try:
        report, _ = await asyncio.wait_for(process.communicate(), limits.timeout_s + _GRACE_S)
    except TimeoutError:
        raise SandboxError(
            f"the supervisor gave no report {_GRACE_S:g} s after timeout_s={limits.timeout_s:g}"
        ) from None
    finally:
        await _end(process)
    head, _, printed = report.partition(b"\n")
    output = printed.decode(errors="replace")
    try:
        over, status, cpu_s, starved = head.decode().split(" ")
        ended = Ended(output, int(status), Limit(over) if over != "-" else None, float(cpu_s), starved == "1")
    except ValueError:
        told = report.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
        raise SandboxError(f"the supervisor gave no report: {told[-1]}") from None
    # One that is out of memory says so, if it is Python.
    if ended.status and ended.over is None and ended.last_line.startswith("MemoryError"):
        return Ended(output, ended.status, Limit.MEMORY, ended.cpu_s)
    return ended


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a supervisor that has not ended; it ends all else first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _GRACE_S / 2)
