"""Patch: let a recipe see, and add to, what verl's ``fit`` logs of each step.

verl's ``fit`` makes its ``Tracking`` itself and offers no hook for metrics of a custom rollout. Within
``observed_tracking`` that class shows every log to an observer first. verl's file logger empties the file that it opens, so
a resumed run would lose its history; there it appends. It may go when ``fit`` takes its ``Tracking`` or an observer, and
the file logger appends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import verl.utils.tracking as tracking

from verl_ext.guard import VERL, replaced, require

Observer = Callable[[dict[str, Any], int], dict[str, Any]]
After = Callable[[dict[str, Any], int], None]


@contextmanager
def observed_tracking(observer: Observer, after: After | None = None, file: Path | None = None) -> Iterator[None]:
    """While entered, ``observer(data, step)`` answers what each ``Tracking.log`` records.

    ``after(data, step)`` is called with the same once it is recorded; what it raises ends ``fit`` there. The file logger
    appends to ``file``; None: to what verl's variable names.
    """
    require("verl", VERL, "tracking_observer")
    verls, logged = tracking.Tracking, tracking.Tracking.log

    def log(self: Any, data: dict[str, Any], step: int, backend: Any = None) -> None:
        data = observer(data, step)
        logged(self, data, step, backend)
        if after is not None:
            after(data, step)

    class AppendedFile(tracking.FileLogger):
        def __init__(self, project_name: str, experiment_name: str) -> None:
            path = file or Path(os.environ["VERL_FILE_LOGGER_PATH"])
            path.parent.mkdir(parents=True, exist_ok=True)
            self.filepath, self.fp = str(path), path.open("ab", buffering=0)

    with replaced(verls, "log", log), replaced(tracking, "FileLogger", AppendedFile):
        yield
