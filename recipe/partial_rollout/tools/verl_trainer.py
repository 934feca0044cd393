"""Run verl's own v1 trainer on this repository's configs, to compare with it: run types ``v1_*`` of the studies, and
``arm=colocate_async``."""

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
    # ``__wrapped__``: verl's ``main`` is decorated by hydra, which would compose verl's default config.
    verls.main.__wrapped__(config)


@hydra.main(config_path=str(CONF_DIR), config_name="recipe", version_base=None)
def main(config: DictConfig) -> None:
    """Run, and end in one line on the terminal, as ``main_ppo`` does."""
    end_in_one_line(run, config)


if __name__ == "__main__":
    in_one_line(main)
