"""``python -m recipe.partial_rollout.chaos``: kill a real training again and again, resume it, and audit what it trained."""
