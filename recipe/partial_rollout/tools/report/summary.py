"""The figures of one run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipe.partial_rollout.records.figures import SECTION, Spread, bubble_fraction, spread
from recipe.partial_rollout.records.run_log import PhaseName
from recipe.partial_rollout.tools.report.lanes import LaneShares, lane_shares

if TYPE_CHECKING:
    from recipe.partial_rollout.tools.run_record import RunRecord, Step

REWARD_STEPS = 3
"""The first and last reward are means over this many steps."""
STEP_PHASES = ("gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights", "save_checkpoint")
"""verl's timers inside `timing_s/step`, in order."""
OUTSIDE_PHASES = ("testing",)
"""verl's timers that run after the step's own has stopped."""

LENGTH_BIAS = f"{SECTION}/length_bias"
"""Both arms log it."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Seconds."""

    median: float
    max: float


@dataclass(frozen=True, slots=True)
class Hold:
    """Seconds, over the updates of the weights."""

    mean: float
    max: float


@dataclass(frozen=True, slots=True)
class Wall:
    """Everything between two moments, validation and checkpoints included; of a resumed run, its pauses too."""

    seconds: float
    """From the first batch to the last."""
    tokens: int
    """Trained ones of the batches after the first."""

    @property
    def per_token(self) -> float | None:
        return ratio(self.seconds, self.tokens)


@dataclass(frozen=True, slots=True)
class Summary:
    """Seconds are verl's timers, summed over the steps that count."""

    steps: int
    trained_groups: int
    trained_samples: int
    trained_tokens: int
    decoded_tokens: int
    wall: Wall | None
    """None if the run has one batch only."""
    lanes: LaneShares | None
    """None if the run has one batch only."""
    hold_s: Hold | None
    """None where engines are never held."""
    rollout_s: float | None
    """None under separate placement, where all of the run is rollout."""
    train_s: float
    """Step minus rollout; under separate placement minus the wait for the batch."""
    step_s: float
    phases_s: dict[str, float]
    """By verl's timer name; `other` is what no listed timer covers."""
    decoded_tokens_per_s: float | None
    """In rollout; under separate placement from the first moment to the last batch."""
    bubble_fraction: float | None
    staleness: Spread | None
    """Per trained sample, in versions."""
    off_policy_token_fraction: float | None
    mean_trained_length: float | None
    length_bias: dict[str, float | None]
    """As logged after the first step, the fifth and the last; None if a step does not have it."""
    reward_first: float | None
    reward_last: float | None
    segments_per_sample: Spread | None
    interrupt_s: Wait | None
    resume_s: Wait | None
    carried_groups: Spread | None
    """Per round."""
    lost_samples: int
    """The most that any round counted as lost; 0 in a sound run."""


def ratio(part: float | None, whole: float | None) -> float | None:
    """`part / whole`; None if either is unknown or the whole is 0."""
    return part / whole if part is not None and whole else None


def wait(values: Sequence[float | None]) -> Wait | None:
    known = [value for value in values if value is not None]
    return Wait(statistics.median(known), max(known)) if known else None


def _wall(run: RunRecord) -> Wall | None:
    first, *later = run.steps
    if not later:
        return None
    tokens = sum(group.tokens for step in later for group in step.round.trained)
    return Wall(later[-1].round.phase.end - first.round.phase.end, tokens)


def _hold(run: RunRecord) -> Hold | None:
    first = run.rounds[0].phase.start
    # The first weights are loaded before anything decodes.
    holds = [phase.end - phase.start for phase in run.phases if phase.name == PhaseName.HOLD and phase.start >= first]
    return Hold(statistics.fmean(holds), max(holds)) if holds else None


def _length_bias(run: RunRecord) -> dict[str, float | None]:
    logged = [step.metrics.get(LENGTH_BIAS) for step in run.steps]
    return {"step_1": logged[0], "steps_1_to_5": logged[4] if len(logged) > 4 else None, "run": logged[-1]}


def _mean_reward(steps: Sequence[Step]) -> float | None:
    rewards = [step.metrics["critic/score/mean"] for step in steps if "critic/score/mean" in step.metrics]
    return statistics.fmean(rewards) if rewards else None


def _phases(run: RunRecord, step_s: float) -> dict[str, float]:
    inside = {name: sum(step.seconds(name) for step in run.steps) for name in STEP_PHASES}
    outside = {name: sum(step.seconds(name) for step in run.steps) for name in OUTSIDE_PHASES}
    return {**inside, "other": step_s - sum(inside.values()), **outside}


def summarize(run: RunRecord) -> Summary:
    """Sum up a run."""
    groups = run.trained_groups
    lengths = [length for step in run.steps for length in step.lengths]
    decoded = sum(step.round.phase.decoded_tokens for step in run.steps)
    tokens = sum(group.tokens for group in groups)
    step_s = sum(step.seconds("step") for step in run.steps)
    gen_s = sum(step.seconds("gen") for step in run.steps)
    separate = run.settings.separate
    speed = ratio(decoded, sum(round_.phase.seconds for round_ in run.rounds) if separate else gen_s)
    return Summary(
        steps=len(run.steps),
        trained_groups=len(groups),
        trained_samples=len(lengths),
        trained_tokens=tokens,
        decoded_tokens=decoded,
        wall=_wall(run),
        lanes=lane_shares(run),
        hold_s=_hold(run),
        rollout_s=None if separate else gen_s,
        train_s=step_s - gen_s,
        step_s=step_s,
        phases_s=_phases(run, step_s),
        decoded_tokens_per_s=speed,
        bubble_fraction=bubble_fraction(run.decoding, run.settings.full_concurrency),
        staleness=spread([age for step in run.steps for age in step.staleness]),
        off_policy_token_fraction=ratio(sum(group.off_policy_tokens for group in groups), tokens),
        mean_trained_length=statistics.fmean(lengths) if lengths else None,
        length_bias=_length_bias(run),
        reward_first=_mean_reward(run.steps[:REWARD_STEPS]),
        reward_last=_mean_reward(run.steps[-REWARD_STEPS:]),
        segments_per_sample=spread([count for group in groups for count in group.segments]),
        interrupt_s=wait([round_.interrupt_s for round_ in run.rounds]),
        resume_s=wait([round_.resume_s for round_ in run.rounds]),
        carried_groups=spread([round_.carried_groups for round_ in run.rounds]),
        lost_samples=max(round_.lost_samples for round_ in run.rounds),
    )
