"""Cores of a machine without a GPU: the trainer's processes have some to themselves, all others share the rest.

A process starts on the cores of the one that starts it. So the driver runs on the others' cores while Ray starts, which
puts every process of Ray there, engines included; the trainer's processes then move to theirs (``fsdp_engine``), which
they find in the environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

VARIABLE = "VERL_EXT_TRAINER_CORES"
"""the trainer's cores, as in ``0,1``"""

_THREADS = Path("/proc/self/task")


def available() -> list[int]:
    """Cores that this process may use; none where the system cannot pin."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def of_the_trainer() -> list[int]:
    """Those that ``VARIABLE`` names; none if it is not set."""
    return [int(core) for core in os.environ.get(VARIABLE, "").split(",") if core]


def move_to(cores: Iterable[int]) -> None:
    """Run all threads of this process, and what they start, on ``cores``."""
    wanted = set(cores)
    for thread in _THREADS.iterdir():
        # One may have ended since.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), wanted)


@contextlib.contextmanager
def starting_others(trainer_cores: int) -> Iterator[None]:
    """In this context, new processes run beside the first ``trainer_cores`` cores; afterwards this one runs on those."""
    cores = available()
    mine, others = cores[:trainer_cores], cores[trainer_cores:]
    move_to(others)
    try:
        yield
    finally:
        move_to(mine)


def environment(trainer_cores: int) -> dict[str, str]:
    """``VARIABLE`` for the first ``trainer_cores`` cores; to be asked before ``starting_others``."""
    return {VARIABLE: ",".join(map(str, available()[:trainer_cores]))}
