"""Mean, 95th percentile and largest of a figure: alike in dashboard, report and forecast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a figure over samples or rounds."""

    mean: float
    p95: float
    max: float


def p95(values: Sequence[float] | np.ndarray) -> float:
    """The least of ``values`` that 95% of them do not pass: one that occurs, as counts (versions, segments) want."""
    return float(np.percentile(values, 95, method="inverted_cdf"))


def spread(values: Sequence[float] | np.ndarray) -> Spread | None:
    """None without values."""
    if not len(values):
        return None
    return Spread(float(np.mean(values)), p95(values), float(np.max(values)))
