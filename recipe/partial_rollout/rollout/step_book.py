"""Books the steps of a run: one record of each batch, for the run's log and its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from recipe.partial_rollout.manager.types import (
    FilteredGroup,
    RolloutFailedError,
    SampleOutput,
    StepAccount,
    TakenGroup,
    VersionStart,
)
from recipe.partial_rollout.records.figures import bubble_fraction, bubble_of_ended, length_sigmas, spread
from recipe.partial_rollout.records.run_log import EngineCall, RolloutPhase, Round, TrainedGroup

if TYPE_CHECKING:
    from recipe.partial_rollout.rollout.session import RunSession


@dataclass(slots=True)
class StepBatch:
    """A batch that the trainer has; moments in unix seconds."""

    step: int
    start: VersionStart
    """of its version"""
    groups: list[TakenGroup]
    since: float
    """colocated: when it was asked for; separate: when the batch before was taken"""
    opened_at: float
    """when workers could call the engines; separate: when it was asked for"""
    until: float
    """colocated: when the engines were quiet; separate: when it was taken"""
    waits: dict[str, float] = field(default_factory=dict)
    """seconds by name; whoever waits adds to it"""

    @property
    def version(self) -> int:
        """Policy version before the update on it."""
        return self.step - 1

    @property
    def uids(self) -> list[str]:
        return [group.uid for group in self.groups]

    def check(self, size: int, max_masked_fraction: float) -> None:
        """Refuse a batch that cannot be trained.

        Raises:
            RolloutFailedError: it has fewer than ``size`` groups, or too many masked samples.
        """
        if len(self.groups) != size:
            raise RolloutFailedError(f"the data ran out with {len(self.groups)} groups ready; a batch needs {size}")
        outputs = [output for group in self.groups for output in group.outputs]
        errors = [output.extra_fields["sample_error"] for output in outputs if output.masked]
        tell_failed(errors, len(outputs), max_masked_fraction)


def tell_failed(errors: Sequence[str], samples: int, max_masked_fraction: float, *, validate: bool = False) -> None:
    """Name one of a batch's ``samples`` that failed for good, with ``errors``, if there are any.

    Raises:
        RolloutFailedError: they are too many.
    """
    what, fate = ("validation", "count in no mean") if validate else ("batch", "are masked")
    if len(errors) > max_masked_fraction * samples:
        raise RolloutFailedError(
            f"{len(errors)} of the {samples} samples of a {what} failed for good, more than "
            f"partial_rollout.failures.max_masked_fraction={max_masked_fraction:g}; one of them: {errors[0]}"
        )
    if errors:
        print(f"warning: {len(errors)} of the {samples} samples of a {what} {fate}; one of them: {errors[-1]}")


def booked(
    session: RunSession, batch: StepBatch, account: StepAccount, calls: Sequence[EngineCall]
) -> dict[str, float]:
    """Book a batch that is trained; returns the metrics of its step, without the ``partial_rollout/`` prefix.

    Args:
        calls: engine calls that ended since the last booking.
    """
    settings = session.settings
    trained = [TrainedGroup.of(group, batch.version) for group in batch.groups]
    round_ = Round(
        step=batch.step,
        phase=RolloutPhase(batch.since, batch.until, tuple(calls)),
        trained=trained,
        admitted=account.admitted,
        filtered=account.filtered,
        interrupt_s=batch.waits.get("interrupt_s"),
        resume_s=batch.waits.get("resume_s"),
        carried_groups=batch.start.carried_groups,
        lost_samples=int(account.metrics["lost_samples"]),
        lost_tokens=int(account.metrics["failures/lost_tokens_total"]),
    )
    if account.spared and settings.group_filter is not None:
        limit = f"algorithm.filter_groups.max_num_gen_batches={settings.group_filter.max_num_gen_batches}"
        tqdm.write(
            f"step {batch.step}: groups of equal {settings.group_filter.metric} that are trained all the same: "
            f"{account.spared} (past the round's limit, {limit}, or the data ends)"
        )
    return {
        **noted(session, round_, goes_on=settings.separate),
        **batch_metrics(batch.groups, trained, batch.version),
        **account.metrics,
        **{f"timing/{name}": seconds for name, seconds in batch.waits.items()},
        "overlap": batch.start.carried_groups / settings.batch_groups,
        "failures/replicas_restarted_total": session.control.restarted,
        **({} if settings.group_filter is None else filter_metrics(account.filtered)),
    }


def filter_metrics(filtered: Sequence[FilteredGroup]) -> dict[str, float]:
    """Groups that dynamic sampling has discarded since the step before, and those of them whose scores differ."""
    return {"filter/groups": len(filtered), "filter/scores_differ": sum(group.scores_differ for group in filtered)}


def noted(session: RunSession, round_: Round, *, goes_on: bool = False) -> dict[str, float]:
    """Add ``round_``, of either arm, to the run's log; returns the metrics that both arms have of it.

    Args:
        goes_on: as in ``phase_metrics``.
    """
    session.log.round(round_)
    return {
        **phase_metrics(round_.phase, session.full_concurrency, goes_on=goes_on),
        **length_metrics(round_.trained),
        **session.device_metrics(round_.phase),
        "trained/tokens": sum(group.tokens for group in round_.trained),
        "lost_samples": round_.lost_samples,
    }


def phase_metrics(phase: RolloutPhase, full: int, *, goes_on: bool = False) -> dict[str, float]:
    """Decoded tokens, seconds, tokens/s, bubble, and what later turns found in the prefix cache (if there were any); the
    last two are shares, 0 to 1.

    Args:
        goes_on: calls outlast the phase (separate placement). All figures are then those of the calls that ended.
    """
    bubble = bubble_of_ended(phase, full) if goes_on else bubble_fraction([phase], full)
    rate = phase.decoded_tokens / phase.seconds if phase.seconds > 0 else 0.0
    metrics = {
        "rollout/decoded_tokens": phase.decoded_tokens,
        "rollout/reprefill_tokens": sum(call.resumed_tokens for call in phase.calls),
        "timing/rollout_s": phase.seconds,
        "rollout/tokens_per_s": rate,
        "rollout/bubble_fraction": bubble or 0.0,
    }
    if earlier := sum(call.earlier_tokens for call in phase.calls):
        lost = sum(call.resumed_tokens for call in phase.calls if call.earlier_tokens)
        metrics["agent/kv_hit_share"] = 1 - lost / earlier
    return metrics


def batch_metrics(groups: Sequence[TakenGroup], trained: Sequence[TrainedGroup], trained_at: int) -> dict[str, float]:
    """Staleness (versions), shares (0 to 1) of off-policy tokens and of samples (and their tokens) that several versions
    made, and most engine calls of a sample, of the trained batch.

    Args:
        trained: the records of ``groups``.
        trained_at: policy version before the update.
    """
    staleness = spread([age for group in trained for age in group.staleness])
    assert staleness is not None
    generated = [output.generated for group in groups for output in group.outputs]
    ages = trained_at - np.concatenate(generated)
    mixed = [len(versions) for versions in generated if len(versions) and versions[0] != versions[-1]]
    tokens = sum(group.tokens for group in trained)
    return {
        "staleness/mean": staleness.mean,
        "staleness/p95": staleness.p95,
        "staleness/max": int(staleness.max),
        "staleness/token_mean": float(ages.mean()) if tokens else 0.0,
        "off_policy_token_fraction": sum(group.off_policy_tokens for group in trained) / tokens if tokens else 0.0,
        "staleness/mixed_samples": len(mixed) / len(generated),
        "staleness/mixed_tokens": sum(mixed) / tokens if tokens else 0.0,
        "segments_per_sample/max": max(count for group in trained for count in group.segments),
        **tool_metrics([output for group in groups for output in group.outputs]),
    }


def length_metrics(trained: Sequence[TrainedGroup]) -> dict[str, float]:
    """Standard deviations of the trained responses' lengths (tokens), of either arm."""
    batch, group = length_sigmas([group.lengths for group in trained])
    return {"length/sigma_batch": batch, "length/sigma_group": group}


def tool_metrics(outputs: Sequence[SampleOutput]) -> dict[str, float]:
    """Where some samples have called tools: mean turns, mean seconds in tools, and these as a share of the samples' lives.

    And tokens decoded for the samples that are not trained, if any.
    """
    in_tools, in_turns, untrained = (
        sum(output.metrics.get(name, 0.0) for output in outputs)
        for name in ("tool_calls", "generate_sequences", "untrained_tokens")
    )
    unused = {"agent/untrained_tokens": untrained} if untrained else {}
    if not in_tools:
        return unused
    return {
        **unused,
        "agent/turns": sum(output.num_turns for output in outputs) / len(outputs),
        "agent/tool_s": in_tools / len(outputs),
        "agent/tool_share": in_tools / (in_tools + in_turns),
    }
