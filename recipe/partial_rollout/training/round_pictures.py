"""Pictures of one round for the dashboard: when its calls ran, and how long the trained responses are."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from recipe.partial_rollout.records.figures import length_sigmas
from recipe.partial_rollout.records.run_log import Round

MOST_CALLS = 2000
"""calls that a timeline draws; of more, an even choice"""
_ENDED, _INTERRUPTED, _ENGINE, _ROUND = "#0072B2", "#D55E00", "#DCDCDC", "#FBF3D0"
_TOLERANCE_S = 0.5
"""a call that begins this much before its round belongs to it all the same: clocks of processes differ"""
_SIZE, _DPI = (9.0, 4.0), 90


def timeline(round_: Round) -> np.ndarray:
    """A line for each engine call, those of a replica in one band, by start; [height, width, 4], uint8.

    Under separate placement the calls are those that ended since the batch before, and may have begun long before it.
    """
    phase = round_.phase
    calls = sorted(phase.calls, key=lambda call: (str(call.replica), call.start))
    calls = calls[:: -(-len(calls) // MOST_CALLS)] if calls else []
    figure, axes = _empty()
    spans = np.array([(call.busy_from, call.end) for call in calls]).reshape(-1, 2) - phase.start
    heights = np.repeat(np.arange(len(calls))[:, None], 2, axis=1)
    cut = np.array([call.interrupted for call in calls], dtype=bool)
    for chosen, colour, label in ((~cut, _ENDED, "ended"), (cut, _INTERRUPTED, "interrupted, resumes later")):
        lines = np.stack([spans[chosen], heights[chosen]], axis=-1)
        axes.add_collection(LineCollection(list(lines), colors=colour, linewidths=0.8, label=label))
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
    return _pixels(figure)


def length_histogram(round_: Round) -> np.ndarray:
    """Response lengths (tokens) of the trained samples, their mean and sigmas; [height, width, 4], uint8."""
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
    return _pixels(figure)


def _empty() -> tuple[Figure, Axes]:
    # Fixed margins: a layout that fits itself draws everything twice.
    figure = Figure(figsize=_SIZE, dpi=_DPI)
    figure.subplots_adjust(left=0.08, right=0.98, top=0.91, bottom=0.14)
    return figure, figure.subplots()


def _pixels(figure: Figure) -> np.ndarray:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba()).copy()
