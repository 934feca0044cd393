"""The metrics of one run: what each is, how it is computed, and how a table shows it."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from recipe.partial_rollout.records.metrics import SECTION, Spread, bubble_fraction, length_sigmas, spread
from recipe.partial_rollout.tools.report import units
from recipe.partial_rollout.tools.report.lanes import lane_shares
from recipe.partial_rollout.tools.run_record import RunRecord

REWARD_STEPS = 3
"""The last reward is a mean over this many steps."""
PHASES = {
    "gen": (
        "rollout (separate: wait)",
        "Generation. Under PR it lasts until the batch is complete and the engines are quiet. Under separate placement "
        "it is the wait for the batch.",
    ),
    "reward": ("reward", "Rewards that the trainer computes; those that the workers compute are part of the rollout."),
    "old_log_prob": (
        "log-probs before the update",
        "The trainer's own log-probs of the batch, where it recomputes them.",
    ),
    "adv": ("advantage", "Advantages, on the driver."),
    "update_actor": ("actor update", "Forward, backward and optimizer steps of the policy."),
    "update_weights": ("weight sync", "Sending the new weights to the replicas."),
    "save_checkpoint": ("checkpoint", "Saving a checkpoint."),
    "other": ("other", "The rest of the steps, which no timer above covers."),
    "testing": ("validation (outside the step)", "Validation; its time is not part of the step."),
    "step": ("step", "Whole steps without validation: the sum of the other phases."),
}
"""Label and explanation of each phase, by verl's timer name. Validation runs after the step's timer has stopped."""

LENGTH_BIAS = f"{SECTION}/length_bias"
"""key of the length bias, which PR and noPR both log"""
_SCORE = re.compile(r"val-core/(.+)/(mean|best|maj)@(\d+)(?:/mean)?")
"""verl's key of a validation score. For ``best`` and ``maj`` verl draws k of the responses several times, and logs the
mean over the draws"""


@dataclass(frozen=True, slots=True)
class Validation:
    """verl's core metrics of the last validation, accuracies where the reward function gives some."""

    step: int | None
    """step of the last validation; None if there was none"""
    scores: dict[str, dict[str, float]]
    """`mean@4`, `best@4`, `maj@4` -> `SOURCE/VARIABLE` -> value"""

    def shown(self, kind: str) -> str:
        """Return the mean over the sources of ``kind`` (``mean``, ``best`` or ``maj``), and its k."""
        found = [(name, by_source) for name, by_source in self.scores.items() if name.startswith(f"{kind}@")]
        return ", ".join(f"{statistics.fmean(by.values()):.3f} {name[len(kind) :]}" for name, by in found) or "-"


class Metric(cached_property):
    """A metric of a run, an attribute of its ``Summary``; those with a label stand in the table of metrics
    if a run has them."""

    label: str
    words: Callable[[Any], str]
    """formats the value"""
    compared: bool
    """whether the table also shows the ratio to the base's value"""

    @property
    def means(self) -> str:
        """The meaning of the metric: the docstring of the method that computes it, in one line."""
        return " ".join((self.__doc__ or "").split())


def metric(label: str = "", words: Callable[[Any], str] = str, *, compared: bool = False) -> Callable[[Any], Any]:
    """Decorate a method that computes a metric; the arguments are fields of ``Metric``."""

    def made(of: Callable[[Any], Any]) -> Metric:
        found = Metric(of)
        found.label, found.words, found.compared = label, words, compared
        return found

    return made


