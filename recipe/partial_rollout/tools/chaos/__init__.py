"""``python -m recipe.partial_rollout.tools chaos``: inflict faults on a real training, resume it and audit it."""
