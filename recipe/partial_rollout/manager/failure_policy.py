"""What to do with a sample whose agent loop raised: retry it, mask it, or end the run. It is never dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from recipe.partial_rollout.config.choices import OnSampleError
from recipe.partial_rollout.config.sections import FailureLimits
from recipe.partial_rollout.manager.types import SampleOutput, Segment

_DEFAULTS = FailureLimits()


class FailureVerdict(StrEnum):
    RETRY = "retry"
    """the sample stays FAILED until ``PromptsManager.retry``"""
    MASK = "mask"
    """the sample is FINISHED, with a masked output"""
    RAISE = "raise"
    """everyone who waits for the round fails"""


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """``partial_rollout.failures``, checked."""

    on_sample_error: OnSampleError = _DEFAULTS.on_sample_error
    sample_retries: int = _DEFAULTS.sample_retries
    retry_backoff_s: float = 1.0
    """seconds before the first retry; doubles with each further one of the same sample"""

    def __post_init__(self) -> None:
        if self.sample_retries < 0:
            raise ValueError(f"partial_rollout.failures.sample_retries={self.sample_retries}: at least 0")

    @classmethod
    def of(cls, limits: FailureLimits) -> FailurePolicy:
        """The policy that ``limits`` describe."""
        return cls(limits.on_sample_error, limits.sample_retries)

    def verdict(self, failures: int) -> FailureVerdict:
        """The verdict on a sample that has failed ``failures`` times, this time included."""
        if self.on_sample_error is OnSampleError.RAISE:
            return FailureVerdict.RAISE
        if self.on_sample_error is OnSampleError.RETRY and failures <= self.sample_retries:
            return FailureVerdict.RETRY
        return FailureVerdict.MASK

    def delay_s(self, failures: int) -> float:
        """Seconds from a sample's failure number ``failures`` to its retry."""
        return self.retry_backoff_s * 2 ** (failures - 1)


def masked_output(segments: Sequence[Segment], error: str | None) -> SampleOutput:
    """Output in place of a sample that failed for good: its group still trains, and none of its tokens enters the loss.

    ``prompt_ids`` is empty; batch assembly takes those of a sibling.
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
        extra_fields={"sample_error": error},
        masked=True,
    )
