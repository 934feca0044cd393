"""A score that depends on the text, so that advantages are not all zero; it means nothing."""

from __future__ import annotations

import zlib
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> float:
    """0 or 1, alike for alike texts (verl's ``reward.custom_reward_function`` signature)."""
    return float(zlib.crc32(solution_str[:256].encode()) % 2)
