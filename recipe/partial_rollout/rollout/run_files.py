"""The files of a run: its directory, checkpoints and records, and the last step that is trained. Ray is not needed."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from recipe.partial_rollout.checkpoint.manifest import write_atomically
from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints, set_aside
from recipe.partial_rollout.records.run_log import METRICS, RunLog, RunSettings, logged_steps
from recipe.partial_rollout.records.run_log import NAME as LOG
from recipe.partial_rollout.terminal import say
from recipe.partial_rollout.waits import ERROR_LOG

CONFIG = "config.yaml"
_RECORDS = (LOG, CONFIG, ERROR_LOG, METRICS)
"""what a run that starts anew sets aside, besides checkpoints"""


class RunFiles:
    """The files of a run, with or without partial rollout.

    Args:
        checkpoints: the checkpoints in the run's directory, and the one to resume.
        trains: False if the run only validates (``trainer.val_only``). It then leaves no record in its directory.
    """

    def __init__(self, checkpoints: RunCheckpoints, *, trains: bool = True) -> None:
        self.checkpoints = checkpoints
        self.directory = checkpoints.run_dir
        self.metrics = self.directory / METRICS
        """the file that verl's file logger writes"""
        self.trains = trains
        self.completed_step = checkpoints.resumed_step
        """the last step whose batch is trained; a checkpoint that is saved now gets this number"""

    def begin(self) -> None:
        """Record the checkpoint that the run resumes. Move aside the checkpoints and records that this start replaces.

        Call it before any other record is written. A run that continues in its directory keeps its records, and a copy
        of them goes with checkpoints that are moved. The metrics of steps after the resumed one are removed. The log
        keeps these steps: a reader drops them, because the next process logs the step that it resumed. A run that
        resumes another run's checkpoint gets a copy of that run's log and metrics. A run that only validates makes its
        directory, if there is none, and changes nothing else.
        """
        if not self.trains:
            # The output of libraries goes there.
            self.directory.mkdir(parents=True, exist_ok=True)
            return
        chosen, continues = self.checkpoints.chosen, self.checkpoints.continues
        step = self.checkpoints.resumed_step
        # Before the records are set aside.
        lost = [at for at, _ in logged_steps(self.metrics) if at > step]
        aside = self.checkpoints.begin()
        records = {name: self.directory / name for name in _RECORDS}
        if not continues:
            set_aside(records.values(), aside)
            if chosen is not None:
                _copy({chosen.parent / name: records[name] for name in (LOG, METRICS)})
        elif aside.exists():
            # With its records, what is superseded is a run that resume_path can return to.
            _copy({record: aside / name for name, record in records.items()})
        if self.metrics.exists():
            kept = [line + b"\n" for at, line in logged_steps(self.metrics) if at <= step]
            write_atomically(self.metrics, b"".join(kept))
        # What a start that failed before its first step has left is nothing to return to.
        if any(aside.glob("global_step_*")):
            say(
                f"moved the checkpoints that this start replaces to {aside}, with their records; to resume one, set "
                f"trainer.resume_mode=resume_path trainer.resume_from_path={aside}/global_step_K"
            )
        elif lost and not continues:
            say(f"moved the records that this start replaces to {aside}")
        if lost and (continues or chosen is None):
            which = f"steps {min(lost)} to {max(lost)} are" if len(lost) > 1 else f"step {lost[0]} is"
            say(f"{which} trained again: the run {f'resumes from step {step}' if chosen else 'starts from scratch'}")

    def open_log(self, settings: RunSettings, replicas: Sequence[str]) -> RunLog:
        """Open the run's log.

        Args:
            settings: the first event of the log.
            replicas: addresses, in replica order.
        """
        directory = self.directory
        if not self.trains:
            self._scratch = TemporaryDirectory()
            directory = Path(self._scratch.name)
        return RunLog(directory, settings, replicas)


def _copy(files: dict[Path, Path]) -> None:
    """Copy each key of ``files`` that exists to its value, without its file mode: each copy is writable."""
    for old, new in files.items():
        if old.exists():
            shutil.copyfile(old, new)
