"""Measurements of the recipe's own parts: ``python -m recipe.partial_rollout.tools bench NAME``."""
