"""Command-line tools: ``python -m recipe.partial_rollout.tools NAME``. No training imports them."""
