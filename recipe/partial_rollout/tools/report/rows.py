"""Rows of a report's tables: label, how a run shows it, and what it is in a line."""

from collections.abc import Callable
from dataclasses import dataclass

from recipe.partial_rollout.tools.report import units
from recipe.partial_rollout.tools.report.lanes import LaneShares
from recipe.partial_rollout.tools.report.summary import Spread, Summary, Wait, ratio


def _spread(spread: Spread | None) -> str:
    return f"{spread.mean:.2f} / {spread.p95:.0f} / {spread.max:.0f}" if spread else units.UNKNOWN


def _wait(wait: Wait | None) -> str:
    return f"{units.seconds(wait.median)} / {units.seconds(wait.max)}" if wait else units.UNKNOWN


def _kilotoken(seconds: float | None, tokens: float) -> str:
    return units.seconds(None if seconds is None else ratio(1000 * seconds, tokens))


def _lane(shares: LaneShares | None, name: str) -> str:
    return units.share(shares and getattr(shares, name))


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table of figures."""

    label: str
    show: Callable[[Summary], str]
    means: str
    """What it is, in a line."""
    ratio: str | None = None
    """The ratio to the base that stands beside it, by its name in `Contrast.ratios`."""
    always: bool = True
    """Shown even if no run has it."""


_BIAS = (
    "Mean length of what was trained over that of as many groups first dispatched, those that run with what they have; "
    "below 1, short ones came first."
)

FIGURES = (
    Figure("steps", lambda s: units.count(s.steps), "Training steps that have both a round and timers."),
    Figure("trained groups", lambda s: units.count(s.trained_groups), "Prompts trained, each with all its samples."),
    Figure(
        "trained tokens",
        lambda s: units.count(s.trained_tokens),
        "Tokens that the model generated in trained samples.",
        "trained_tokens",
    ),
    Figure(
        "decoded tokens",
        lambda s: units.count(s.decoded_tokens),
        "Tokens that the engines made; unfinished samples and lost work included.",
        "decoded_tokens",
    ),
    Figure(
        "wall time per 1,000 trained tokens",
        lambda s: _kilotoken(s.wall.seconds, s.wall.tokens) if s.wall else units.UNKNOWN,
        "From the first batch to the last, validation and checkpoints included: the figure to compare placements by.",
        "wall_s_per_trained_token",
    ),
    Figure(
        "trainer waits for batches",
        lambda s: _lane(s.lanes, "trainer_waits"),
        "Share of that time; where engines and trainer take turns, it is that of rollout.",
    ),
    Figure(
        "engines idle",
        lambda s: _lane(s.lanes, "engines_idle"),
        "Share of that time in which a replica ran no sample, mean over replicas; being held or validating is not idle.",
    ),
    Figure(
        "engines held",
        lambda s: _lane(s.lanes, "held"),
        "Share of that time in which all engines stood still for new weights or a checkpoint (separate placement).",
        always=False,
    ),
    Figure(
        "a hold, mean / max",
        lambda s: f"{units.seconds(s.hold_s.mean)} / {units.seconds(s.hold_s.max)}" if s.hold_s else units.UNKNOWN,
        "From the request to hold all engines for new weights until they go on, loading included (separate placement).",
        always=False,
    ),
    Figure(
        "rollout per 1,000 trained tokens",
        lambda s: _kilotoken(s.rollout_s, s.trained_tokens),
        "Seconds of rollout for equal work; none under separate placement, where all of the run is rollout.",
        "rollout_s_per_trained_token",
    ),
    Figure(
        "training per 1,000 trained tokens",
        lambda s: _kilotoken(s.train_s, s.trained_tokens),
        "Seconds of a step outside rollout (separate: outside the wait for the batch), for equal work.",
        "train_s_per_trained_token",
    ),
    Figure(
        "step per 1,000 trained tokens",
        lambda s: _kilotoken(s.step_s, s.trained_tokens),
        "Seconds of whole steps, for equal work.",
        "step_s_per_trained_token",
    ),
    Figure(
        "decoded tokens/s in rollout",
        lambda s: units.count(s.decoded_tokens_per_s),
        "Decoded tokens over the seconds of rollout; under separate placement over those of the run.",
        "decoded_tokens_per_s",
    ),
    Figure(
        "empty slots in rollout (bubble)",
        lambda s: units.share(s.bubble_fraction),
        "Share of the slots that a full batch fills which stood empty, averaged over rollout time.",
    ),
    Figure(
        "staleness, mean / p95 / max",
        lambda s: _spread(s.staleness),
        "Policy versions from a trained sample's first token to the update that trains it.",
    ),
    Figure(
        "off-policy tokens",
        lambda s: units.share(s.off_policy_token_fraction),
        "Share of trained tokens that older weights made than those that the update starts from.",
    ),
    Figure(
        "segments a sample, mean / p95 / max",
        lambda s: _spread(s.segments_per_sample),
        "Engine calls of a trained sample: one, and one more for each interruption, each tool turn and each hold.",
    ),
    Figure(
        "mean trained length",
        lambda s: units.count(s.mean_trained_length),
        "Response tokens of a trained sample; with tools, theirs included.",
        "mean_trained_length",
    ),
    Figure("trained / dispatched length, step 1", lambda s: units.decimal(s.length_bias["step_1"]), _BIAS),
    Figure("trained / dispatched length, steps 1-5", lambda s: units.decimal(s.length_bias["steps_1_to_5"]), _BIAS),
    Figure("trained / dispatched length, run", lambda s: units.decimal(s.length_bias["run"]), _BIAS),
    Figure("reward, first 3 steps", lambda s: units.precise(s.reward_first), "Mean reward of the trained samples."),
    Figure("reward, last 3 steps", lambda s: units.precise(s.reward_last), "Mean reward of the trained samples."),
    Figure(
        "interrupt, median / max",
        lambda s: _wait(s.interrupt_s),
        "From the decision to interrupt a round until every engine was quiet.",
    ),
    Figure(
        "resume, median / max", lambda s: _wait(s.resume_s), "From the opening of a round to its first engine call."
    ),
    Figure(
        "carried groups a round, mean / p95 / max",
        lambda s: _spread(s.carried_groups),
        "Unfinished groups that a round started with.",
    ),
    Figure("lost samples", lambda s: units.count(s.lost_samples), "Samples unaccounted for; a sound run loses none."),
)

PHASES = {
    "gen": (
        "rollout",
        "Generation; under PR until the batch is complete and the engines are quiet. Under separate placement the wait "
        "for the batch.",
    ),
    "reward": ("reward", "Rewards that the trainer computes; those of the workers are part of the rollout."),
    "old_log_prob": (
        "log-probs before the update",
        "The trainer's own log-probs of the batch, where it recomputes them.",
    ),
    "adv": ("advantage", "Advantages, on the driver."),
    "update_actor": ("actor update", "Forward, backward and optimizer steps of the policy."),
    "update_weights": ("weight sync", "Sending the new weights to the replicas."),
    "save_checkpoint": ("checkpoint", "Saving a checkpoint."),
    "other": ("other", "What no timer above covers."),
    "testing": ("validation (outside the step)", "Validation; its time is no part of the step."),
}
"""By verl's timer: label, and what it is."""

SETTINGS = {
    "experiment": "trainer.experiment_name",
    "arm": "noPR: verl's synchronous rollout. PR: partial rollout.",
    "placement": "Whether engines and trainer take turns or have devices of their own: partial_rollout.placement.",
    "mode": "How many prompts may be in flight, and since when: partial_rollout.mode.",
    "policy": "Which samples get slots first: partial_rollout.scheduling.policy.",
    "overtake": "How far a group may overtake an older one, as a share of a batch: partial_rollout.scheduling.overtake.",
    "max_staleness": "Bound on staleness, in policy versions.",
    "batch_groups": "Groups that a step trains.",
    "samples_per_group": "Samples of each prompt: rollout.n.",
    "replicas": "Engine replicas.",
    "slots_per_replica": "Samples that one replica runs at a time.",
    "full_concurrency": "Running samples when no slot is wasted: a whole batch, or all slots if the batch is larger.",
    "verl": "Its version.",
    "vllm": "Its version.",
    "complete": "Whether the training reached its end.",
}
"""Row of the table of runs, and what it is."""
