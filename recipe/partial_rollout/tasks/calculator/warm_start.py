"""clock10's warm start with the task's own demonstrations."""

from collections.abc import Iterator
from typing import Any

from recipe.partial_rollout.tasks.calculator.conversation import Conversations, mute_the_tool
from recipe.partial_rollout.tasks.clock10.expression import Problem
from recipe.partial_rollout.tasks.clock10.warm_start import train


def warm_start(model: Any, tokenizer: Any, problems: Iterator[Problem], *, steps: int, seed: int) -> None:
    """Train `model` in place, for `steps` optimiser steps."""
    # A long conversation has many calls and one answer. Train on short ones first, or the model does not learn to copy
    # the operators into its answer.
    short = {"short_share": 0.6, "short_length": 128}
    with model.register_forward_hook(mute_the_tool, with_kwargs=True):
        train(model, tokenizer, problems, Conversations(), steps=steps, seed=seed, **short)
