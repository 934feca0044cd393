"""verl's own v1 trainer on the configs of this repository: the program of the arms ``v1_*``."""

from verl.trainer.main_ppo import main

from recipe.partial_rollout.config.store import register_keys

if __name__ == "__main__":
    register_keys()
    main()
