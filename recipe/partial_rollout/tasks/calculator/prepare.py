"""What the task's folder depends on: clock10's parameters, data and model, with a tokenizer and a warm start of its own.

`python -m recipe.partial_rollout.tasks.ready_start --task calculator` builds it.
"""

import hashlib
from pathlib import Path
from typing import Any

from recipe.partial_rollout.tasks.clock10 import prepare as clock10

FROZEN = ("conversation.py", "prepare.py", "tokenizer.py")
"""Modules that the weights depend on: not the tool."""


def source_fingerprint() -> str:
    """Return a SHA-256 over these modules and clock10's."""
    digest = hashlib.sha256(clock10.source_fingerprint().encode())
    for name in FROZEN:
        digest.update(name.encode() + b"\0" + (Path(__file__).parent / name).read_bytes() + b"\0")
    return digest.hexdigest()


def warm_start(model: Any, tokenizer: Any, parameters: clock10.Parameters) -> None:
    """Train `model` in place."""
    from recipe.partial_rollout.tasks.calculator.conversation import Conversations, mute_the_tool
    from recipe.partial_rollout.tasks.clock10.warm_start import WarmStart, train

    mixture = Conversations(parameters.careful_share, parameters.false_accept)
    # Answers are few among calls, more in short conversations: else the model does not learn to copy operators into them.
    settings = WarmStart(
        steps=parameters.steps, threads=parameters.threads, mixture=mixture, short_share=0.6, short_length=128
    )
    with model.register_forward_hook(mute_the_tool, with_kwargs=True):
        train(model, tokenizer, clock10.demonstrated(parameters), settings, parameters.seed)
