"""Metrics of one round and its batch, ``partial_rollout/...``; units in each docstring."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recipe.partial_rollout.manager.types import TakenGroup
from recipe.partial_rollout.records.rollout_phase import RolloutPhase
from recipe.partial_rollout.records.running_curve import bubble_fraction, bubble_of_ended
from recipe.partial_rollout.records.spread import spread
from recipe.partial_rollout.records.trained_group import TrainedGroup


def phase_metrics(
    phase: RolloutPhase, full: int, full_tokens_per_s: float | None, *, goes_on: bool = False
) -> dict[str, float]:
    """Decoded tokens, seconds, tokens/s, bubble and (if the engine was probed) efficiency; both are shares, 0 to 1.

    Args:
        goes_on: calls outlast the phase (separate placement). All figures are then those of the calls that ended.
    """
    bubble = bubble_of_ended(phase, full) if goes_on else bubble_fraction([phase], full)
    rate = phase.decoded_tokens / phase.seconds if phase.seconds > 0 else 0.0
    metrics = {
        "rollout/decoded_tokens": phase.decoded_tokens,
        "rollout/reprefill_tokens": sum(call.resumed_tokens for call in phase.calls),
        "rollout/engine_calls": len(phase.calls),
        "timing/rollout_s": phase.seconds,
        "rollout/tokens_per_s": rate,
        "rollout/bubble_fraction": bubble or 0.0,
    }
    if full_tokens_per_s:
        metrics["rollout/efficiency"] = rate / full_tokens_per_s
    return metrics


def batch_metrics(groups: Sequence[TakenGroup], trained_at: int) -> dict[str, float]:
    """Staleness (versions), off-policy tokens (share, 0 to 1), engine calls per sample, size of the trained batch."""
    trained = [TrainedGroup.of(group, trained_at) for group in groups]
    staleness = spread([age for group in trained for age in group.staleness])
    segments = spread([count for group in trained for count in group.segments])
    assert staleness is not None and segments is not None
    ages = trained_at - np.concatenate([output.generated for group in groups for output in group.outputs])
    tokens = sum(group.tokens for group in trained)
    return {
        "trained/groups": len(trained),
        "trained/samples": sum(len(group.lengths) for group in trained),
        "trained/tokens": tokens,
        "staleness/mean": staleness.mean,
        "staleness/p95": staleness.p95,
        "staleness/max": int(staleness.max),
        "staleness/token_mean": float(ages.mean()) if tokens else 0.0,
        "off_policy_token_fraction": sum(group.off_policy_tokens for group in trained) / tokens if tokens else 0.0,
        "segments_per_sample/mean": segments.mean,
        "segments_per_sample/max": int(segments.max),
    }


def timing_metrics(groups: Sequence[TakenGroup]) -> dict[str, float]:
    """verl's ``agent_loop/*`` timings (seconds) over the samples of a batch."""
    timing: dict[str, float] = {}
    for key in ("generate_sequences", "tool_calls", "compute_score"):
        values = np.array([output.metrics.get(key, 0.0) for group in groups for output in group.outputs])
        for name, value in (("min", values.min()), ("max", values.max()), ("mean", values.mean())):
            timing[f"agent_loop/{key}/{name}"] = float(value)
    return timing
