"""``python -m tests.bench``: measure one part of the recipe."""
