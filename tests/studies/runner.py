"""Runs every arm with every seed, each run in a directory of its own; a complete run is not run again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from recipe.partial_rollout.records.run_log import NAME, Ended
from recipe.partial_rollout.tools.reading.run_log import RunRecordError, read_log
from recipe.partial_rollout.tools.run_record import read_metrics
from tests.studies.arm import BASELINE, MAIN, Arm
from tests.studies.machine import MACHINE, write_machine
from tests.studies.processes import DEADLINE_S, METRICS, TERMINAL, run_fresh

_OVERRIDES = "overrides.json"
"""in a run's directory: what it was run with"""
_UNLIKE = (
    "quickstart.dir",
    "trainer.default_local_dir",
    "trainer.total_training_steps",
    "trainer.total_epochs",
    "trainer.v1.sampler.custom_sampler.path",
)
"""keys in which runs of one study may differ: where they and this checkout lie, and their length, which is checked apart"""


class StudyError(RuntimeError):
    """A run of the study failed."""


@dataclass(frozen=True, slots=True)
class Study:
    """What is run, and where."""

    out: Path
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    steps: int
    """of every run"""
    config_name: str
    overrides: tuple[str, ...] = ()
    """for all arms, before the arm's own"""
    process: Callable[[Sequence[str], Path], int] = run_fresh
    """runs a command with its records in a directory, and returns its exit code"""

    def directory(self, arm: Arm, seed: int) -> Path:
        return self.out / arm.name / f"seed_{seed}"

    def is_complete(self, arm: Arm, seed: int) -> bool:
        """Whether the run has trained ``steps`` steps and, if it is the recipe's, ended by itself.

        Raises:
            StudyError: its directory holds a run with other overrides, which this study would be mixed with.
        """
        directory = self.directory(arm, seed)
        try:
            lines = read_metrics(directory / METRICS, [])
            ended = arm.program != MAIN or _has_ended(directory)
            steps = [line.step for line in lines if "training/global_step" in line.values]
        except RunRecordError:
            return False
        complete = ended and max(steps, default=0) == self.steps
        if complete:
            self._check_alike(directory / _OVERRIDES, self._overrides(arm, seed))
        return complete

    @staticmethod
    def _check_alike(path: Path, asked: dict[str, str]) -> None:
        if not path.exists():
            return
        found = json.loads(path.read_text())
        for key in sorted({*found, *asked} - {*_UNLIKE}):
            if found.get(key) != asked.get(key):
                raise StudyError(
                    f"{path.parent} was run with {found.get(key, f'no {key}')}, this study has "
                    f"{asked.get(key, f'no {key}')}: choose another OUT, or remove the run"
                )

    def finished(self) -> list[tuple[Arm, int]]:
        """Every complete run, seed by seed.

        Raises:
            StudyError: see ``is_complete``.
            ValueError: no run of the baseline is complete, which all others are compared with.
        """
        runs = [(arm, seed) for seed in self.seeds for arm in self.arms if self.is_complete(arm, seed)]
        if not any(arm.name == BASELINE.name for arm, _ in runs):
            raise ValueError(f"no complete run of {BASELINE.name} in {self.out}")
        return runs

    def missing(self) -> Iterator[tuple[Arm, int]]:
        """Seed by seed, so that a study that is cut short has every arm."""
        for seed in self.seeds:
            for arm in self.arms:
                if not self.is_complete(arm, seed):
                    yield arm, seed

    def _overrides(self, arm: Arm, seed: int) -> dict[str, str]:
        """By key; an arm's win over the study's."""
        overrides = [
            f"quickstart.dir={self.out}",
            *self.overrides,
            f"trainer.default_local_dir={self.directory(arm, seed)}",
            f"trainer.experiment_name={arm.name}",
            f"trainer.total_training_steps={self.steps}",
            # As many passes over the data as the steps need.
            f"trainer.total_epochs={self.steps}",
            f"data.seed={seed}",
            f"actor_rollout_ref.rollout.seed={seed}",
            *arm.overrides,
        ]
        return {override.split("=", 1)[0].lstrip("+"): override for override in overrides}

    def alike(self, arm: Arm, seed: int) -> list[str]:
        """The overrides of a run that matter for what it learns: none that names a path, the run or its length."""
        named = {*_UNLIKE, "trainer.experiment_name", "trainer.logger"}
        return [override for key, override in self._overrides(arm, seed).items() if key not in named]

    def command(self, arm: Arm, seed: int) -> list[str]:
        """The command line of one run."""
        overrides = self._overrides(arm, seed).values()
        return [sys.executable, "-m", *arm.program, "--config-name", self.config_name, *overrides]

    def run_missing(self) -> int:
        """Run what is missing, one after the other; returns how many runs that were.

        Raises:
            StudyError: a run failed; what was complete stays, and the next call continues. Or see ``is_complete``.
        """
        count = 0
        for arm, seed in self.missing():
            print(f"== {arm.name}, seed {seed}: {self.steps} steps ==", flush=True)
            self.run(arm, seed)
            count += 1
        return count

    def run(self, arm: Arm, seed: int) -> None:
        """Run one, from its start.

        Raises:
            StudyError: it failed.
        """
        directory = self.directory(arm, seed)
        # verl's file logger appends: what a run that was cut off has left would be read with the new one.
        for leftover in (METRICS, NAME, MACHINE):
            (directory / leftover).unlink(missing_ok=True)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / _OVERRIDES).write_text(json.dumps(self._overrides(arm, seed), indent=2) + "\n")
        before = psutil.cpu_times()
        self._train(arm, seed)
        write_machine(directory, before, psutil.cpu_times())

    def _train(self, arm: Arm, seed: int) -> None:
        directory = self.directory(arm, seed)
        terminal = directory / TERMINAL
        try:
            code = self.process(self.command(arm, seed), directory)
        except subprocess.TimeoutExpired as error:
            raise StudyError(f"{arm.name}, seed {seed} did not end in {DEADLINE_S:g} s: see {terminal}") from error
        if code:
            raise StudyError(f"{arm.name}, seed {seed} ended with exit code {code}: see {terminal}")


def _has_ended(directory: Path) -> bool:
    """Whether the recipe's training in ``directory`` is over."""
    *_, last = [None, *read_log(directory, [])]
    return isinstance(last, Ended) and last.complete
