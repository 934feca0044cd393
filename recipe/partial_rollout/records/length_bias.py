"""Length bias: do trained responses have the lengths of the dispatched ones? Short ones finish first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def length_bias(trained: Sequence[int] | np.ndarray, dispatched: Sequence[int] | np.ndarray) -> float | None:
    """Mean length of the first samples trained over that of the first dispatched; None if one of them is unknown.

    >>> length_bias(trained=[10, 30], dispatched=[10, 50])
    0.6666666666666666
    """
    if not len(trained) or not np.any(dispatched):
        return None
    return float(np.mean(trained) / np.mean(dispatched))
