"""A score that depends on the text, so that advantages are not all zero; it means nothing."""

from __future__ import annotations

import zlib
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> float:
    """In [0, 1], alike for alike texts and rarely for others: estimators that compare the two best responses of a group
    would find ties only among 0 and 1 (verl's ``reward.custom_reward_function`` signature)."""
    return zlib.crc32(solution_str[:256].encode()) / 0xFFFFFFFF
