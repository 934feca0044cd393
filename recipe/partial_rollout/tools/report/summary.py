"""The figures of one run: what each is, how it is computed, and how a table shows it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

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
_BIAS = (
    "Mean length of what was trained over that of as many groups first dispatched, those that run with what they have; "
    "below 1, short ones came first."
)
_SCORE = re.compile(r"val-core/(.+)/(mean|best|maj)@(\d+)(?:/mean)?")
"""verl's core metric of a data source: of the last two kinds the mean over its draws of k of the responses"""


@dataclass(frozen=True, slots=True)
class Validation:
    """verl's core metrics of the last validation, accuracies where the reward function gives some."""

    step: int | None
    """None: there was none"""
    scores: dict[str, dict[str, float]]
    """`mean@4`, `best@4`, `maj@4` -> `SOURCE/VARIABLE` -> value"""

    def shown(self, kind: str) -> str:
        """Of ``mean``, ``best`` or ``maj``: its mean over the sources, and k."""
        found = [(name, by_source) for name, by_source in self.scores.items() if name.startswith(f"{kind}@")]
        return ", ".join(f"{statistics.fmean(by.values()):.3f} {name[len(kind) :]}" for name, by in found) or "-"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a run; those with a label stand in the table of figures."""

    of: Callable[[RunRecord, SimpleNamespace], Any]
    """Of a run, and of its figures so far."""
    label: str = ""
    words: Callable[[Any], str] = str
    means: str = ""
    """What it is, in a line."""
    compared: bool = False
    """Its ratio to the base is a figure too, and stands beside it."""
    always: bool = True
    """Shown even if no run has it."""


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


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _known_spread(values: Sequence[float | None]) -> Spread | None:
    return spread([value for value in values if value is not None])


def _rewards(steps: Sequence[Step]) -> list[float]:
    return [step.metrics["critic/score/mean"] for step in steps if "critic/score/mean" in step.metrics]


def _bias_of_five(run: RunRecord) -> float | None:
    return run.steps[4].metrics.get(LENGTH_BIAS) if len(run.steps) > 4 else None


def _mean_pair(pairs: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    return (statistics.fmean(a for a, _ in pairs), statistics.fmean(b for _, b in pairs)) if pairs else None


def _bubble(run: RunRecord) -> float | None:
    return bubble_fraction([step.decoding for step in run.steps], run.settings.full_concurrency)


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


def _spans_s(run: RunRecord) -> float:
    return sum(round_.phase.seconds for round_ in run.rounds)


def _passes(run: RunRecord) -> list[Step]:
    """Steps with a pass over the batch before the update."""
    return [step for step in run.steps if "perf/mfu/actor_infer" in step.metrics]


def _phases(run: RunRecord) -> dict[str, float]:
    spent = {name: sum(step.seconds(name) for step in run.steps) for name in PHASES}
    spent["other"] = spent["step"] - sum(spent[name] for name in PHASES if name not in ("testing", "step"))
    return spent


def _mfu(run: RunRecord, known: SimpleNamespace) -> tuple[float | None, ...] | None:
    """Of rollout, pass and update; None where verl knows no peak."""
    shares = []
    for steps, timer, key in ((_passes(run), "old_log_prob", "actor_infer"), (run.steps, "update_actor", "actor")):
        used = sum(step.metrics.get(f"perf/mfu/{key}", 0) * step.seconds(timer) for step in steps)
        shares.append(ratio(used, _total(steps, timer)[1]))
    of_pass, of_update = shares
    if not of_update:
        return None
    # A decoded token takes what one of the pass does, on the same devices.
    speed = ratio(ratio(known.decoded_tokens, known.rollout_s), known.trainer_tokens_per_s[0])
    return None if speed is None or of_pass is None else of_pass * speed, of_pass, of_update


def _validation(run: RunRecord) -> Validation:
    for step in reversed(run.steps):
        scores: dict[str, dict[str, float]] = {}
        for key, value in step.metrics.items():
            if found := _SCORE.fullmatch(key):
                source, kind, k = found.groups()
                scores.setdefault(f"{kind}@{k}", {})[source] = value
        if scores:
            return Validation(step.number, scores)
    return Validation(None, {})


FIGURES: dict[str, Figure] = {
    # Seconds are verl's timers, summed over the steps that count.
    "phases_s": Figure(lambda run, _: _phases(run)),
    # Under separate placement all of the run is rollout, and what is left of a step is without the wait for the batch.
    "rollout_s": Figure(lambda run, known: None if run.settings.separate else known.phases_s["gen"], compared=True),
    "train_s": Figure(lambda _, known: known.phases_s["step"] - known.phases_s["gen"], compared=True),
    "step_s": Figure(lambda _, known: known.phases_s["step"], compared=True),
    # Steps and validations between them, without the pauses of a resumed run.
    "total_s": Figure(lambda _, known: known.phases_s["step"] + known.phases_s["testing"]),
    "lane_shares": Figure(lambda run, _: lane_shares(run)),
    "validation": Figure(lambda run, _: _validation(run)),
    "steps": Figure(lambda run, _: len(run.steps)),
    "bubble_fraction": Figure(lambda run, _: _bubble(run)),
    "device_use": Figure(lambda run, _: _device_use(run)),
    "staleness": Figure(lambda run, _: spread([age for step in run.steps for age in step.staleness])),
    "trained_groups": Figure(
        lambda run, _: len(run.trained_groups),
        "trained groups",
        units.count,
        "Prompts trained, each with all its samples.",
    ),
    "trained_tokens": Figure(
        lambda run, _: sum(group.tokens for group in run.trained_groups),
        "trained tokens",
        units.count,
        "Tokens that the model generated in trained samples.",
        compared=True,
    ),
    "decoded_tokens": Figure(
        lambda run, _: sum(round_.phase.decoded_tokens for round_ in run.rounds),
        "decoded tokens",
        units.count,
        "Tokens that the engines made; unfinished samples and lost work included.",
        compared=True,
    ),
    "wall_s_per_trained_token": Figure(
        lambda run, _: _wall_s_per_token(run),
        "wall time per 1,000 trained tokens",
        units.kilo_seconds,
        "From the first batch to the last, validation, checkpoints and a resumed run's pauses included: the figure to "
        "compare placements by.",
        compared=True,
    ),
    "trainer_waits": Figure(
        lambda _, known: known.lane_shares[0],
        "trainer waits for batches",
        units.share,
        "Share of that time; where engines and trainer take turns, it is that of rollout.",
    ),
    "engines_idle": Figure(
        lambda _, known: known.lane_shares[1],
        "engines idle",
        units.share,
        "Share of that time in which a replica ran no sample, mean over replicas; held or validating is not idle.",
    ),
    "engines_held": Figure(
        lambda _, known: known.lane_shares[2],
        "engines held",
        units.share,
        "Share of that time in which all engines stood still for new weights or a checkpoint (separate placement).",
        always=False,
    ),
    "hold_s": Figure(
        lambda run, _: spread(_holds(run)),
        "a hold, mean / p95 / max",
        units.spread_s,
        "From the request to hold all engines for new weights until they go on, loading included (separate placement).",
        always=False,
    ),
    "rollout_s_per_trained_token": Figure(
        lambda _, known: ratio(known.rollout_s, known.trained_tokens),
        "rollout per 1,000 trained tokens",
        units.kilo_seconds,
        "Seconds of rollout for equal work; none under separate placement, where all of the run is rollout.",
        compared=True,
    ),
    "train_s_per_trained_token": Figure(
        lambda _, known: ratio(known.train_s, known.trained_tokens),
        "training per 1,000 trained tokens",
        units.kilo_seconds,
        "Seconds of a step outside rollout (separate: outside the wait for the batch), for equal work.",
        compared=True,
    ),
    "step_s_per_trained_token": Figure(
        lambda _, known: ratio(known.step_s, known.trained_tokens),
        "step per 1,000 trained tokens",
        units.kilo_seconds,
        "Seconds of whole steps, for equal work.",
        compared=True,
    ),
    "decoded_tokens_per_s": Figure(
        lambda run, known: ratio(
            known.decoded_tokens, known.rollout_s if known.rollout_s is not None else _spans_s(run)
        ),
        "decoded tokens/s in rollout",
        units.count,
        "Decoded tokens over the seconds of rollout; under separate placement over those of the run.",
        compared=True,
    ),
    "trainer_tokens_per_s": Figure(
        lambda run, _: (ratio(*_total(_passes(run), "old_log_prob")), ratio(*_total(run.steps, "update_actor"))),
        "tokens/s of the pass, of the update",
        units.pair,
        "Tokens of prompts and responses over verl's timers `old_log_prob`, in steps where verl logs the pass's MFU "
        "(v1 logs none), and `update_actor`; several epochs count them once.",
    ),
    "mfu": Figure(
        _mfu,
        "MFU of rollout, pass, update",
        units.shares,
        "Share of the devices' peak, which verl knows (a CPU's is a guess: 448 GFLOP/s). Rollout's is the pass's, "
        "times decoded tokens/s over those of the pass; none under separate placement.",
        always=False,
    ),
    "off_policy_token_fraction": Figure(
        lambda run, known: ratio(sum(group.off_policy_tokens for group in run.trained_groups), known.trained_tokens),
        "off-policy tokens",
        units.share,
        "Share of trained tokens that older weights made than those that the update starts from.",
    ),
    "segments_per_sample": Figure(
        lambda run, _: spread([count for group in run.trained_groups for count in group.segments]),
        "segments a sample, mean / p95 / max",
        units.spread,
        "Engine calls of a trained sample: one, and one more for each interruption, each tool turn and each hold.",
    ),
    "mean_trained_length": Figure(
        lambda run, _: _mean([length for step in run.steps for length in step.lengths]),
        "mean trained length",
        units.count,
        "Response tokens of a trained sample; with tools, theirs included.",
        compared=True,
    ),
    "length_sigma": Figure(
        lambda run, _: _mean_pair(
            [length_sigmas([group.lengths for group in round_.trained]) for round_ in run.rounds]
        ),
        "sigma of lengths, in a batch / in a group",
        units.pair,
        "Standard deviation of response tokens, mean over steps. The larger it is beside the mean length, the longer a "
        "synchronous batch waits for its last response.",
    ),
    "mixed": Figure(
        lambda run, _: _mean_pair([shares for step in run.steps if (shares := step.mixed)]),
        "made by several versions: samples / tokens",
        units.shares,
        "Share of trained samples that went on under new weights, and of the tokens that these have; mean over steps.",
    ),
    "length_bias_step_1": Figure(
        lambda run, _: run.steps[0].metrics.get(LENGTH_BIAS),
        "trained / dispatched length, step 1",
        units.decimal,
        _BIAS,
    ),
    "length_bias_steps_1_to_5": Figure(
        lambda run, _: _bias_of_five(run),
        "trained / dispatched length, steps 1-5",
        units.decimal,
        _BIAS,
    ),
    "length_bias": Figure(
        lambda run, _: run.steps[-1].metrics.get(LENGTH_BIAS),
        "trained / dispatched length, run",
        units.decimal,
        _BIAS,
    ),
    "reward_first": Figure(
        lambda run, _: _mean(_rewards(run.steps[:REWARD_STEPS])),
        "reward, first 3 steps",
        units.precise,
        "Mean reward of the trained samples.",
    ),
    "reward_last": Figure(
        lambda run, _: _mean(_rewards(run.steps[-REWARD_STEPS:])),
        "reward, last 3 steps",
        units.precise,
        "Mean reward of the trained samples.",
    ),
    "interrupt_s": Figure(
        lambda run, _: _known_spread([round_.interrupt_s for round_ in run.rounds]),
        "interrupt, mean / p95 / max",
        units.spread_s,
        "From the decision to interrupt a round until every engine was quiet.",
    ),
    "resume_s": Figure(
        lambda run, _: _known_spread([round_.resume_s for round_ in run.rounds]),
        "resume, mean / p95 / max",
        units.spread_s,
        "From the opening of a round to its first engine call.",
    ),
    "carried_groups": Figure(
        lambda run, _: spread([round_.carried_groups for round_ in run.rounds]),
        "carried groups a round, mean / p95 / max",
        units.spread,
        "Unfinished groups that a round started with.",
    ),
    "lost_samples": Figure(
        lambda run, _: max(round_.lost_samples for round_ in run.rounds),
        "lost samples",
        units.count,
        "The most that a round counted as unaccounted for; a sound run loses none.",
    ),
}
"""By name, in the order of the table; one is None where the run does not have it."""
ROWS = {name: figure for name, figure in FIGURES.items() if figure.label}
"""Those that stand in the table of figures."""


def summarize(run: RunRecord) -> SimpleNamespace:
    """The figures of a run: its attributes are those of ``FIGURES``."""
    known = SimpleNamespace()
    for name, figure in FIGURES.items():
        setattr(known, name, figure.of(run, known))
    return known
