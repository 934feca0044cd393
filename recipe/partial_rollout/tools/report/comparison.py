"""Runs compared: ratios against a base, whether they did the same work, and whether their engines were alike."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

from msgspec import structs

from recipe.partial_rollout.records.run_log import Arm
from recipe.partial_rollout.tools.report.summary import FIGURES, ratio, summarize
from recipe.partial_rollout.tools.run_record import RunRecord
from recipe.partial_rollout.training.step_log import PolicyDrift

PARTS = 4
"""of a run, over which the range of a ratio is taken"""
COMPARED = [name for name, figure in FIGURES.items() if figure.compared]
SHARED_SETTINGS = ("batch_groups", "samples_per_group", "replicas", "slots_per_replica", "verl", "vllm")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the runs, and how it compares to the base."""

    name: str
    """Its arm, or what its directory has in no other run's; see `names_of`."""
    run: RunRecord
    summary: SimpleNamespace
    """Its figures; see `FIGURES`."""
    ratios: dict[str, float | None] = field(default_factory=dict)
    """Its figure over the base's, by the figure's name."""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Smallest and largest of a ratio among quarters, each over the base's same quarter; of runs of eight steps or more."""
    differences: list[str] = field(default_factory=list)
    """In words, how the work differs; empty if both trained the same (epoch, prompt), in any order, each once."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Any number of runs, at least one."""

    base: Side
    others: list[Side]
    unlike: list[str]
    """In words: settings in which a run differs from the base."""
    warnings: list[str]

    @property
    def sides(self) -> list[Side]:
        return [self.base, *self.others]

    @property
    def separate(self) -> bool:
        """Whether a run has separate placement, whose rollout has no end."""
        return any(side.run.settings.separate for side in self.sides)


def compare(runs: Sequence[RunRecord]) -> Comparison:
    """The base is the first run of noPR, wherever it stands; without one it is the first run."""
    base_run = next((run for run in runs if run.settings.arm is Arm.NOPR), runs[0])
    runs = [base_run, *(run for run in runs if run is not base_run)]
    sides = [Side(name, run, summarize(run)) for name, run in zip(names_of(runs), runs, strict=True)]
    base, *others = sides
    return Comparison(
        base=base,
        others=[
            replace(
                side,
                ratios=_ratios(base.summary, side.summary),
                ranges=_ranges(base, side),
                differences=_differences(base, side),
            )
            for side in others
        ],
        unlike=[line for side in others for line in _unlike_settings(base, side)],
        warnings=[
            *(warning for run in runs for warning in run.warnings),
            *_loss_warnings(sides),
            *_drift_warnings(sides),
        ],
    )


def names_of(runs: Sequence[RunRecord]) -> list[str]:
    """Their arms if these differ, else what differs in their directories, else numbers.

    Of ``out/noPR/seed_1`` and ``out/PR/seed_1`` it is ``noPR`` and ``PR``.
    """
    arms = [str(run.settings.arm) for run in runs]
    paths = [Path(run.directory).absolute().parts for run in runs]
    start = _shared(paths)
    end = _shared([path[start:][::-1] for path in paths])
    differing = ["/".join(path[start : len(path) - end]) for path in paths]
    numbers = [f"run {number}" for number in range(1, len(runs) + 1)]
    return next(names for names in (arms, differing, numbers) if all(names) and len(set(names)) == len(runs))


def _shared(paths: Sequence[Sequence[str]]) -> int:
    """Number of first parts that all have in common."""
    columns = zip(*paths, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda parts: len(set(parts)) == 1, columns))


def _ratios(base: SimpleNamespace, other: SimpleNamespace) -> dict[str, float | None]:
    ratios = {name: ratio(getattr(other, name), getattr(base, name)) for name in COMPARED}
    if (base.rollout_s is None) is not (other.rollout_s is None):
        # One is per second of rollout, the other per second of the run.
        ratios["decoded_tokens_per_s"] = None
    return ratios


def _ranges(base: Side, other: Side) -> dict[str, tuple[float, float]]:
    if any(side.run.settings.separate or len(side.run.steps) < 2 * PARTS for side in (base, other)):
        return {}
    found = {}
    for name, timer in (("rollout_s", "gen"), ("step_s", "step")):
        theirs, mine = (_by_parts(side.run, timer) for side in (base, other))
        ratios = [ours / before for ours, before in zip(mine, theirs, strict=True) if before]
        found[f"{name}_per_trained_token"] = min(ratios), max(ratios)
    return found


def _by_parts(run: RunRecord, timer: str) -> list[float]:
    """Seconds of ``timer`` a trained token, of each part of the run's steps."""
    bounds = [len(run.steps) * part // PARTS for part in range(PARTS + 1)]
    parts = [run.steps[first:last] for first, last in itertools.pairwise(bounds)]
    tokens = [sum(group.tokens for step in part for group in step.round.trained) for part in parts]
    return [sum(step.seconds(timer) for step in part) / max(1, n) for part, n in zip(parts, tokens, strict=True)]


def _differences(base: Side, other: Side) -> list[str]:
    of_base, of_other = (
        Counter((group.epoch, group.prompt) for group in side.run.trained_groups) for side in (base, other)
    )
    found = []
    for side, extra in ((base, of_base - of_other), (other, of_other - of_base)):
        if extra:
            found.append(f"{extra.total():,} prompts only {side.name} trained, e.g. {_prompt(min(extra))}")
    for side, count in ((base, of_base), (other, of_other)):
        if repeats := {key: times for key, times in count.items() if times > 1}:
            example = min(repeats)
            found.append(
                f"{side.name} trained {len(repeats):,} prompts more than once in an epoch, "
                f"e.g. {_prompt(example)} {repeats[example]} times"
            )
    return found


def _prompt(key: tuple[int, str]) -> str:
    epoch, prompt = key
    return f"'{prompt[:40]}' of epoch {epoch}"


def _unlike_settings(base: Side, other: Side) -> list[str]:
    pairs = [(name, getattr(base.run.settings, name), getattr(other.run.settings, name)) for name in SHARED_SETTINGS]
    return [
        f"the runs differ in {name}: {base.name} {mine}, {other.name} {theirs}"
        for name, mine, theirs in pairs
        if mine != theirs
    ]


def _loss_warnings(sides: Sequence[Side]) -> list[str]:
    return [
        f"{side.name} lost {side.summary.lost_samples:,} samples; a sound run loses none"
        for side in sides
        if side.summary.lost_samples
    ]


def _drift_warnings(sides: Sequence[Side]) -> list[str]:
    """Of each run whose terminal warned of drift, or of a figure that is no number."""
    found = []
    for side in sides:
        drift = PolicyDrift()
        warned = [str(step.number) for step in side.run.steps if drift.observe(step.metrics, step.number)]
        if warned:
            found.append(
                f"{side.name} drifted far from the policy that made its samples, or logged no number, at step "
                f"{', '.join(warned)}: its reward is likely to fall (docs/tuning.md)"
            )
    return found


def as_json(comparison: Comparison) -> dict[str, object]:
    """The content of `report.json`, but for the findings."""
    return {
        "runs": {
            side.name: {
                **vars(side.summary),
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
            side.name: {"ratios": side.ratios, "ranges": side.ranges, "differences": side.differences}
            for side in comparison.others
        },
        "unlike": comparison.unlike,
        "warnings": comparison.warnings,
    }
