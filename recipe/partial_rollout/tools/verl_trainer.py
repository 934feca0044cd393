"""verl's own v1 trainer on the configs of this repository: the arms ``v1_*`` of a study, and ``arm=colocate_async``."""

import sys

import hydra
from omegaconf import DictConfig
from verl.trainer import main_ppo

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.config.settings import CONF_DIR, register_keys
from recipe.partial_rollout.preflight.inputs import find_tools, missing_packages, size_bucket
from recipe.partial_rollout.training.trainer_config import choose_attention


@hydra.main(config_path=str(CONF_DIR), config_name="recipe", version_base=None)
def main(config: DictConfig) -> None:
    """Run verl's entry point, with an attention that is installed, and tools and bucket as the recipe has them."""
    try:
        for error in missing_packages(config):
            raise error
        choose_attention(config)
        find_tools(config)
        size_bucket(config)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        sys.exit(2)
    # verl's own decorator would compose its default config.
    main_ppo.main.__wrapped__(config)


if __name__ == "__main__":
    register_keys()
    main()
