"""Patch, for as long as a context lasts: the engines that verl's trainer starts get devices of their own.

verl's ``RayPPOTrainer.init_workers`` hands its trainers to ``LLMServerManager``, which then puts the engines on their
devices. Without trainers the same manager makes standalone replicas, on ``rollout.nnodes * rollout.n_gpus_per_node``
devices. The trainer has no option for this, so the class that it calls is replaced. It may go when there is an option.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from verl.trainer.ppo import ray_trainer
from verl.workers.rollout.llm_server import LLMServerManager

from verl_ext.guard import replaced


class StandaloneServerManager(LLMServerManager):
    """``LLMServerManager`` that ignores the trainers it is given, and so makes standalone replicas."""

    def __init__(
        self, config: Any, worker_group: Any = None, rollout_resource_pool: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, None, None, *args, **kwargs)  # type: ignore[arg-type]


def standalone_engines() -> AbstractContextManager[None]:
    """In this context, ``RayPPOTrainer.init_workers`` starts standalone replicas."""
    return replaced(ray_trainer, "LLMServerManager", StandaloneServerManager)
