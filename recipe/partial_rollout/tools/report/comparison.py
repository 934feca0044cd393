"""Runs compared: ratios against a base, whether they did the same work, and whether their engines were alike."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from msgspec import structs

from recipe.partial_rollout.records.run_log import Arm
from recipe.partial_rollout.tools.report.summary import METRICS, Summary, ratio
from recipe.partial_rollout.tools.run_record import RunRecord
from recipe.partial_rollout.training.step_log import PolicyDrift

SHARED_SETTINGS = ("batch_groups", "samples_per_group", "replicas", "slots_per_replica", "verl", "vllm")


@dataclass(frozen=True)
class Side:
    """One of the runs."""

    name: str
    """the run's type (`noPR` or `PR`), or its directory; see `names_of`"""
    run: RunRecord

    @cached_property
    def summary(self) -> Summary:
        return Summary(self.run)

    @cached_property
    def warnings(self) -> list[str]:
        """Warnings about the run's files, its lost samples, and the steps at which its policy began to drift."""
        found, drift = list(self.run.warnings), PolicyDrift()
        if lost := self.summary.lost_samples:
            found.append(f"{self.name} lost {lost:,} samples; a sound run loses none")
        if warned := [str(step.number) for step in self.run.steps if drift.observe(step.metrics, step.number)]:
            found.append(
                f"{self.name} drifted far from the policy that made its samples at step {', '.join(warned)}: its reward is "
                "likely to fall (docs/tuning.md)"
            )
        return found


@dataclass(frozen=True)
class Other(Side):
    """A run beside the base."""

    base: Side

    @cached_property
    def ratios(self) -> dict[str, float | None]:
        """Its metric over the base's, by the metric's name."""
        mine, theirs = self.summary, self.base.summary
        compared = [name for name, metric in METRICS.items() if metric.compared]
        found = {name: ratio(getattr(mine, name), getattr(theirs, name)) for name in compared}
        if (theirs.rollout_s is None) is not (mine.rollout_s is None):
            # They cannot be compared: one is per second of rollout, the other per second of the run.
            found["decoded_tokens_per_s"] = None
        return found

    @cached_property
    def differences(self) -> list[str]:
        """In words, how the work differs; empty if both trained the same (epoch, prompt), in any order, as often."""
        theirs, mine = (
            Counter((group.epoch, group.prompt) for group in side.run.trained_groups) for side in (self.base, self)
        )
        return [
            f"{side.name} trained {extra.total():,} prompts that {than.name} did not, or trained less often, e.g. "
            f"'{min(extra)[1][:40]}' of epoch {min(extra)[0]}"
            for side, than, extra in ((self.base, self, theirs - mine), (self, self.base, mine - theirs))
            if extra
        ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Any number of runs, at least one."""

    base: Side
    others: list[Other]

    @property
    def sides(self) -> list[Side]:
        return [self.base, *self.others]

    @property
    def separate(self) -> bool:
        """Whether a run has separate placement, whose rollout has no end."""
        return any(side.run.settings.separate for side in self.sides)

    @property
    def unlike(self) -> list[str]:
        """In words: settings in which a run differs from the base."""
        return [
            f"the runs differ in {key}: {self.base.name} {wanted}, {other.name} {found}"
            for other in self.others
            for key in SHARED_SETTINGS
            if (found := getattr(other.run.settings, key)) != (wanted := getattr(self.base.run.settings, key))
        ]

    @property
    def warnings(self) -> list[str]:
        return [warning for side in self.sides for warning in side.warnings]


def compare(runs: Sequence[RunRecord]) -> Comparison:
    """Compare `runs` with a base: the first noPR run, at whatever position, or the first run if none is noPR."""
    base_run = next((run for run in runs if run.settings.arm is Arm.NOPR), runs[0])
    runs = [base_run, *(run for run in runs if run is not base_run)]
    first, *names = names_of(runs)
    base = Side(first, base_run)
    return Comparison(base, [Other(name, run, base) for name, run in zip(names, runs[1:], strict=True)])


def names_of(runs: Sequence[RunRecord]) -> list[str]:
    """Return a name for each run: its type if all types differ, else its directory relative to the common parent.

    If two runs have the same directory, the names are `run 1`, `run 2` and so on.
    """
    arms = [str(run.settings.arm) for run in runs]
    above = os.path.commonpath([os.path.abspath(run.directory) for run in runs])
    directories = [os.path.relpath(run.directory, above) for run in runs]
    numbers = [f"run {number}" for number in range(1, len(runs) + 1)]
    return next(names for names in (arms, directories, numbers) if len(set(names)) == len(runs))


def as_json(comparison: Comparison) -> dict[str, object]:
    """Return the content of `report.json`, except its cautions and findings."""
    return {
        "runs": {
            side.name: {
                **{name: getattr(side.summary, name) for name in METRICS},
                "run": {
                    "directory": side.run.directory,
                    **structs.asdict(side.run.settings),
                    "complete": side.run.complete,
                    "full_concurrency": side.run.settings.full_concurrency,
                },
            }
            for side in comparison.sides
        },
        "base": comparison.base.name,
        "against_base": {
            side.name: {"ratios": side.ratios, "differences": side.differences} for side in comparison.others
        },
        "unlike": comparison.unlike,
        "warnings": comparison.warnings,
    }
