"""Runs a command under limits that hold for it and all that it starts, and lets nothing outlive it.

    python -I -S supervisor.py CPU_S MEMORY_MB TIMEOUT_S PROCESSES FOLDER COMMAND...

FOLDER is where the command runs and may change files; if empty, it may change none.

It is the init of a pid namespace, or else the subreaper of what the command starts: what leaves the session or loses its
parent becomes its child, so it finds everything. It ends with whoever reads its report: a line of ``LIMIT STATUS CPU_S
STARVED``, and then what was printed. ``limited_process`` starts and reads it. It imports as little as it can: it starts
once for each response.
"""

import ctypes
import math
import os
import resource
import select
import signal
import sys
import time

MOST_OUTPUT = 1 << 16
"""bytes"""
_LOOK_MS = 20
_END_S = 10.0
"""time for killed processes to go"""
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""system calls of Landlock, the same on every architecture in use"""
_WRITE, _CHANGE, _MOVE, _TRUNCATE = 1 << 1, sum(1 << bit for bit in range(4, 13)), 1 << 13, 1 << 14
"""Landlock's rights: to write a file; to make or remove one of any kind; to move one to another folder, since version 2;
to cut one off, since version 3"""

libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """Version of Landlock that the kernel has; below 1: none."""
    return libc.syscall(_CREATE_RULESET, None, 0, 1)


def forbid_changes(folder: str) -> None:
    """From here on this process makes, writes and removes no file, except in ``folder``, if it has a name; and it signals
    none but its own children (version 6)."""
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    version = landlock_version()
    if version < 1:
        return
    write = _WRITE | (_TRUNCATE if version >= 3 else 0)
    change = _CHANGE | (_MOVE if version >= 2 else 0)
    # Rights to files, rights to the network, and what is cut off from outside; older kernels know less of it.
    handled = (ctypes.c_uint64 * 3)(write | change, 0, 1 << 1)
    rules = libc.syscall(_CREATE_RULESET, handled, 24 if version >= 6 else 8, 0)
    for path, rights in (("/dev/null", write), (folder, write | change)):
        if path:
            place = os.open(path, os.O_PATH)
            libc.syscall(_ADD_RULE, rules, 1, rights.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder), 0)
            os.close(place)
    if libc.syscall(_RESTRICT_SELF, rules, 0):
        raise OSError(ctypes.get_errno(), "Landlock refuses its rules")
    os.close(rules)


def descendants() -> list[str]:
    """Processes that descend from this one, zombies included, as /proc numbers them."""
    # Without a /proc of its own, a pid namespace sees that of the machine.
    found = [os.readlink("/proc/self")]
    for pid in found:
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children") as children:
                    found += children.read().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found[1:]


def proportional(pid: str) -> int:
    """Memory of a process in bytes, in which a page that several share counts once for all."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            return sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))
    except OSError:
        return 0


class Usage:
    """What the descendants use now, and have used."""

    def __init__(self) -> None:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu_s, self.memory, self.states = ended.ru_utime + ended.ru_stime, 0, ""
        self._pids = descendants()
        for pid in self._pids:
            try:
                with open(f"/proc/{pid}/stat") as stat:
                    fields = stat.read().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            self.states += fields[0]
            # Its own, and that of the children that it has waited for.
            self.cpu_s += sum(map(int, fields[11:15])) / _TICKS
            self.memory += int(fields[21]) * _PAGE

    def over(self, cpu_s: float, memory: int, processes: float) -> str:
        """The limit that is passed, or nothing."""
        if self.cpu_s >= cpu_s:
            return "cpu"
        if len(self._pids) > processes:
            return "processes"
        # What a fork shares with its parent is counted twice at first.
        return "memory" if self.memory > memory and sum(map(proportional, self._pids)) > memory else ""


def start(command: list[str], output: int, cpu_s: float, memory: int, folder: str) -> int:
    """The pid of ``command``, which prints to ``output``; what of the limits the kernel can enforce is in place."""
    check = os.fork()
    if check:
        return check
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for kind, most in (
            # For the case that this process gets no core.
            (resource.RLIMIT_CPU, math.ceil(cpu_s) + 1),
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_FSIZE, memory if folder else 0),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(kind, (most, most))
        if folder:
            os.chdir(folder)
        forbid_changes(folder)
        os.execve(command[0], command, {})
    except BaseException as error:
        os.write(2, f"{command[0]}: {error}".encode())
    os._exit(127)


def reap(check: int) -> int | None:
    """Take what has ended off the list of processes; returns the exit status of ``check`` if it is among them."""
    status = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == check:
                status = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        pass
    return status


def supervise(check: int, output: int, cpu_s: float, memory: int, timeout_s: float, processes: float) -> bytes:
    """The report on ``check``, once it has ended or passed a limit."""
    began, printed, status, over, starved = time.monotonic(), b"", None, "", False
    watch = select.poll()
    watch.register(output, select.POLLIN)
    watch.register(1, 0)
    look_ms = _LOOK_MS
    while status is None and not over:
        for pipe, _ in watch.poll(look_ms):
            if pipe == 1:
                # Nobody reads the report any more.
                sys.exit()
            if not (more := os.read(output, MOST_OUTPUT + 1)):
                watch.unregister(output)
                look_ms = 2
            printed += more
        usage = Usage()
        status = reap(check)
        over = "output" if len(printed) > MOST_OUTPUT else usage.over(cpu_s, memory, processes)
        if status is None and not over and time.monotonic() - began >= timeout_s:
            over = "time"
            # Runnable or waiting for a disk, not asleep: it would have gone on had the machine let it.
            starved = usage.cpu_s < timeout_s / 2 and any(state in usage.states for state in "RD")
    used = Usage()
    over = over or used.over(cpu_s, memory, processes)
    os.set_blocking(output, False)
    try:
        while len(printed) <= MOST_OUTPUT and (more := os.read(output, MOST_OUTPUT + 1)):
            printed += more
    except BlockingIOError:
        pass
    if not over and len(printed) > MOST_OUTPUT:
        over = "output"
    return f"{over or '-'} {status or 0} {used.cpu_s:.2f} {starved:d}\n".encode() + printed[:MOST_OUTPUT]


def end_all() -> None:
    """Kill all descendants; TimeoutError if they do not go."""
    if os.getpid() == 1:
        # The kernel ends a pid namespace with its init.
        return
    deadline = time.monotonic() + _END_S
    while left := descendants():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(left)} processes of the sandbox do not end")
        for pid in map(int, left):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reap(0)
        time.sleep(0.001)


def main(arguments: list[str]) -> None:
    """Run the command and print the report."""
    cpu_s, memory_mb, timeout_s, processes = map(float, arguments[:4])
    memory = int(memory_mb * (1 << 20))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    output, its_end = os.pipe()
    report = b""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        check = start(arguments[5:], its_end, cpu_s, memory, arguments[4])
        os.close(its_end)
        # Whoever writes the response must see that the check has ended without reading it.
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        report = supervise(check, output, cpu_s, memory, timeout_s, processes)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_all()
    sys.stdout.buffer.write(report)


if __name__ == "__main__":
    main(sys.argv[1:])
