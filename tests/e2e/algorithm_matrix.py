"""``main_ppo`` that changes its algorithm every two steps, so that all of them share one engine start-up.

Arguments are those of ``main_ppo``; the run must have ``2 * len(ALGORITHMS)`` steps. What an algorithm is made of, verl's
``algorithm`` and ``actor`` nodes, is composed for each as the command line would; the advantage estimator is read by verl's
``fit`` at every step, the policy loss goes to the actor workers as it does at start-up.
"""

import sys

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from recipe.partial_rollout import main_ppo, task_runner
from recipe.partial_rollout.preflight import check_config
from recipe.partial_rollout.training.ray_trainer import PartialRolloutRayPPOTrainer

ALGORITHMS = tuple(sorted(path.stem for path in (main_ppo.CONF_DIR / "algorithm").glob("*.yaml")))
STEPS_EACH = 2


def composed(name, overrides):
    """The checked and wired config of algorithm ``name``."""
    with initialize_config_dir(str(main_ppo.CONF_DIR), version_base=None):
        config = compose("quickstart_cpu", overrides=[*overrides, f"algorithm={name}"])
    OmegaConf.resolve(config)
    check_config(config)
    main_ppo.wire(config)
    return config


class MatrixTrainer(PartialRolloutRayPPOTrainer):
    """Takes the next algorithm before every second step."""

    configs: tuple = ()

    def _get_gen_batch(self, batch):
        index, first = divmod(self.global_steps - 1, STEPS_EACH)
        if first == 0:
            self.config.algorithm = self.configs[index].algorithm
            self.config.actor_rollout_ref.actor = self.configs[index].actor_rollout_ref.actor
            self.send_loss()
        return super()._get_gen_batch(batch)


if __name__ == "__main__":
    overrides = [argument for argument in sys.argv[1:] if "=" in argument]
    MatrixTrainer.configs = tuple(composed(name, overrides) for name in ALGORITHMS)
    task_runner.PartialRolloutRayPPOTrainer = MatrixTrainer
    main_ppo.main()
