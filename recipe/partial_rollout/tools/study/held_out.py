"""Rewards on held-out prompts, as verl's validations log them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from recipe.partial_rollout.records.overview import is_held_out_reward


def held_out_rewards(steps: Iterable[Mapping[str, Any]]) -> list[float]:
    """Of the validations among ``steps`` (verl's metrics of each), in their order."""
    return [float(value) for step in steps for key, value in step.items() if is_held_out_reward(key)]
