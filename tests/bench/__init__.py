"""Measurements of the recipe's own parts: ``python -m tests.bench NAME``."""
