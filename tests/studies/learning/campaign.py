"""Trains every arm at every rate from every warm start, and keeps what each run learnt in a ledger.

A run in the ledger is not trained again, wherever it was trained: the study resumes where it was cut, and figures
outlive the directories of their runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from pathlib import Path

from recipe.partial_rollout.tasks.ready_start import TASKS, source_fingerprint
from recipe.partial_rollout.tools.reading.run_log import iter_lines
from tests.studies.arm import Arm
from tests.studies.learning.run import LearningRun, read_run
from tests.studies.processes import WarmProcess
from tests.studies.runner import Study, StudyError

LEDGER = "runs.jsonl"
_COMMIT = ("git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*")
_PREPARE = ("recipe.partial_rollout.tasks.ready_start", "--train")


@dataclass(frozen=True, slots=True)
class Campaign:
    """What is run, and where it is noted."""

    study: Study
    """arms, called ``name@rate``, seeds and steps; each warm start has a directory of its own inside ``out``"""
    starts: tuple[int, ...]
    """seeds of the warm starts"""
    ledger: Path

    def runs(self) -> list[LearningRun]:
        """All of the ledger.

        Raises:
            RunRecordError: it cannot be read.
        """
        if not self.ledger.exists():
            return []
        return [LearningRun.from_json(*line) for line in iter_lines(self.ledger, dict, [])]

    def missing(self) -> list[tuple[int, Arm, int]]:
        """(start, arm, seed) of every run that the ledger lacks, in the order in which they are trained.

        Seed by seed, then start by start, so that a study that is cut short has every arm. Every other start goes backwards
        through the arms: its first run fits the engines of the one before (``WarmProcess``).
        """
        known = {run.identity for run in self.runs()}
        return [asked for asked in self._all() if self._asked(*asked).identity not in known]

    def run_missing(self) -> int:
        """Train what is missing, one after the other; returns how many runs that were.

        Raises:
            StudyError: a run failed; the ledger keeps what was complete.
        """
        missing, began = self.missing(), time.monotonic()
        with WarmProcess() as process:
            for done, (start, arm, seed) in enumerate(missing):
                left = (time.monotonic() - began) / done * (len(missing) - done) if done else None
                rest = f", about {timedelta(seconds=round(left))} left" if left is not None else ""
                print(f"run {done + 1} of {len(missing)}: {arm.name}, start {start}, seed {seed}{rest}", flush=True)
                self._run(start, arm, seed, process)
        return len(missing)

    def _all(self) -> Iterator[tuple[int, Arm, int]]:
        for turn, (seed, start) in enumerate(product(self.study.seeds, self.starts)):
            for arm in self.study.arms[:: -1 if turn % 2 else 1]:
                yield start, arm, seed

    def _study(self, start: int) -> Study:
        return replace(self.study, out=self.study.out / f"start_{start}")

    def _run(self, start: int, arm: Arm, seed: int, process: WarmProcess) -> None:
        study = replace(self._study(start), process=process.run)
        prepare = [sys.executable, "-m", *_PREPARE, "--out", str(study.out / "task"), "--seed", str(start)]
        if subprocess.run(prepare).returncode:
            raise StudyError(f"the warm start of seed {start} failed: {' '.join(prepare)}")
        if not study.is_complete(arm, seed):
            study.run(arm, seed)
        asked = self._asked(start, arm, seed)
        known = {name: getattr(asked, name) for name in ("arm", "rate", "start", "seed", "overrides", "task")}
        commit = subprocess.run(_COMMIT, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
        run = read_run(study.directory(arm, seed), **known, commit=commit.strip())
        with self.ledger.open("a") as file:
            file.write(json.dumps(run.to_json()) + "\n")
        print(
            f"  held out {_figures(run.held_out)}: final {run.final:.3f}, staleness {run.staleness_mean:.2f}",
            flush=True,
        )

    def _asked(self, start: int, arm: Arm, seed: int) -> LearningRun:
        """The run as far as it is known before it is trained."""
        name, _, rate = arm.name.rpartition("@")
        overrides = (*self._study(start).alike(arm, seed), f"trainer.total_training_steps={self.study.steps}")
        return LearningRun(
            name, float(rate), start, seed, tuple(sorted(overrides)), source_fingerprint(TASKS[0])[:12], "", (), (), {}
        )


def _figures(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
