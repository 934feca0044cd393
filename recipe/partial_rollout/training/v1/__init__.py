"""The recipe as a trainer of verl's v1 registry, ``trainer.v1.trainer_mode=partial_rollout``; experimental."""
