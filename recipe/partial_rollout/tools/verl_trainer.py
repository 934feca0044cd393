"""verl's own v1 trainer on the configs of this repository: the arms ``v1_*`` of a study, and ``arm=colocate_async``."""

import hydra
from omegaconf import DictConfig
from verl.trainer import main_ppo as verls

from recipe.partial_rollout import preflight
from recipe.partial_rollout.config.settings import CONF_DIR
from recipe.partial_rollout.main_ppo import end_in_one_line, in_one_line


def run(config: DictConfig) -> None:
    """verl's entry point, with the recipe's checks before.

    Raises:
        ConfigError: before Ray starts, in one line.
    """
    # These trainers read none of the recipe's keys; verl's command refuses a config that asks for its rollout.
    config.partial_rollout.enable = False
    preflight.checked(config)
    # verl's own decorator would compose its default config.
    verls.main.__wrapped__(config)


@hydra.main(config_path=str(CONF_DIR), config_name="recipe", version_base=None)
def main(config: DictConfig) -> None:
    """Run, and end in one line on the terminal, as ``main_ppo`` does."""
    end_in_one_line(run, config)


if __name__ == "__main__":
    in_one_line(main)
