"""Logs a step beside verl's own record: the overview's metrics, one line, warnings of collapse, pictures."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, nan
from numbers import Real
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig
from tqdm import tqdm

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.records.figures import length_sigmas, overview
from recipe.partial_rollout.records.run_log import Round
from recipe.partial_rollout.training.trackers import SWANLAB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = "1_pictures"
"""section of the pictures"""
PICTURES_EVERY = 10
"""steps from one pair of pictures (timeline of the round, response lengths) to the next"""
KL = "rollout_corr/k3_kl"
"""verl's metric: divergence of the policy before the update from the behaviour policy, by the k3 estimator (nats a token).
Unlike the mean log-ratio, ``rollout_corr/kl``, it is never negative, and has less noise"""
_FACTOR, _FLOOR, _FIRST = 10.0, 0.002, 5
"""the warning needs this many times the median so far, at least this many nats, and this many earlier steps"""
_WATCHED = ("actor/", "critic/", "rollout_corr/")
"""verl's names for losses, gradients, rewards, advantages and divergences"""

MOST_CALLS = 2000
"""calls that a timeline draws at most; of more it draws every second, third, ..."""
_ENDED, _INTERRUPTED, _ENGINE, _ROUND = "#0072B2", "#D55E00", "#DCDCDC", "#FBF3D0"
_TOLERANCE_S = 0.5
"""a call may begin this long before its round and still belong to it: clocks of processes differ"""


class StepLog:
    """The log of one run, of either arm.

    Args:
        config: the whole configuration.
        total_steps: steps of the training.
    """

    def __init__(self, config: DictConfig, settings: PartialRolloutConfig, total_steps: int) -> None:
        self._settings, self._total = settings, total_steps
        self._on_swanlab = SWANLAB in config.trainer.logger
        self._drift = PolicyDrift()

    def extend(self, data: dict[str, Any], step: int) -> dict[str, Any]:
        """Return the metrics of ``step`` with the overview's; print the line and any warnings."""
        data = {**overview(data, partial=self._settings.enable), **data}
        tqdm.write(step_line(data, step, self._total, got="wait" if self._settings.separate else "rollout"))
        warnings = (not_finite(data, step), self._drift.observe(data, step) if self._settings.enable else None)
        for warning in filter(None, warnings):
            tqdm.write(warning)
        return data

    def close(self, step: int, round_: Round | None) -> None:
        """Send the pictures of ``step``, which verl has recorded, if ``round_`` is its round and it is their turn."""
        due = self._on_swanlab and (step - 1) % PICTURES_EVERY == 0
        if due and round_ is not None and round_.step == step:
            import swanlab

            pictures = {"timeline": timeline(round_), "lengths": length_histogram(round_)}
            swanlab.log({f"{PICTURES}/{name}": swanlab.Image(each) for name, each in pictures.items()}, step=step)


def step_line(data: Mapping[str, Any], step: int, total: int, *, got: str) -> str:
    """Format a step's main metrics as a line; the file and the trackers have all of them.

    Args:
        data: metrics; those of a validation alone have a line of their own.
        total: steps of the training.
        got: name of the time until the trainer had its batch.
    """
    if "training/global_step" not in data:
        scores = [f"{key.split('/', 1)[1]} {value:.3f}" for key, value in data.items() if "val-core" in key]
        return f"step {step:>3}  validation  {'  '.join(scores)}"

    def get(key: str) -> float:
        return float(data.get(key, nan))

    rollout, whole = get("timing_s/gen"), get("timing_s/step")
    parts = [
        f"step {step:>3}/{total}",
        f"reward {get('critic/score/mean'):.3f}",
        f"length {get('response_length/mean'):.0f}",
        f"{whole:.1f} s = {got} {rollout:.1f} + train {whole - rollout:.1f}",
        f"{get('partial_rollout/rollout/tokens_per_s'):,.0f} tok/s",
    ]
    if "partial_rollout/staleness/mean" in data:
        stale, most = get("partial_rollout/staleness/mean"), get("partial_rollout/staleness/max")
        parts.append(f"stale {stale:.2f} (max {most:.0f})")
        parts.append(f"carried {get('partial_rollout/buffer/carried_groups'):.0f}")
    return " | ".join(parts)


# -- warnings of collapse ----------------------------------------------------------------------------------------------


