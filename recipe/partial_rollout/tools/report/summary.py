"""The figures of one run: what each is, how it is computed, and how a table shows it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_origin, get_type_hints

from recipe.partial_rollout.records.figures import SECTION, Spread, bubble_fraction, length_sigmas, spread
from recipe.partial_rollout.records.run_log import PhaseName
from recipe.partial_rollout.tools.report import units
from recipe.partial_rollout.tools.report.lanes import lane_shares
from recipe.partial_rollout.tools.run_record import RunRecord, Step

REWARD_STEPS = 3
"""The first and last reward are means over this many steps."""
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
    "step": ("step", "All of a step but validation; the sum of the phases above."),
}
"""By verl's timer: label, and what it is. Validation runs after the step's timer has stopped."""

LENGTH_BIAS = f"{SECTION}/length_bias"
"""Both arms log it."""


@dataclass(frozen=True, slots=True)
class Row:
    """How the table of figures shows a figure."""

    label: str
    words: Callable[[Any], str]
    means: str
    """What it is, in a line."""
    compared: bool = False
    """Its ratio to the base stands beside it."""
    always: bool = True
    """Shown even if no run has it."""


_BIAS = (
    "Mean length of what was trained over that of as many groups first dispatched, those that run with what they have; "
    "below 1, short ones came first."
)


_SCORE = re.compile(r"val-core/(.+)/(mean|best|maj)@(\d+)(?:/mean)?")
"""verl's core metric of a data source: of the last two kinds the mean over its draws of k of the responses"""


@dataclass(frozen=True, slots=True)
class Validation:
    """verl's core metrics of a validation, accuracies where the reward function gives some."""

    step: int
    scores: dict[str, dict[str, float]]
    """`mean@4`, `best@4`, `maj@4` -> `SOURCE/VARIABLE` -> value"""

    def shown(self, kind: str) -> str:
        """Of ``mean``, ``best`` or ``maj``: its mean over the sources, and k."""
        found = [(name, by_source) for name, by_source in self.scores.items() if name.startswith(f"{kind}@")]
        return ", ".join(f"{statistics.fmean(by.values()):.3f} {name[len(kind) :]}" for name, by in found) or "-"


