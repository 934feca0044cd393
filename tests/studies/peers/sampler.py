"""verl's replay buffer, beside the trainer and polling often: what its asynchronous trainers do without two-second naps.

verl makes its replay buffer in the process that drives the training.
"""

from __future__ import annotations

import time
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

POLL_S = 0.1
"""short beside a round of seconds; much shorter, and the polling itself takes the cores from the engine"""
SAMPLE_S = "peer/sample_s"
"""metric: seconds of a step's ``sample``; verl's ``timing_s/gen`` is this and the interruption that follows it"""


class QuickReplayBuffer(ReplayBufferAsync):
    """``ReplayBufferAsync`` that looks every ``POLL_S`` (``custom_sampler``)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "poll_interval": POLL_S})

    def sample(self, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """verl's, timed."""
        start = time.perf_counter()
        batch, metrics = super().sample(*args, **kwargs)
        return batch, {**metrics, SAMPLE_S: time.perf_counter() - start}
