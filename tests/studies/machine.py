"""How undisturbed the machine was while a run trained: ``machine.json`` in the run's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MACHINE = "machine.json"
_STOLEN = "stolen_cpu"
_NOT_WORKING = ("idle", "iowait", "guest", "guest_nice")
"""processor times of psutil: guests' are in ``user`` and ``nice`` already"""


def write_machine(directory: Path, before: Any, after: Any) -> None:
    """Note what the host took of the run's processor time, from ``psutil.cpu_times()`` before and after it."""
    (directory / MACHINE).write_text(json.dumps({_STOLEN: stolen_cpu(before, after)}) + "\n")


def read_stolen_cpu(directory: Path) -> float | None:
    """Of a finished run; None where it was not noted."""
    path = directory / MACHINE
    return json.loads(path.read_text())[_STOLEN] if path.exists() else None


def stolen_cpu(before: Any, after: Any) -> float | None:
    """Share of the processors' working time between two ``psutil.cpu_times()`` in which the host ran something else.

    None where the system does not tell. A virtual machine's only sign that its neighbours slow it down.
    """
    spent = {name: getattr(after, name) - getattr(before, name) for name in after._fields}
    if "steal" not in spent:
        return None
    working = sum(seconds for name, seconds in spent.items() if name not in _NOT_WORKING)
    return spent["steal"] / working if working else 0.0