@dataclass(frozen=True, slots=True)
class Summary:
    """Those with a ``Row`` stand in the table of figures, in this order.

    Seconds are verl's timers, summed over the steps that count; None: the run does not have the figure.
    """

    rollout_s: float | None
    """None under separate placement, where all of the run is rollout."""
    train_s: float
    """Step minus rollout; under separate placement minus the wait for the batch."""
    step_s: float
    phases_s: dict[str, float]
    """By verl's timer name; `other` is what no listed timer covers."""
    total_s: float
    """Steps and validations between them, without the pauses of a resumed run."""
    validation: Validation | None
    """The last one."""
    steps: int
    """Those that have both a round and timers."""
    bubble_fraction: float | None
    device_use: float | None
    """Share of rollout time in which the GPUs of the driver's node were busy, by NVML."""
    staleness: Spread | None
    trained_groups: Annotated[int, Row("trained groups", units.count, "Prompts trained, each with all its samples.")]
    trained_tokens: Annotated[
        int, Row("trained tokens", units.count, "Tokens that the model generated in trained samples.", compared=True)
    ]
    decoded_tokens: Annotated[
        int,
        Row(
            "decoded tokens",
            units.count,
            "Tokens that the engines made; unfinished samples and lost work included.",
            compared=True,
        ),
    ]
    wall_s_per_trained_token: Annotated[
        float | None,
        Row(
            "wall time per 1,000 trained tokens",
            units.kilo_seconds,
            "From the first batch to the last, validation, checkpoints and a resumed run's pauses included: the figure to "
            "compare placements by.",
            compared=True,
        ),
    ]
    trainer_waits: Annotated[
        float | None,
        Row(
            "trainer waits for batches",
            units.share,
            "Share of that time; where engines and trainer take turns, it is that of rollout.",
        ),
    ]
    engines_idle: Annotated[
        float | None,
        Row(
            "engines idle",
            units.share,
            "Share of that time in which a replica ran no sample, mean over replicas; held or validating is not idle.",
        ),
    ]
    engines_held: Annotated[
        float | None,
        Row(
            "engines held",
            units.share,
            "Share of that time in which all engines stood still for new weights or a checkpoint (separate placement).",
            always=False,
        ),
    ]
    hold_s: Annotated[
        Spread | None,
        Row(
            "a hold, mean / p95 / max",
            units.spread_s,
            "From the request to hold all engines for new weights until they go on, loading included (separate placement).",
            always=False,
        ),
    ]
    rollout_s_per_trained_token: Annotated[
        float | None,
        Row(
            "rollout per 1,000 trained tokens",
            units.kilo_seconds,
            "Seconds of rollout for equal work; none under separate placement, where all of the run is rollout.",
            compared=True,
        ),
    ]
    train_s_per_trained_token: Annotated[
        float | None,
        Row(
            "training per 1,000 trained tokens",
            units.kilo_seconds,
            "Seconds of a step outside rollout (separate: outside the wait for the batch), for equal work.",
            compared=True,
        ),
    ]
    step_s_per_trained_token: Annotated[
        float | None,
        Row(
            "step per 1,000 trained tokens",
            units.kilo_seconds,
            "Seconds of whole steps, for equal work.",
            compared=True,
        ),
    ]
    decoded_tokens_per_s: Annotated[
        float | None,
        Row(
            "decoded tokens/s in rollout",
            units.count,
            "Decoded tokens over the seconds of rollout; under separate placement over those of the run.",
            compared=True,
        ),
    ]
    trainer_tokens_per_s: Annotated[
        tuple[float | None, float | None] | None,
        Row(
            "tokens/s of the pass, of the update",
            units.pair,
            "Tokens of prompts and responses over verl's timers `old_log_prob`, in steps where verl logs the pass's MFU "
            "(v1 logs none), and `update_actor`; several epochs count them once.",
        ),
    ]
    mfu: Annotated[
        tuple[float | None, float | None, float | None] | None,
        Row(
            "MFU of rollout, pass, update",
            units.shares,
            "Share of the devices' peak, which verl knows (a CPU's is a guess: 448 GFLOP/s). Rollout's is the pass's, "
            "times decoded tokens/s over those of the pass; none under separate placement.",
            always=False,
        ),
    ]
    off_policy_token_fraction: Annotated[
        float | None,
        Row(
            "off-policy tokens",
            units.share,
            "Share of trained tokens that older weights made than those that the update starts from.",
        ),
    ]
    segments_per_sample: Annotated[
        Spread | None,
        Row(
            "segments a sample, mean / p95 / max",
            units.spread,
            "Engine calls of a trained sample: one, and one more for each interruption, each tool turn and each hold.",
        ),
    ]
    mean_trained_length: Annotated[
        float | None,
        Row(
            "mean trained length",
            units.count,
            "Response tokens of a trained sample; with tools, theirs included.",
            compared=True,
        ),
    ]
    length_sigma: Annotated[
        tuple[float, float] | None,
        Row(
            "sigma of lengths, in a batch / in a group",
            units.pair,
            "Standard deviation of response tokens, mean over steps. The larger it is beside the mean length, the longer a "
            "synchronous batch waits for its last response.",
        ),
    ]
    mixed: Annotated[
        tuple[float, float] | None,
        Row(
            "made by several versions: samples / tokens",
            units.shares,
            "Share of trained samples that went on under new weights, and of the tokens that these have; mean over steps.",
        ),
    ]
    length_bias_step_1: Annotated[float | None, Row("trained / dispatched length, step 1", units.decimal, _BIAS)]
    length_bias_steps_1_to_5: Annotated[
        float | None, Row("trained / dispatched length, steps 1-5", units.decimal, _BIAS)
    ]
    length_bias: Annotated[float | None, Row("trained / dispatched length, run", units.decimal, _BIAS)]
    reward_first: Annotated[
        float | None, Row("reward, first 3 steps", units.precise, "Mean reward of the trained samples.")
    ]
    reward_last: Annotated[
        float | None, Row("reward, last 3 steps", units.precise, "Mean reward of the trained samples.")
    ]
    interrupt_s: Annotated[
        Spread | None,
        Row(
            "interrupt, mean / p95 / max",
            units.spread_s,
            "From the decision to interrupt a round until every engine was quiet.",
        ),
    ]
    resume_s: Annotated[
        Spread | None,
        Row("resume, mean / p95 / max", units.spread_s, "From the opening of a round to its first engine call."),
    ]
    carried_groups: Annotated[
        Spread | None,
        Row("carried groups a round, mean / p95 / max", units.spread, "Unfinished groups that a round started with."),
    ]
    lost_samples: Annotated[
        int,
        Row("lost samples", units.count, "The most that a round counted as unaccounted for; a sound run loses none."),
    ]


