"""verl's own v1 trainer on the configs of this repository: the arms ``v1_*`` of a study, and ``arm=colocate_async``."""

import sys
import traceback

import hydra
from omegaconf import DictConfig
from verl.trainer import main_ppo as verls

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.config.settings import CONF_DIR
from recipe.partial_rollout.main_ppo import in_one_line, refuse
from recipe.partial_rollout.preflight.inputs import missing_packages, size_bucket
from recipe.partial_rollout.preflight.user_code import find_tools
from recipe.partial_rollout.preflight.verl_keys import resolved
from recipe.partial_rollout.training.trainer_config import choose_attention


@hydra.main(config_path=str(CONF_DIR), config_name="recipe", version_base=None)
def main(config: DictConfig) -> None:
    """Run verl's entry point, with an attention that is installed, and tools and bucket as the recipe has them."""
    try:
        resolved(config)
        for error in missing_packages(config):
            raise error
        choose_attention(config)
        find_tools(config)
        size_bucket(config)
    except ConfigError as error:
        refuse(error)
    # These trainers read none of the recipe's keys; verl's command refuses a config that asks for its rollout.
    config.partial_rollout.enable = False
    try:
        # verl's own decorator would compose its default config.
        verls.main.__wrapped__(config)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    in_one_line(main)
