"""verl's replay buffer, polling often: what its asynchronous trainers do without two-second naps (``custom_sampler``)."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

POLL_S = 0.1
"""short beside a round of seconds; much shorter, and the polling itself takes the cores from the engine"""


class QuickReplayBuffer(ReplayBufferAsync):
    """``ReplayBufferAsync`` that looks every ``POLL_S``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "poll_interval": POLL_S})
