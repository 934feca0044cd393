"""What the task's folder holds: clock10's data and model, with a tokenizer and a warm start of its own.

`python -m recipe.partial_rollout.tasks.ready_start --task calculator` builds it.
"""

import hashlib
import random
from pathlib import Path

from recipe.partial_rollout.tasks.clock10 import prepare as clock10
from recipe.partial_rollout.tasks.clock10.prepare import Parameters as Parameters

FROZEN = ("conversation.py", "prepare.py", "tokenizer.py")
"""Modules that the weights depend on: not the tool."""


def source_fingerprint() -> str:
    """Return a SHA-256 over these modules and clock10's."""
    digest = hashlib.sha256(clock10.source_fingerprint().encode())
    for name in FROZEN:
        digest.update(name.encode() + b"\0" + (Path(__file__).parent / name).read_bytes() + b"\0")
    return digest.hexdigest()


def _write_content(folder: Path, parameters: Parameters) -> None:
    from recipe.partial_rollout.tasks.calculator.conversation import Conversations, mute_the_tool
    from recipe.partial_rollout.tasks.calculator.tokenizer import build_tokenizer
    from recipe.partial_rollout.tasks.clock10.dataset import draw_training, draw_validation, write_dataset
    from recipe.partial_rollout.tasks.clock10.model import build_model
    from recipe.partial_rollout.tasks.clock10.warm_start import WarmStart, train

    validation = draw_validation(parameters.val_rows, parameters.seed)
    (folder / "data").mkdir()
    write_dataset(folder / "data", parameters.train_rows, validation, parameters.seed)

    model, tokenizer = build_model(parameters.seed), build_tokenizer()
    problems = draw_training(random.Random(f"demonstrated-{parameters.seed}"), frozenset(validation))
    mixture = Conversations(parameters.careful_share, parameters.false_accept)
    # Answers are few among calls, more in short conversations: else the model does not learn to copy operators into them.
    settings = WarmStart(
        steps=parameters.steps, threads=parameters.threads, mixture=mixture, short_share=0.6, short_length=128
    )
    with model.register_forward_hook(mute_the_tool, with_kwargs=True):
        train(model, tokenizer, problems, settings, parameters.seed)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
