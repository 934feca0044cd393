"""How far the seeds of an arm lie apart, and how a table says so."""

from __future__ import annotations

import math

import numpy as np


def standard_errors(values: np.ndarray) -> np.ndarray:
    """[S]: of the means of [N, S] over its N seeds; NaN with one seed."""
    count = len(values)
    return values.std(axis=0, ddof=1) / np.sqrt(count) if count > 1 else np.full(values.shape[1], np.nan)


def with_error(value: float, error: float, *, sign: bool = False) -> str:
    """``0.917 ± 0.023``; without the error where one seed leaves it unknown (NaN)."""
    text = f"{value:+.3f}" if sign else f"{value:.3f}"
    return text if math.isnan(error) else f"{text} ± {error:.3f}"