def ratio(part: float | None, whole: float | None) -> float | None:
    """`part / whole`; None if either is unknown or the whole is 0."""
    return part / whole if part is not None and whole else None


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _mean_pair(pairs: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    return (statistics.fmean(a for a, _ in pairs), statistics.fmean(b for _, b in pairs)) if pairs else None


class Summary:
    """The metrics of a run, in the order of the table. A metric is None if the run has no value for it."""

    def __init__(self, run: RunRecord) -> None:
        self.run = run

    @metric()
    def phases_s(self) -> dict[str, float]:
        """Seconds by name of verl's timers, summed over the steps that count; ``other`` is the rest of ``step``."""
        spent = {name: sum(step.seconds(name) for step in self.run.steps) for name in PHASES}
        spent["other"] = spent["step"] - sum(spent[name] for name in PHASES if name not in ("testing", "step"))
        return spent

    @metric(compared=True)
    def rollout_s(self) -> float | None:
        """Seconds of rollout; None under separate placement, where the whole run is rollout."""
        return None if self.run.settings.separate else self.phases_s["gen"]

    @metric(compared=True)
    def step_s(self) -> float:
        return self.phases_s["step"]

    @metric()
    def total_s(self) -> float:
        """Steps and validations between them, without the pauses of a resumed run."""
        return self.step_s + self.phases_s["testing"]

    @metric()
    def lane_shares(self) -> tuple[float | None, float | None, float | None]:
        return lane_shares(self.run)

    @metric()
    def validation(self) -> Validation:
        for step in reversed(self.run.steps):
            scores: dict[str, dict[str, float]] = {}
            for key, value in step.metrics.items():
                if found := _SCORE.fullmatch(key):
                    source, kind, k = found.groups()
                    scores.setdefault(f"{kind}@{k}", {})[source] = value
            if scores:
                return Validation(step.number, scores)
        return Validation(None, {})

    @metric()
    def steps(self) -> int:
        return len(self.run.steps)

    @metric()
    def bubble_fraction(self) -> float | None:
        return bubble_fraction([step.decoding for step in self.run.steps], self.run.settings.full_concurrency)

    @metric()
    def device_use(self) -> float | None:
        """Share of rollout time in which the GPUs ran a kernel: mean over the steps that log it, weighted by rollout
        seconds."""
        key = "partial_rollout/rollout/device_use"
        known = [(step.round.phase.seconds, step.metrics[key]) for step in self.run.steps if key in step.metrics]
        return ratio(sum(seconds * use for seconds, use in known), sum(seconds for seconds, _ in known))

    @metric()
    def staleness(self) -> Spread | None:
        return spread([age for step in self.run.steps for age in step.staleness])

    @metric("trained groups", units.count)
    def trained_groups(self) -> int:
        """Prompts trained, each with all its samples."""
        return len(self.run.trained_groups)

    @metric("trained samples", units.count)
    def trained_samples(self) -> int:
        """Samples of the trained prompts, masked ones included."""
        return sum(len(group.lengths) for group in self.run.trained_groups)

    @metric("trained rows", units.count)
    def trained_rows(self) -> int:
        """Rows of the trained batches: one for each sample, or one for each output that its agent loop returned."""
        return sum(group.rows for group in self.run.trained_groups)

    @metric("trained tokens", units.count, compared=True)
    def trained_tokens(self) -> int:
        """Tokens that the model generated in trained samples."""
        return sum(group.tokens for group in self.run.trained_groups)

    @metric("decoded tokens", units.count, compared=True)
    def decoded_tokens(self) -> int:
        """Tokens that the engines made; unfinished samples and lost work included."""
        return sum(step.decoding.decoded_tokens for step in self.run.steps)

    @metric("wall time per 1,000 trained tokens", units.kilo_seconds, compared=True)
    def wall_s_per_trained_token(self) -> float | None:
        """Seconds from the first batch to the last per trained token; the table shows 1,000 tokens. It includes
        validation, checkpoints and the pauses before resumes. Compare placements by it."""
        first, *later = self.run.steps
        tokens = sum(group.tokens for step in later for group in step.round.trained)
        return ratio(self.run.rounds[-1].phase.end - first.round.phase.end, tokens)

    @metric("trainer waits for batches", units.share)
    def trainer_waits(self) -> float | None:
        """Share of the time from the first batch to the last in which the trainer waited for a batch; under colocated
        placement this is the time of rollout."""
        return self.lane_shares[0]

    @metric("engines idle", units.share)
    def engines_idle(self) -> float | None:
        """Share of the time from the first batch to the last in which a replica ran no sample; mean over replicas. A
        replica that is held or validates is not idle."""
        return self.lane_shares[1]

    @metric("engines held", units.share)
    def engines_held(self) -> float | None:
        """Share of the time from the first batch to the last in which all engines were held, for new weights or a
        checkpoint; under separate placement only."""
        return self.lane_shares[2]

    @metric("a hold, mean / p95 / max", units.spread_s)
    def hold_s(self) -> Spread | None:
        """Time from the request to hold all engines for new weights until they go on, with the loading of the weights;
        under separate placement only."""
        # Without the hold for the first weights, before anything decodes.
        holds = [p for p in self.run.phases if p.name == "hold" and p.start >= self.run.start]
        return spread([hold.end - hold.start for hold in holds])

    @metric("rollout per 1,000 trained tokens, warm", units.kilo_seconds, compared=True)
    def rollout_s_per_trained_token(self) -> float | None:
        """Seconds of rollout for equal work, without the first step after each start, whose engines are cold; none under
        separate placement, where all of the run is rollout."""
        return None if self.run.settings.separate else self._per_trained_token("gen")

    @metric("step per 1,000 trained tokens, warm", units.kilo_seconds, compared=True)
    def step_s_per_trained_token(self) -> float | None:
        """Seconds of whole steps for equal work, without the first step after each start."""
        return self._per_trained_token("step")

    def _per_trained_token(self, timer: str) -> float | None:
        steps = self.run.warm_steps
        tokens = sum(group.tokens for step in steps for group in step.round.trained)
        return ratio(sum(step.seconds(timer) for step in steps), tokens)

    @metric("decoded tokens/s in rollout", units.count, compared=True)
    def decoded_tokens_per_s(self) -> float | None:
        """Decoded tokens over the seconds of rollout; under separate placement over those of the run."""
        run_s = sum(round_.phase.seconds for round_ in self.run.rounds)
        return ratio(self.decoded_tokens, run_s if self.rollout_s is None else self.rollout_s)

    @metric("off-policy tokens", units.share)
    def off_policy_token_fraction(self) -> float | None:
        """Share of trained tokens that were generated by older weights than those from which their update starts."""
        return ratio(sum(group.off_policy_tokens for group in self.run.trained_groups), self.trained_tokens)

    @metric("segments a sample, mean / p95 / max", units.spread)
    def segments_per_sample(self) -> Spread | None:
        """Segments of a trained sample: one for each engine call that made a token, and one more for each hold between
        two tokens of a call."""
        return spread([count for group in self.run.trained_groups for count in group.segments])

    @metric("mean trained length", units.count, compared=True)
    def mean_trained_length(self) -> float | None:
        """Response tokens of a trained sample; with tools, theirs included."""
        return mean([length for group in self.run.trained_groups for length in group.lengths])

    @metric("sigma of lengths, in a batch / in a group", units.pair)
    def length_sigma(self) -> tuple[float, float] | None:
        """Standard deviation of response tokens over a batch, and within a group; mean over steps. The larger it is
        relative to the mean length, the longer a synchronous batch waits for its last response."""
        return _mean_pair([length_sigmas([group.lengths for group in each.trained]) for each in self.run.rounds])

    @metric("made by several versions: samples / tokens", units.shares)
    def mixed(self) -> tuple[float, float] | None:
        """Share of trained samples whose tokens come from several versions, and share of trained tokens in these
        samples; mean over steps."""
        samples, tokens = (f"partial_rollout/staleness/mixed_{of}" for of in ("samples", "tokens"))
        metrics = [step.metrics for step in self.run.steps]
        return _mean_pair([(each[samples], each[tokens]) for each in metrics if samples in each and tokens in each])

    @metric("trained / dispatched length", units.decimal)
    def length_bias(self) -> float | None:
        """Mean length of the k groups trained by the end, divided by the mean length of the first k groups dispatched;
        an unfinished group counts with its length so far. Below 1, short groups were trained first."""
        return self.run.steps[-1].metrics.get(LENGTH_BIAS)

    @metric(f"reward, last {REWARD_STEPS} steps", units.precise)
    def reward_last(self) -> float | None:
        """Mean reward of the trained samples of the last steps."""
        last = [step.metrics for step in self.run.steps[-REWARD_STEPS:]]
        return mean([metrics["critic/score/mean"] for metrics in last if "critic/score/mean" in metrics])

    @metric("interrupt, mean / p95 / max", units.spread_s)
    def interrupt_s(self) -> Spread | None:
        """From the decision to interrupt a round until every engine was quiet."""
        return spread([each.interrupt_s for each in self.run.rounds if each.interrupt_s is not None])

    @metric("lost samples", units.count)
    def lost_samples(self) -> int:
        """Samples of which the run lost track, as the highest count of any round; a sound run loses none."""
        return max(round_.lost_samples for round_ in self.run.rounds)

    @metric("lost tokens", units.count)
    def lost_tokens(self) -> int:
        """Decoded for conversations that began anew after a crash, a resume or a failure."""
        return self.run.rounds[-1].lost_tokens


METRICS = {name: found for name, found in vars(Summary).items() if isinstance(found, Metric)}