def not_finite(data: Mapping[str, Any], step: int) -> str | None:
    """Return a warning that names the metrics of ``step`` that are nan or infinite; None if all are finite."""
    watched = ((key, value) for key, value in data.items() if key.startswith(_WATCHED) and isinstance(value, Real))
    broken = [f"{key} {value}" for key, value in watched if not isfinite(value)]
    if not broken:
        return None
    return (
        f"warning: at step {step} not finite: {', '.join(broken)}. FSDP skips an update without a finite gradient; others "
        f"spoil the weights. Look at the rewards and log-probs of its batch; if it recurs, resume an earlier checkpoint"
    )


class PolicyDrift:
    """Compares each step's ``rollout_corr/k3_kl`` with those before it (docs/learning.md has the limits' origin)."""

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._alarmed = False

    def observe(self, data: Mapping[str, Any], step: int) -> str | None:
        """Return a warning if drift begins in ``step``; None if all is well or drift goes on."""
        kl = float(data.get(KL, nan))
        if not isfinite(kl):
            return None
        usual = median(self._seen) if len(self._seen) >= _FIRST else None
        self._seen.append(kl)
        before, self._alarmed = self._alarmed, usual is not None and kl > max(_FLOOR, _FACTOR * usual)
        if not self._alarmed or before:
            return None
        return (
            f"warning: at step {step} the policy has drifted far from the one that made its samples ({KL} {kl:.4f}, "
            f"{usual:.5f} by the median so far): its reward is likely to fall. Resume from an earlier checkpoint with "
            "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine (Megatron: lr_decay_style) or a lower "
            "partial_rollout.overlap; FSDP keeps a checkpoint's rate, so a lower optim.lr has no effect"
        )


# -- pictures of a round -----------------------------------------------------------------------------------------------


def timeline(round_: Round) -> Figure:
    """Draw each engine call as a line, by start, those of a replica in one band.

    Under separate placement the calls are those that ended since the batch before, and may have begun long before it.
    """
    phase = round_.phase
    calls = sorted(phase.calls, key=lambda call: (str(call.replica), call.start))
    calls = calls[:: -(-len(calls) // MOST_CALLS)] if calls else []
    figure, axes = _empty()
    spans = np.array([(call.busy_from, call.end) for call in calls]).reshape(-1, 2) - phase.start
    cut = np.array([call.interrupted for call in calls], dtype=bool)
    for chosen, colour, label in ((~cut, _ENDED, "ended"), (cut, _INTERRUPTED, "interrupted, resumes later")):
        axes.hlines(np.flatnonzero(chosen), *spans[chosen].T, colors=colour, linewidths=0.8, label=label)
    for i in range(1, len(calls)):
        if calls[i].replica != calls[i - 1].replica:
            axes.axhline(i - 0.5, color=_ENGINE, linewidth=1)
    axes.set(xlim=(0, max(phase.seconds, 1e-3)), ylim=(-1, len(calls) + 1), xlabel="seconds of the round")
    if len(spans) and spans.min() < -_TOLERANCE_S:
        axes.axvspan(0, phase.seconds, color=_ROUND, zorder=0, label="from the batch before to this one")
        # As much before and after it as calls reach, at most its own length.
        before, after = max(spans.min(), -phase.seconds), min(spans.max(), 2 * phase.seconds)
        axes.set(xlim=(before, max(after, phase.seconds)), xlabel="seconds from the batch before")
    axes.set_ylabel("engine calls, by replica and start")
    axes.set_title(f"step {round_.step}: {len(phase.calls)} calls, {phase.decoded_tokens:,} tokens", loc="left")
    axes.legend(loc="lower right", fontsize=8)
    return figure


def length_histogram(round_: Round) -> Figure:
    """Draw the response lengths (tokens) of the trained samples, with their mean and sigmas."""
    lengths = np.array([length for group in round_.trained for length in group.lengths])
    figure, axes = _empty()
    axes.hist(lengths, bins=40, color=_ENDED)
    axes.axvline(float(lengths.mean()), color="black", linestyle="--", linewidth=1.2)
    axes.set(xlabel="response tokens", ylabel="trained samples")
    batch, group = length_sigmas([group.lengths for group in round_.trained])
    axes.set_title(
        f"step {round_.step}: {len(lengths)} samples, mean {lengths.mean():,.0f}, longest {lengths.max():,}, "
        f"sigma {batch:,.0f} in the batch, {group:,.0f} in a group",
        loc="left",
        fontsize=10,
    )
    return figure


def _empty() -> tuple[Figure, Axes]:
    # Drawing libraries take a second to import.
    from matplotlib.figure import Figure

    # Fixed margins: a layout that fits itself draws everything twice.
    figure = Figure(figsize=(9.0, 4.0), dpi=90)
    figure.subplots_adjust(left=0.08, right=0.98, top=0.91, bottom=0.14)
    return figure, figure.subplots()
