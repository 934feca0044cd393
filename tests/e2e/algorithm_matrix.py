"""``main_ppo`` that changes its algorithm every two steps, so that all of them share one engine start-up.

Arguments are those of ``main_ppo``; the run must have ``STEPS`` steps. verl's ``algorithm`` and ``actor`` nodes make an
algorithm; they are composed for each as the command line would. verl's ``fit`` reads the advantage estimator at every step;
the policy loss goes to the actor workers as it does at start-up. The last steps train GRPO without the forward
pass over the batch.
"""

import sys
from dataclasses import replace

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from recipe.partial_rollout import main_ppo, task_runner
from recipe.partial_rollout.preflight import check_settings
from recipe.partial_rollout.training import loss
from recipe.partial_rollout.training.trainer_run import PartialRolloutRayPPOTrainer

ALGORITHMS = tuple(sorted(path.stem for path in (main_ppo.CONF_DIR / "algorithm").glob("*.yaml")))
STEPS_EACH = 2
CHECK_EVERY = 3
FIRST_FROM_UPDATE = STEPS_EACH * len(ALGORITHMS) + 1
STEPS = STEPS_EACH * len(ALGORITHMS) + 2 * CHECK_EVERY


def composed(*overrides):
    """The checked and wired config of a stretch of steps, and its settings."""
    with initialize_config_dir(str(main_ppo.CONF_DIR), version_base=None):
        config = compose("quickstart_cpu", overrides=list(overrides))
    OmegaConf.resolve(config)
    settings = check_settings(config)
    main_ppo.apply_overrides(config)
    return config, settings


class MatrixTrainer(PartialRolloutRayPPOTrainer):
    """Takes the config of a stretch of steps before the first of them."""

    stretches: dict = {}  # noqa: RUF012 - set once, before there is a trainer
    """config and settings by first step"""

    def _get_gen_batch(self, batch):
        if self.global_steps in self.stretches:
            config, settings = self.stretches[self.global_steps]
            self.config.algorithm = config.algorithm
            self.config.actor_rollout_ref.actor = config.actor_rollout_ref.actor
            policy = loss.ProximalPolicy.of(config, settings)
            from_update = self.global_steps >= FIRST_FROM_UPDATE
            self.proximal = replace(policy, from_update=from_update, check_every=CHECK_EVERY)
            self.send_loss()
        return super()._get_gen_batch(batch)


if __name__ == "__main__":
    overrides = [argument for argument in sys.argv[1:] if "=" in argument]
    stretches = {1 + STEPS_EACH * i: composed(*overrides, f"algorithm={name}") for i, name in enumerate(ALGORITHMS)}
    MatrixTrainer.stretches = {**stretches, FIRST_FROM_UPDATE: composed(*overrides, "algorithm=grpo")}
    task_runner.PartialRolloutRayPPOTrainer = MatrixTrainer
    main_ppo.main()