ROWS: dict[str, Row] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Summary, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""The rows of the table of figures, by the figure's name."""


def ratio(part: float | None, whole: float | None) -> float | None:
    """`part / whole`; None if either is unknown or the whole is 0."""
    return part / whole if part is not None and whole else None


def _wall_s_per_token(run: RunRecord) -> float | None:
    first, *later = run.steps
    tokens = sum(group.tokens for step in later for group in step.round.trained)
    return ratio(run.rounds[-1].phase.end - first.round.phase.end, tokens)


def _holds(run: RunRecord) -> list[float]:
    # The first weights are loaded before anything decodes.
    return [p.end - p.start for p in run.phases if p.name == PhaseName.HOLD and p.start >= run.start]


def _known_spread(values: Sequence[float | None]) -> Spread | None:
    return spread([value for value in values if value is not None])


def _mean_reward(steps: Sequence[Step]) -> float | None:
    rewards = [step.metrics["critic/score/mean"] for step in steps if "critic/score/mean" in step.metrics]
    return statistics.fmean(rewards) if rewards else None


def _mean_pair(pairs: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    return (statistics.fmean(a for a, _ in pairs), statistics.fmean(b for _, b in pairs)) if pairs else None


def _device_use(run: RunRecord) -> float | None:
    """Mean over the steps that log it, by the seconds of their rounds."""
    key = "partial_rollout/rollout/device_use"
    known = [(step.round.phase.seconds, step.metrics[key]) for step in run.steps if key in step.metrics]
    return ratio(sum(seconds * use for seconds, use in known), sum(seconds for seconds, _ in known))


def _total(steps: Sequence[Step], timer: str) -> tuple[float, float]:
    """Tokens of ``steps``, and the seconds of ``timer``."""
    return sum(step.metrics.get("perf/total_num_tokens", 0) for step in steps), sum(
        step.seconds(timer) for step in steps
    )


def _work(run: RunRecord, gen_s: float, decoded: int) -> tuple[Any, Any]:
    """Tokens/s of the pass and the update; MFU of rollout, pass and update, None where verl knows no peak."""
    passes = [step for step in run.steps if "perf/mfu/actor_infer" in step.metrics]
    speeds = ratio(*_total(passes, "old_log_prob")), ratio(*_total(run.steps, "update_actor"))
    shares = []
    for steps, timer, key in ((passes, "old_log_prob", "actor_infer"), (run.steps, "update_actor", "actor")):
        used = sum(step.metrics.get(f"perf/mfu/{key}", 0) * step.seconds(timer) for step in steps)
        shares.append(ratio(used, _total(steps, timer)[1]))
    if not shares[1]:
        return speeds, None
    # A decoded token takes what one of the pass does, on the same devices.
    speed = None if run.settings.separate else ratio(ratio(decoded, gen_s), speeds[0])
    return speeds, (None if speed is None or shares[0] is None else shares[0] * speed, *shares)


def _validation(run: RunRecord) -> Validation | None:
    for step in reversed(run.steps):
        scores: dict[str, dict[str, float]] = {}
        for key, value in step.metrics.items():
            if found := _SCORE.fullmatch(key):
                source, kind, k = found.groups()
                scores.setdefault(f"{kind}@{k}", {})[source] = value
        if scores:
            return Validation(step.number, scores)
    return None


def _phases(run: RunRecord) -> dict[str, float]:
    spent = {name: sum(step.seconds(name) for step in run.steps) for name in PHASES}
    spent["other"] = spent["step"] - sum(spent[name] for name in PHASES if name not in ("testing", "step"))
    return spent


def summarize(run: RunRecord) -> Summary:
    """Sum up a run."""
    groups = run.trained_groups
    lengths = [length for step in run.steps for length in step.lengths]
    decoded = sum(step.round.phase.decoded_tokens for step in run.steps)
    tokens = sum(group.tokens for group in groups)
    phases_s = _phases(run)
    step_s, gen_s = phases_s["step"], phases_s["gen"]
    separate = run.settings.separate
    rollout_s = None if separate else gen_s
    waits, idle, held = lane_shares(run)
    biases = [step.metrics.get(LENGTH_BIAS) for step in run.steps]
    trainer_speeds, mfu = _work(run, gen_s, decoded)
    return Summary(
        rollout_s=rollout_s,
        train_s=step_s - gen_s,
        step_s=step_s,
        phases_s=phases_s,
        total_s=step_s + phases_s["testing"],
        validation=_validation(run),
        steps=len(run.steps),
        trained_groups=len(groups),
        trained_tokens=tokens,
        decoded_tokens=decoded,
        wall_s_per_trained_token=_wall_s_per_token(run),
        trainer_waits=waits,
        engines_idle=idle,
        engines_held=held,
        hold_s=spread(_holds(run)),
        rollout_s_per_trained_token=ratio(rollout_s, tokens),
        train_s_per_trained_token=ratio(step_s - gen_s, tokens),
        step_s_per_trained_token=ratio(step_s, tokens),
        decoded_tokens_per_s=ratio(decoded, sum(round_.phase.seconds for round_ in run.rounds) if separate else gen_s),
        trainer_tokens_per_s=trainer_speeds,
        mfu=mfu,
        bubble_fraction=bubble_fraction(run.decoding, run.settings.full_concurrency),
        device_use=_device_use(run),
        staleness=spread([age for step in run.steps for age in step.staleness]),
        off_policy_token_fraction=ratio(sum(group.off_policy_tokens for group in groups), tokens),
        segments_per_sample=spread([count for group in groups for count in group.segments]),
        mean_trained_length=statistics.fmean(lengths) if lengths else None,
        length_sigma=_mean_pair([length_sigmas([g.lengths for g in step.round.trained]) for step in run.steps]),
        mixed=_mean_pair([shares for step in run.steps if (shares := step.mixed)]),
        length_bias_step_1=biases[0],
        length_bias_steps_1_to_5=biases[4] if len(biases) > 4 else None,
        length_bias=biases[-1],
        reward_first=_mean_reward(run.steps[:REWARD_STEPS]),
        reward_last=_mean_reward(run.steps[-REWARD_STEPS:]),
        interrupt_s=_known_spread([round_.interrupt_s for round_ in run.rounds]),
        resume_s=_known_spread([round_.resume_s for round_ in run.rounds]),
        carried_groups=spread([round_.carried_groups for round_ in run.rounds]),
        lost_samples=max(round_.lost_samples for round_ in run.rounds),
    )
