"""An arm's figures in each seed, most of them against the baseline's run with the same seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.studies.arm import BASELINE
from tests.studies.peers.run import PeerRun

FIRST, FILLING = 5, 2
"""steps: those that length bias shows in, and those in which engines compile and fill"""


@dataclass(frozen=True, slots=True)
class Row:
    """One arm: figure name to its value in each seed."""

    arm: str
    figures: dict[str, list[float]]

    def values(self, name: str) -> list[float]:
        """NaN: not logged, or not yet a figure when the row was written."""
        return self.figures.get(name, [float("nan")])

    def median(self, name: str) -> float:
        return float(np.median(self.values(name)))

    def spread(self, name: str) -> tuple[float, float]:
        """Smallest and largest."""
        return min(self.values(name)), max(self.values(name))


def compare(runs: Sequence[PeerRun]) -> list[Row]:
    """A row an arm, in the order in which arms appear; ratios are to the baseline with the same seed."""
    bases = {run.seed: run for run in runs if run.arm == BASELINE.name}
    probes = [run.full_tokens_per_s for run in runs if run.full_tokens_per_s is not None and run.arm != BASELINE.name]
    full = float(np.median(probes)) if probes else float("nan")
    rows = []
    for arm in dict.fromkeys(run.arm for run in runs):
        ours = [run for run in runs if run.arm == arm and run.seed in bases]
        if ours:
            figures = {
                name: [figure(run, bases[run.seed], run.full_tokens_per_s or full) for run in ours]
                for name, figure in _FIGURES.items()
            }
            rows.append(Row(arm, figures))
    return rows


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """As JSON, which has no NaN."""
    plain = [
        {"arm": row.arm, "figures": {n: [None if np.isnan(v) else v for v in of] for n, of in row.figures.items()}}
        for row in rows
    ]
    path.write_text(json.dumps(plain, indent=2) + "\n")


def read_rows(path: Path) -> list[Row]:
    """As ``write_rows`` wrote them.

    Raises:
        ValueError: the file holds something else; names it.
    """
    try:
        return [
            Row(
                row["arm"],
                {n: [float("nan") if v is None else float(v) for v in of] for n, of in row["figures"].items()},
            )
            for row in json.loads(path.read_text())
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} holds no figures of peers: {error}") from error


def _if_logged(figure: np.ndarray | float | None) -> float:
    """Mean over steps; NaN: not logged."""
    return float("nan") if figure is None else float(np.mean(figure))


def _summary(figure: np.ndarray | None, of: Callable[[np.ndarray], float]) -> float:
    """``of`` the steps' values; NaN: not logged."""
    return float("nan") if figure is None else float(of(figure))


_ALL = slice(None)
_STEADY = slice(FILLING, None)
_BATCHES = slice(1, None)
"""steps after the first batch: until then engines fill, and nothing is trained meanwhile"""


def _rollout_ms(run: PeerRun, steps: slice = _ALL) -> float:
    """NaN: the engines decode all the time, so that no seconds are the rollout's alone."""
    return float("nan") if run.separate else run.ms_per_1000(run.rollout_s, steps)


def _wall_ms(run: PeerRun) -> float:
    """From the first batch to the last; comparable whether the engines share the trainer's devices or not.

    What lies between two steps is left out: 1% of them in traces. So are validations, during which engines beside the
    trainer go on decoding: a comparison of placements has none between its steps.
    """
    return run.ms_per_1000(run.step_s, _BATCHES)


def _share(seconds: np.ndarray | None, run: PeerRun) -> float:
    """Of the time from the first batch to the last; NaN: not logged."""
    return float("nan") if seconds is None else float(seconds[_BATCHES].sum() / run.step_s[_BATCHES].sum())


_FIGURES: dict[str, Callable[[PeerRun, PeerRun, float], float]] = {
    "wall_ms": lambda run, base, full: _wall_ms(run),
    "wall_ratio": lambda run, base, full: _wall_ms(run) / _wall_ms(base),
    "trainer_waits": lambda run, base, full: _share(run.rollout_s, run),
    "engines_held": lambda run, base, full: _share(run.held_s, run),
    "rollout_ms": lambda run, base, full: _rollout_ms(run),
    "rollout_ratio": lambda run, base, full: _rollout_ms(run) / _rollout_ms(base),
    "steady_rollout_ratio": lambda run, base, full: _rollout_ms(run, _STEADY) / _rollout_ms(base, _STEADY),
    "step_ratio": lambda run, base, full: run.ms_per_1000(run.step_s, _ALL) / base.ms_per_1000(base.step_s, _ALL),
    "efficiency": lambda run, base, full: 1e6 / _rollout_ms(run) / full,
    "steady_efficiency": lambda run, base, full: 1e6 / _rollout_ms(run, _STEADY) / full,
    "staleness_mean": lambda run, base, full: float(run.staleness.mean()),
    "tokens_per_s": lambda run, base, full: 1e6 / _rollout_ms(run),
    "staleness_p95": lambda run, base, full: _if_logged(run.staleness_p95),
    "off_policy": lambda run, base, full: _if_logged(run.off_policy),
    "dropped": lambda run, base, full: float(run.dropped),
    "staleness_max": lambda run, base, full: float(run.staleness_max.max()),
    "first_length": lambda run, base, full: float(run.tokens[:FIRST].sum() / base.tokens[:FIRST].sum()),
    "reward": lambda run, base, full: float(run.reward[-len(run.reward) // 3 :].mean()),
    "held_out": lambda run, base, full: _if_logged(run.held_out),
    "quality_s": lambda run, base, full: _if_logged(run.quality_s),
    "quality_ratio": lambda run, base, full: (
        run.quality_s / base.quality_s if run.quality_s is not None and base.quality_s else float("nan")
    ),
    "tokens": lambda run, base, full: float(run.tokens.sum()),
    "interrupt_s": lambda run, base, full: _summary(run.interrupt_s, np.median),
    "interrupt_max_s": lambda run, base, full: _summary(run.interrupt_s, np.max),
    "stolen_cpu": lambda run, base, full: _if_logged(run.stolen_cpu),
}
"""by name: of a run, the baseline's run with the same seed, and the engine's tokens/s kept full"""
