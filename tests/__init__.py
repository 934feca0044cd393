"""Tests, and what the recipe is measured with: ``python -m tests.bench``, ``tests.studies``, ``tests.chaos``."""
