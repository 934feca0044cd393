"""Mean, 95th percentile and maximum of a figure, computed alike for dashboard, report and forecast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """Spread of a figure over samples or rounds."""

    mean: float
    p95: float
    max: float


def p95(values: Sequence[float] | np.ndarray) -> float:
    """The smallest of ``values`` that 95% of them do not exceed: no interpolation, as suits counts (versions, segments)."""
    return float(np.percentile(values, 95, method="inverted_cdf"))


def spread(values: Sequence[float] | np.ndarray) -> Spread | None:
    """Mean, 95th percentile and maximum of ``values``; None if there are none."""
    if not len(values):
        return None
    return Spread(float(np.mean(values)), p95(values), float(np.max(values)))
