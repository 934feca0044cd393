"""Figures of one round and its batch, ``partial_rollout/...``; units in each docstring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recipe.partial_rollout.manager.types import TakenGroup
from recipe.partial_rollout.records.definitions import bubble_fraction, p95
from recipe.partial_rollout.records.engine_call import EngineCall
from recipe.partial_rollout.rollout.prompt_source import prompt_identity


@dataclass(frozen=True, slots=True)
class RolloutPhase:
    """One rollout phase as the engines saw it."""

    start: float
    """unix seconds"""
    end: float
    calls: tuple[EngineCall, ...]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def decoded_tokens(self) -> int:
        return sum(call.tokens for call in self.calls)


def phase_metrics(phase: RolloutPhase, full: int, full_tokens_per_s: float | None) -> dict[str, float]:
    """Decoded tokens, seconds, tokens/s, bubble and (where the engine was probed) efficiency, both shares of 1."""
    rate = phase.decoded_tokens / phase.seconds if phase.seconds > 0 else 0.0
    metrics = {
        "rollout/decoded_tokens": phase.decoded_tokens,
        "rollout/reprefill_tokens": sum(call.resumed_tokens for call in phase.calls),
        "rollout/engine_calls": len(phase.calls),
        "timing/rollout_s": phase.seconds,
        "rollout/tokens_per_s": rate,
        "rollout/bubble_fraction": bubble_fraction([phase], full) or 0.0,
    }
    if full_tokens_per_s:
        metrics["rollout/efficiency"] = rate / full_tokens_per_s
    return metrics


def staleness_of(versions: np.ndarray, trained_at: int) -> int:
    """Versions between the first generated token of a sample and the update that trains it; 0 without tokens."""
    return int(trained_at - versions[0]) if len(versions) else 0


def batch_metrics(groups: Sequence[TakenGroup], trained_at: int) -> dict[str, float]:
    """Staleness (versions), off-policy tokens (share of 1), engine calls per sample, size of the trained batch."""
    outputs = [output for group in groups for output in group.outputs]
    generated = [output.generated for output in outputs]
    staleness = np.array([staleness_of(versions, trained_at) for versions in generated])
    tokens = np.concatenate(generated)
    ages = trained_at - tokens
    segments = np.array([output.segments for output in outputs])
    return {
        "trained/groups": len(groups),
        "trained/samples": len(outputs),
        "trained/tokens": len(tokens),
        "staleness/mean": float(staleness.mean()),
        "staleness/p95": p95(staleness),
        "staleness/max": int(staleness.max()),
        "staleness/token_mean": float(ages.mean()) if len(ages) else 0.0,
        "off_policy_token_fraction": float((ages > 0).mean()) if len(ages) else 0.0,
        "segments_per_sample/mean": float(segments.mean()),
        "segments_per_sample/max": int(segments.max()),
    }


def timing_metrics(groups: Sequence[TakenGroup]) -> dict[str, float]:
    """verl's ``agent_loop/*`` timings (seconds) over the samples of a batch."""
    timing: dict[str, float] = {}
    for key in ("generate_sequences", "tool_calls", "compute_score"):
        values = np.array([output.metrics.get(key, 0.0) for group in groups for output in group.outputs])
        for name, value in (("min", values.min()), ("max", values.max()), ("mean", values.mean())):
            timing[f"agent_loop/{key}/{name}"] = float(value)
    return timing


def trained_records(groups: Sequence[TakenGroup], trained_at: int) -> list[dict]:
    """What the trace keeps of each trained group; lengths and tokens in tokens, staleness in versions."""
    return [
        {
            "group": group.order,
            "prompt": prompt_identity(group.row),
            "epoch": group.epoch,
            "lengths": [output.response_length for output in group.outputs],
            "staleness": [staleness_of(output.generated, trained_at) for output in group.outputs],
            "tokens": int(sum(len(output.generated) for output in group.outputs)),
            "off_policy_tokens": int(sum((output.generated < trained_at).sum() for output in group.outputs)),
            "segments": [output.segments for output in group.outputs],
        }
        for group in groups
    ]
