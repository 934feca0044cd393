"""The agent-loop worker process: claims samples, runs agent loops, calls the engines."""

from verl_ext.guard import enter_recipe

# Whoever imports a worker runs the recipe: its samples are what verl, patched, makes of them.
enter_recipe()
