"""verl's own command trains the recipe: ``python -m verl.trainer.main_ppo --config-dir conf --config-name own_job ...``

with ``trainer.use_v1=True`` (conf/partial_rollout.yaml has ``trainer.v1.trainer_mode=partial_rollout``). verl makes the
trainer in an actor, once Ray is up: what the recipe checks before Ray starts is checked there, and a mistake ends in verl's
traceback. Ctrl-C kills that actor: the run goes on from its last checkpoint.
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
    """``PartialRolloutPPOTrainer`` of a run that begins with it.

    Raises:
        ConfigError: what ``main_ppo`` refuses.
    """

    def __init__(self, config: DictConfig) -> None:
        check_cluster(config, ray.cluster_resources())
        # Held until this process ends.
        self._held = ExitStack()
        runner = main_ppo.begin(config, self._held)
        super().__init__(config, **runner.ours)
