"""The time that a continuous-batching engine takes for a decoding step, and its fit to the calls of a run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct
from scipy.optimize import nnls

from recipe.partial_rollout.records.run_log import EngineCall
from recipe.partial_rollout.tools.reading.columns import CallColumns

_PASSES = 8
"""passes of the fit without contexts, and as many with them; it iterates because the times of a call's steps depend on the
curve itself"""
_HUBER = 4.0
"""Huber threshold in median deviations; calls beyond it are down-weighted"""
_TINY_S = 1e-9
"""least ``step_s`` of a fitted curve, so that it forecasts no duration of 0"""
_FEWEST_CALLS = 16
_LEAST_RISE = 1.5
"""least ratio of the 95th to the 5th percentile of the calls' load (samples that run at the same time). Below it the
calls do not show the speed under other loads"""
_LEAST_SHARE = 0.01
"""least share of a step's time that the fixed cost must have, and that all other costs must have; else the fit is
refused"""
_MOST_OFF = 0.5
"""median relative error of a fit: beyond it the calls do not follow a curve of this form"""

_Cost = Annotated[float, Meta(ge=0)]


class EngineCurve(Struct, frozen=True, forbid_unknown_fields=True):
    """One replica: a step takes ``step_s + sample_s * running + context_s * context`` and gives each sample a token."""

    step_s: _Cost
    """seconds of a step, whatever its load"""
    sample_s: _Cost
    """seconds of a step per running sample"""
    context_s: _Cost = 0.0
    """seconds of a step per token in the contexts of all running samples"""
    prefill_s: _Cost = 0.0
    """per token of a context that is prefilled, for the first time or again"""

    def decode_s(self, running: float, context: float) -> float:
        """Seconds of one step with ``running`` samples whose contexts have ``context`` tokens in total."""
        return self.step_s + self.sample_s * running + self.context_s * context

    @classmethod
    def load(cls, path: Path) -> EngineCurve:
        """The curve in a JSON file, an object of the fields.

        Raises:
            ValueError: it is not such a file; names the file.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError) as error:
            raise ValueError(f"{path} is no engine curve: {error}") from error


PRESETS = {
    "h20-qwen3-4b": EngineCurve(8e-3, 70e-6, 49e-9, 83e-6),
    "h100-qwen3-4b": EngineCurve(7e-3, 25e-6, 59e-9, 16e-6),
}
"""Assumptions for Qwen3-4B in bfloat16 on one GPU; none of the figures was measured."""


def fit(calls: Collection[EngineCall]) -> EngineCurve:
    """Fit a curve to the durations of ``calls``.

    Least squares with Huber's weights, in which outliers count less: while an engine compiles, or other processes take
    its cores, calls take ten times as long as they should.

    Calls of several rounds may be given together: replicas are idle between rounds. The cost of prefill, and that of a
    shortage of KV blocks, are not separated from the other terms.

    Raises:
        ValueError: the calls do not determine a curve; says what was fitted, why it cannot be trusted, and what to do.
    """
    columns = CallColumns.joined([calls])
    ran = (columns.column("tokens") > 0) & (columns.column("end") > columns.column("busy_from"))
    replica = np.where(ran, columns.column("replica"), -1)
    spans = [_Spans(CallColumns.of(columns.table[replica == each])) for each in np.unique(replica[ran])]
    if (count := int(ran.sum())) < _FEWEST_CALLS:
        raise _degenerate(f"{count} engine calls that decoded anything", f"at least {_FEWEST_CALLS} are needed")
    tokens = np.concatenate([span.tokens for span in spans])
    seconds = np.concatenate([span.seconds for span in spans])
    curve, trust = EngineCurve(1.0, 0.0), np.ones(len(tokens))
    for i in range(2 * _PASSES):
        # First without the context term, which would fit outliers that have not lost their weight yet.
        with_contexts = i >= _PASSES
        running, contexts = (
            np.concatenate(means) for means in zip(*(span.means(curve) for span in spans), strict=True)
        )
        quiet, busy = np.percentile(running, [5, 95])
        if busy < _LEAST_RISE * quiet:
            fitted = f"{count} engine calls, nearly all with {quiet:.0f} to {busy:.0f} samples running"
            raise _degenerate(fitted, "they do not show the speed under other loads")
        # The duration of each step varies independently, by a share of itself.
        weight = trust / (np.sqrt(tokens) * (curve.step_s + curve.sample_s * running + curve.context_s * contexts))
        columns = np.stack([tokens, tokens * running, tokens * contexts * with_contexts], axis=1)
        step_s, sample_s, context_s = nnls(columns * weight[:, None], seconds * weight)[0].tolist()
        curve = EngineCurve(max(step_s, _TINY_S), sample_s, context_s)
        off = np.abs(seconds / (columns @ np.array([curve.step_s, sample_s, context_s])) - 1)
        trust = np.sqrt(np.minimum(1.0, _HUBER * np.median(off) / np.maximum(off, 1e-12)))
    fitted = f"{count} engine calls: a step of {curve.step_s:.2g} s + {curve.sample_s:.2g} s a sample"
    if (half := float(np.median(off))) > _MOST_OFF:
        raise _degenerate(fitted, f"half of them took over {half:.0%} more or less time than that")
    fixed = curve.step_s / float(np.median(curve.step_s + curve.sample_s * running + curve.context_s * contexts))
    if not _LEAST_SHARE < fixed < 1 - _LEAST_SHARE:
        raise _degenerate(
            fitted,
            f"a full engine would {'take no longer for a step' if fixed > 0.5 else 'decode no more tokens a second'} "
            "than with one sample",
        )
    return curve


