"""The recipe under verl's own command: ``python -m verl.trainer.main_ppo --config-dir conf --config-name own_job``.

It needs ``trainer.use_v1=True``; conf/partial_rollout.yaml has ``trainer.v1.trainer_mode=partial_rollout``. verl makes
the trainer in a Ray actor. So the checks of the recipe run there, after Ray has started, and a mistake ends in verl's
traceback. Ctrl-C kills that actor; the same command then resumes from the last checkpoint.
"""

from __future__ import annotations

from contextlib import ExitStack

import ray
from omegaconf import DictConfig
from verl.trainer.ppo.v1.trainer_base import register_trainer

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.config.settings import V1_MODE
from recipe.partial_rollout.preflight.inputs import check_cluster
from recipe.partial_rollout.training.v1.trainer import PartialRolloutPPOTrainer


@register_trainer(V1_MODE)
class RegisteredTrainer(PartialRolloutPPOTrainer):
    """``PartialRolloutPPOTrainer`` whose constructor makes the checks and the run's directory, as ``main_ppo`` does.

    Raises:
        ConfigError: ``main_ppo`` would refuse the config, or Ray has too few devices or CPUs.
    """

    def __init__(self, config: DictConfig) -> None:
        check_cluster(config, ray.cluster_resources())
        # Held until this process ends.
        self._held = ExitStack()
        runner = main_ppo.begin(config, self._held)
        super().__init__(config, **runner.ours)
