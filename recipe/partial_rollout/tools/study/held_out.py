"""Rewards on held-out prompts, as verl's validations log them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_HELD_OUT = re.compile(r"val-core/.*/mean@\d+")
"""verl's mean validation reward, of the current weights"""


def held_out_rewards(steps: Iterable[Mapping[str, Any]]) -> list[float]:
    """Of the validations among ``steps`` (verl's metrics of each), in their order."""
    return [float(value) for step in steps for key, value in step.items() if _HELD_OUT.fullmatch(key)]