def _degenerate(fitted: str, why: str) -> ValueError:
    return ValueError(f"no engine curve from {fitted}; {why}. Give --run a longer noPR run of this job, or --curve")


class _Spans:
    """The calls of one replica. For each interval between two moments: running calls, and tokens in all their contexts.

    A moment is the start or the end of a call. ``means`` estimates the tokens, which are 0 before its first call.
    """

    def __init__(self, calls: CallColumns) -> None:
        starts, ends = calls.column("busy_from"), calls.column("end")
        self.tokens, self._begun_with = (calls.column(name).astype(float) for name in ("tokens", "context_tokens"))
        self.seconds = ends - starts
        moments, where = np.unique(np.concatenate([starts, ends]), return_inverse=True)
        self._from, self._to = where[: len(calls)], where[len(calls) :]
        self._running = self._between(np.ones(len(calls)))
        self._length = np.diff(moments)
        self._contexts = np.zeros(len(self._length))

    def means(self, curve: EngineCurve) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays [call]: running samples, and tokens in all their contexts, averaged over the call's steps.

        The times of the steps follow from ``curve`` and from the contexts that the previous call of this method
        computed (at first 0), so calling it again refines the result.
        """
        steps = self._length / (curve.step_s + curve.sample_s * self._running + curve.context_s * self._contexts)
        begun = np.concatenate([[0.0], np.cumsum(steps)])
        own = begun[self._to] - begun[self._from]
        # A context grows by a token a step; by less if the curve is too fast, so that a call ends with its own tokens.
        growth = self.tokens / own
        at_step_0 = self._between(self._begun_with - growth * begun[self._from])
        self._contexts = np.maximum(at_step_0 + self._between(growth) * (begun[:-1] + begun[1:]) / 2, 0.0)

        def mean(figure: np.ndarray) -> np.ndarray:
            total = np.concatenate([[0.0], np.cumsum(steps * figure)])
            return (total[self._to] - total[self._from]) / own

        return mean(self._running), mean(self._contexts)

    def _between(self, figure: np.ndarray) -> np.ndarray:
        """[interval]: sum of ``figure`` [call] over the calls that run in each interval between two moments."""
        change = np.zeros(max(self._to.max(), self._from.max()) + 1)
        np.add.at(change, self._from, figure)
        np.add.at(change, self._to, -figure)
        return np.cumsum(change)[:-1]


@dataclass(frozen=True, slots=True)
class Cluster:
    """The replicas of a simulation, which are equal: their speed and their slots."""

    curve: EngineCurve
    """speed of each replica"""
    replicas: int
    slots_per_replica: int
    keeps_kv: bool = False
    """whether interrupted samples keep their keys and values (``partial_rollout.resume_kv=keep``)"""
