"""Two runs compared: ratios, and whether they did the same work."""

import dataclasses
from collections import Counter
from dataclasses import dataclass

from recipe.partial_rollout.records.run_record import RunRecord
from recipe.partial_rollout.records.run_settings import Arm
from recipe.partial_rollout.tools.report.summary import Summary, engine_speed, full_tokens_per_s, ratio, summarize

SPEED_TOLERANCE = 0.10
"""Probes may differ by this share, from each other or from a run's decoding speed, before the report warns."""
SHARED_SETTINGS = ("batch_groups", "samples_per_group", "replicas", "slots_per_replica", "verl", "vllm")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs."""

    name: str
    """Its arm; `A` or `B` when both runs are of one arm."""
    run: RunRecord
    summary: Summary


@dataclass(frozen=True, slots=True)
class EqualWork:
    """Whether the two runs trained the same prompts equally often."""

    trained_groups_equal: bool
    same_prompts: bool
    """The same multiset of (epoch, prompt)."""
    each_prompt_once: dict[str, bool]
    """By side: no prompt is trained twice in an epoch."""
    differences: list[str]
    """In words; empty when the work is equal."""

    @property
    def equal(self) -> bool:
        return self.trained_groups_equal and self.same_prompts and all(self.each_prompt_once.values())


@dataclass(frozen=True, slots=True)
class Comparison:
    base: Side
    other: Side
    full_speed: float | None
    """Tokens per second of the engines kept full: median over both runs' probes."""
    ratios: dict[str, float | None]
    """Other over base."""
    equal_work: EqualWork
    warnings: list[str]

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.base, self.other


def compare(first: RunRecord, second: RunRecord) -> Comparison:
    """noPR is the base whatever the order; of two runs of one arm the first is."""
    names = ("A", "B") if first.settings.arm == second.settings.arm else ("noPR", "PR")
    if names == ("noPR", "PR") and first.settings.arm is Arm.PR:
        first, second = second, first
    both = full_tokens_per_s([first, second])
    base, other = (
        Side(name, run, summarize(run, engine_speed(run, (first, second))))
        for name, run in zip(names, (first, second), strict=True)
    )
    return Comparison(
        base=base,
        other=other,
        full_speed=both,
        ratios=_ratios(base.summary, other.summary),
        equal_work=_equal_work(base, other),
        warnings=[
            *first.warnings,
            *second.warnings,
            *_loss_warnings(base, other),
            *_setting_warnings(base, other),
            *_speed_warnings(base, other),
        ],
    )


def _ratios(base: Summary, other: Summary) -> dict[str, float | None]:
    ratios: dict[str, float | None] = {}
    for name in ("rollout_s", "train_s", "step_s"):
        mine, theirs = getattr(other, name), getattr(base, name)
        ratios[name] = ratio(mine, theirs)
        ratios[f"{name}_per_trained_token"] = ratio(
            ratio(mine, other.trained_tokens), ratio(theirs, base.trained_tokens)
        )
    for name in ("decoded_tokens_per_s", "efficiency", "trained_tokens", "decoded_tokens", "mean_trained_length"):
        ratios[name] = ratio(getattr(other, name), getattr(base, name))
    return ratios


def _equal_work(base: Side, other: Side) -> EqualWork:
    counts = {
        side.name: Counter((group.epoch, group.prompt) for group in side.run.trained_groups) for side in (base, other)
    }
    of_base, of_other = counts[base.name], counts[other.name]
    differences = []
    if base.summary.trained_groups != other.summary.trained_groups:
        differences.append(
            f"{base.name} trained {base.summary.trained_groups:,} groups, {other.name} {other.summary.trained_groups:,}"
        )
    for side, extra in ((base, of_base - of_other), (other, of_other - of_base)):
        if extra:
            differences.append(f"{extra.total():,} prompts only {side.name} trained, e.g. {_prompt(min(extra))}")
    for name, count in counts.items():
        if repeats := {key: times for key, times in count.items() if times > 1}:
            example = min(repeats)
            differences.append(
                f"{name} trained {len(repeats):,} prompts more than once in an epoch, "
                f"e.g. {_prompt(example)} {repeats[example]} times"
            )
    return EqualWork(
        trained_groups_equal=base.summary.trained_groups == other.summary.trained_groups,
        same_prompts=of_base == of_other,
        each_prompt_once={name: max(count.values(), default=0) <= 1 for name, count in counts.items()},
        differences=differences,
    )


def _prompt(key: tuple[int, str]) -> str:
    epoch, prompt = key
    return f"'{prompt[:40]}' of epoch {epoch}"


def _loss_warnings(base: Side, other: Side) -> list[str]:
    return [
        f"{side.name} lost {side.summary.lost_samples:,} samples; a sound run loses none"
        for side in (base, other)
        if side.summary.lost_samples
    ]


def _setting_warnings(base: Side, other: Side) -> list[str]:
    pairs = [(name, getattr(base.run.settings, name), getattr(other.run.settings, name)) for name in SHARED_SETTINGS]
    return [
        f"the runs differ in {name}: {base.name} {mine}, {other.name} {theirs}"
        for name, mine, theirs in pairs
        if mine != theirs
    ]


def _speed_warnings(base: Side, other: Side) -> list[str]:
    warnings = []
    match [full_tokens_per_s([side.run]) for side in (base, other)]:
        case [None, None]:
            warnings.append("neither run has a probe of the engines kept full, so there is no efficiency")
        case [float(mine), float(theirs)] if abs(mine - theirs) > SPEED_TOLERANCE * max(mine, theirs):
            warnings.append(
                f"the engines were not alike: kept full, {base.name} decoded {mine:,.0f} tokens/s, "
                f"{other.name} {theirs:,.0f}"
            )
    for side in (base, other):
        if (side.summary.efficiency or 0) > 1 + SPEED_TOLERANCE:
            warnings.append(
                f"{side.name} decoded faster ({side.summary.decoded_tokens_per_s:,.0f} tokens/s) than the engines kept "
                "full: the probe was too short or too early, so its efficiency means nothing"
            )
    return warnings


def as_json(comparison: Comparison) -> dict[str, object]:
    """The content of `report.json`, but for the findings."""
    engine = {side.name: full_tokens_per_s([side.run]) for side in comparison.sides}
    return {
        **{side.name: _side_json(side) for side in comparison.sides},
        "engine": {"full_tokens_per_s": comparison.full_speed, **engine},
        "ratios": comparison.ratios,
        "equal_work": {"equal": comparison.equal_work.equal, **dataclasses.asdict(comparison.equal_work)},
        "warnings": comparison.warnings,
    }


def _side_json(side: Side) -> dict[str, object]:
    summary = side.summary
    biases = {"run": summary.length_bias, **summary.length_bias_first}
    return {
        **dataclasses.asdict(summary),
        "length_bias": summary.length_bias and summary.length_bias.ratio,
        "length_bias_first": {name: bias and bias.ratio for name, bias in summary.length_bias_first.items()},
        "length_bias_unfinished_groups": {name: bias and bias.unfinished_groups for name, bias in biases.items()},
        "run": {
            "directory": side.run.directory,
            **dataclasses.asdict(side.run.settings),
            "full_concurrency": side.run.settings.full_concurrency,
        },
    }
