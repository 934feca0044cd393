"""Retry or mask failed samples; filter groups whose samples all have the same score. No prompt is dropped.

A failed sample is retried, masked, or ends the run. With dynamic sampling (DAPO, arXiv:2503.14476) a group whose samples
all have the same score (or another metric of the reward) is consumed without being trained, and another prompt takes
its place in the same version.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from recipe.partial_rollout.config.settings import FailureLimits
from recipe.partial_rollout.manager.types import SampleOutput, Segment

RETRY_AFTER_S = 1.0
"""seconds before a sample's first retry; doubles with each further one"""
SAMPLE_ERROR = "sample_error"
"""extra field of a failed sample: its error. A user's field or key of this name is renamed (``rewards.renamed``)"""
_LARGEST = float(np.finfo(np.float32).max)


class FailureVerdict(StrEnum):
    RETRY = "retry"
    """the sample stays FAILED until ``PromptsManager.retry``"""
    MASK = "mask"
    """the sample is FINISHED, with a masked output"""
    RAISE = "raise"
    """the run ends: ``claim`` and ``wait_batch`` raise"""


def verdict_on(failures: int, limits: FailureLimits) -> FailureVerdict:
    """Return the verdict on a sample that has failed ``failures`` times, this time included."""
    if limits.sample_retries is None:
        return FailureVerdict.RAISE
    return FailureVerdict.RETRY if failures <= limits.sample_retries else FailureVerdict.MASK


def retry_delay_s(failures: int) -> float:
    """Return the seconds from a sample's failure number ``failures`` (from 1) to its retry."""
    return RETRY_AFTER_S * 2 ** (failures - 1)


def masked_output(segments: Sequence[Segment], error: str | None) -> SampleOutput:
    """Return the output of a sample that used up its retries. Its group trains, but the loss has none of its tokens.

    ``prompt_ids`` is empty; batch assembly takes the prompt of another sample of the group.
    """
    # A row without tokens would have no last token to carry a score.
    response = np.concatenate([segment.token_ids for segment in segments]) if segments else np.zeros(1, np.int32)
    length = len(response)
    return SampleOutput(
        prompt_ids=np.empty(0, np.int32),
        response_ids=response,
        response_mask=np.zeros(length, np.int8),
        log_probs=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
        segments=len(segments),
        reward_score=None,
        reward_extra_info={},
        num_turns=0,
        metrics={},
        extra_fields={SAMPLE_ERROR: error},
        masked=True,
    )


def plain(value: Any) -> Any:
    """Return a tensor or array of no dimension as a Python number; any other value unchanged.

    verl's dapo reward manager returns tensors, which a checkpoint cannot hold.
    """
    return value.item() if getattr(value, "ndim", None) == 0 else value


def is_number(value: Any) -> bool:
    """Whether ``value``, a result of ``plain``, can be averaged: a bool, a float, or an int that numpy holds."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def finite(value: Any) -> float | None:
    """``value`` as a float; None unless it is a number that a reward tensor (float32) holds.

    >>> [finite(value) for value in (True, np.float32(0.5), float("nan"), 1e39, 10**400, None, "1")]
    [1.0, 0.5, None, None, None, None, None]
    """
    value = plain(value)
    return float(value) if isinstance(value, int | float) and abs(value) <= _LARGEST else None


SCORES = ("reward", "seq_reward", "seq_final_reward")
"""names of ``algorithm.filter_groups.metric`` for the score itself; any other is a key of the reward's extra information"""


def common_value(metric: str, outputs: Sequence[SampleOutput]) -> float | None:
    """Return the value of ``metric`` that all unmasked samples share; None if they differ, or are fewer than two.

    A group with fewer than two unmasked samples is thus not filtered. It trains, and its masked samples count against
    ``partial_rollout.failures.max_masked_fraction``.

    >>> from dataclasses import replace
    >>> def outputs(*rewards):
    ...     return [replace(masked_output([], None), reward_score=reward, masked=False) for reward in rewards]
    >>> [common_value("reward", outputs(*rewards)) for rewards in ((1, 1, 1, 1), (1, 0, 1, 1), (1,))]
    [1.0, None, None]
    """
    found = [_value(metric, output.reward_score, output.reward_extra_info) for output in outputs if not output.masked]
    values = {finite(value) for value in found}
    return values.pop() if len(found) > 1 and len(values) == 1 else None


def scores_differ(outputs: Sequence[SampleOutput]) -> bool:
    """Whether unmasked samples have different scores.

    The filter's metric need not be the score. Samples of a filtered group may have the same ``acc`` and yet different
    scores, for example by a length penalty that ``acc`` leaves out.
    """
    return len({finite(output.reward_score) for output in outputs if not output.masked}) > 1


def missing(metric: str, score: float | None, info: dict[str, Any]) -> str | None:
    """Return an error text if the reward of a sample has no number for ``metric``; None if it has one."""
    if finite(found := _value(metric, score, info)) is not None:
        return None
    found = f"{found!r:.40}" if metric in info else "nothing"
    known = ", ".join([*SCORES, *(key for key, value in info.items() if finite(value) is not None)])
    return f"algorithm.filter_groups.metric={metric}: the reward function gives {found}; it gives numbers for {known}"


def _value(metric: str, score: float | None, info: dict[str, Any]) -> Any:
    return score if metric in SCORES else info.get(metric)
