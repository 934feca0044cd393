"""A process under limits: processor seconds, memory, output and time. What it starts ends with it.

The limits are in place before the process gets its input, so a check that reads its input first never works without
them. They bound what a response can use up, not what it can see: the process has the user's files and network. Code
that nobody trusts belongs in bubblewrap, gVisor or a service besides.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import signal
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

MIB = 1 << 20
MOST_OUTPUT = 1 << 16
"""bytes"""
_SIGNALS = {-number.value: number.name for number in signal.Signals}


class Limit(StrEnum):
    """A limit that ended a process."""

    CPU = "cpu"
    MEMORY = "memory"
    OUTPUT = "output"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one process may use.

    Raises:
        ValueError: one is not above 0.
    """

    cpu_s: float = 2.0
    """processor time; the system counts whole seconds, so it is rounded up"""
    memory_mb: int = 512
    """address space, MiB"""
    timeout_s: float = 10.0
    """from its start to its end"""

    def __post_init__(self) -> None:
        for name in ("cpu_s", "memory_mb", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: want a number above 0")

    def set_for(self, pid: int) -> None:
        """From here on they hold for process ``pid`` and what it starts; Linux only."""
        cpu, memory = math.ceil(self.cpu_s), self.memory_mb * MIB
        for kind, most in (
            (resource.RLIMIT_CPU, (cpu, cpu + 1)),
            (resource.RLIMIT_AS, (memory, memory)),
            (resource.RLIMIT_FSIZE, (0, 0)),
            (resource.RLIMIT_CORE, (0, 0)),
        ):
            resource.prlimit(pid, kind, most)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended."""

    output: str
    """what it printed, errors included; at most ``MOST_OUTPUT`` bytes"""
    status: int
    """its exit status; negative: minus the number of the signal that ended it"""
    over: Limit | None
    """the limit that ended it"""

    @property
    def last_line(self) -> str:
        """The last line that is not blank, or nothing."""
        return next((line.strip() for line in reversed(self.output.splitlines()) if line.strip()), "")

    @property
    def how(self) -> str:
        """`exit status 1`, or `SIGSEGV`."""
        return _SIGNALS.get(self.status, f"exit status {self.status}")


async def run_limited(command: Sequence[str], given: bytes, limits: Limits) -> Ended:
    """Run ``command`` with ``given`` as its input and an empty environment, in a session of its own.

    Many can be awaited at once. Whoever cancels the call ends the process, too.

    Raises:
        OSError: it did not start.
    """
    # Not ``stdout=PIPE``: asyncio would report the end of a process only once its whole output is read, and nobody reads on
    # beyond the limit.
    output_pipe, its_end = os.pipe()
    printed = asyncio.StreamReader()
    reading, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(printed), os.fdopen(output_pipe, "rb", buffering=0)
    )
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=its_end, stderr=STDOUT, env={}, start_new_session=True
        )
    except BaseException:
        reading.close()
        raise
    finally:
        os.close(its_end)
    assert process.stdin is not None
    over, output = Limit.TIME, b""
    try:
        # A process that has ended already takes no limits.
        with contextlib.suppress(ProcessLookupError):
            limits.set_for(process.pid)
        async with asyncio.timeout(limits.timeout_s):
            output = await _exchange(process.stdin, printed, given)
            over = Limit.OUTPUT if len(output) > MOST_OUTPUT else None
            if over is None:
                await process.wait()
    except TimeoutError:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        reading.close()
        # What has left the session may hold its end of this pipe unread, and asyncio would wait for it.
        if process.stdin.transport.get_write_buffer_size():
            process.stdin.transport.abort()
        status = await process.wait()
    ended = Ended(output[:MOST_OUTPUT].decode(errors="replace"), status, over)
    return ended if over else Ended(ended.output, status, _limit_behind(ended))


async def _exchange(given_to: asyncio.StreamWriter, printed: asyncio.StreamReader, given: bytes) -> bytes:
    """The output of the process, or the first ``MOST_OUTPUT + 1`` bytes."""
    # It may end without reading its input; its output says why.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        given_to.write(given)
        given_to.close()
    try:
        return await printed.readexactly(MOST_OUTPUT + 1)
    except asyncio.IncompleteReadError as ended:
        return ended.partial


def _limit_behind(ended: Ended) -> Limit | None:
    """The limit that made a process end as it did; one that is out of memory says so, if it is Python."""
    # SIGKILL follows a second later where a response has the first signal ignored.
    if ended.status in (-signal.SIGXCPU, -signal.SIGKILL):
        return Limit.CPU
    return Limit.MEMORY if ended.status and ended.last_line.startswith("MemoryError") else None
