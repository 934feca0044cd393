"""Patch: let a recipe see, and add to, what verl's ``fit`` logs of each step, and finish what it logs to.

verl's ``fit`` makes its ``Tracking`` itself and offers no hook for metrics of a custom rollout. Within
``observed_tracking`` that class shows every log to an observer first. verl's file logger empties the file that it
opens, so a resumed run would lose its history; there it appends. verl leaves the end of a run to a destructor, which
calls every run finished and may come in any thread; here the run ends with the context, as failed if the training
failed. It may go when ``fit`` takes its ``Tracking`` or an observer, finishes it, and the file logger appends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import verl.utils.tracking as tracking

from verl_ext.guard import VERL, replaced, require

Observer = Callable[[dict[str, Any], int], dict[str, Any]]
After = Callable[[dict[str, Any], int], None]
_SWANLAB = "swanlab"


@contextmanager
def observed_tracking(observer: Observer, after: After | None = None, file: Path | None = None) -> Iterator[None]:
    """While entered, each ``Tracking.log(data, step)`` records the metrics that ``observer(data, step)`` returns.

    ``after(data, step)`` is called with the recorded metrics; an error that it raises ends ``fit`` there. verl's file
    logger appends to ``file``, or to the file that ``VERL_FILE_LOGGER_PATH`` names. At the end every ``Tracking`` is
    finished.
    """
    require("verl", VERL, "tracking_observer")
    verls, made, logged = tracking.Tracking, tracking.Tracking.__init__, tracking.Tracking.log
    trackers: list[Any] = []

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        trackers.append(self)
        made(self, *args, **kwargs)

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

    appended = replaced(tracking, "FileLogger", AppendedFile)
    with replaced(verls, "__init__", make), replaced(verls, "log", log), appended:
        try:
            yield
        except BaseException as error:
            for each in trackers:
                finish(each, error)
            raise
        for each in trackers:
            finish(each)


def finish(tracker: Any, error: BaseException | None = None) -> None:
    """Finish the run in the backends of verl's ``tracker``.

    With an ``error`` the run counts as failed, or as stopped if the error has an exit code.
    An error of a backend is printed, not raised, because the training is over.
    """
    backends, stopped = getattr(tracker, "logger", {}), getattr(error, "exit_code", None)
    ends = {"the trackers were": partial(tracker.finish, exit_code=0 if error is None else stopped or 1)}
    if error is not None and _SWANLAB in backends:
        # verl tells SwanLab nothing of a failure.
        state = "crashed" if stopped is None else "aborted"
        end = partial(backends.pop(_SWANLAB).finish, state=state, error=f"{type(error).__name__}: {error}")
        ends = {"SwanLab was": end} | ends
    for name, end in ends.items():
        try:
            end()
        except Exception as failure:
            print(f"{name} not finished: {type(failure).__name__}: {failure}", file=sys.stderr)
