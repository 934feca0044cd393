"""``python -m recipe.partial_rollout.tools chaos``: kill a real training again and again, resume and audit it."""
