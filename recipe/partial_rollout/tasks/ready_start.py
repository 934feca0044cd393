"""An embedded task: `model/`, `data/train.parquet`, `data/val.parquet` and `manifest.json`, without a download.

    python -m recipe.partial_rollout.tasks.ready_start --out outputs/quickstart/task           unpack the warm start
    python -m recipe.partial_rollout.tasks.ready_start --out outputs/quickstart/task --train   train it anew, 4 minutes

The task is `clock10`; `--task calculator` and `--task pictures` are the others. The folder is complete or absent:
everything is written beside it and renamed at the end. Its manifest has the parameters and a fingerprint of the task's
sources; a call that would write the same manifest does nothing. Weights are unpacked only if they were packed with that
manifest; after a change of the task's sources, or with another parameter, the command trains. `ready_start.json` in the
folder says that its weights were unpacked.

Only weights are stored; data, tokenizer and config come from the sources. Each matrix is stored in int8 with a float32
scale per row, each vector in float32: for `clock10` 0.59 MB instead of 2.40 MB (`tests/generated.py` packs them). So the
unpacked weights are not the trained ones. No weight is off by more than 1/254 of the largest in its row; in the tasks of
text that is 0.0042 at most.
`tests/studies/results/log.md` says what that does to the policy.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

TASKS = ("clock10", "calculator", "pictures")
"""packages of the tasks; a task uses the first one's module if its own package lacks it"""
_NOT_FROZEN = "tool.py"
"""the one module of a package that its weights do not depend on"""
MANIFEST = "manifest.json"
ORIGIN = "ready_start.json"
"""file in the folder that names the packed file of its weights, and the largest error of a weight"""
SCALE = ":scale"
"""ends the name of a matrix's scales: float32 `[rows, 1]`, for its int8 levels `[rows, columns]`"""

Weights = dict[str, np.ndarray]
"""float32 tensors by their name in the model"""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Facts that determine the folder's content, apart from the sources."""

    seed: int = 0
    """Seed of the weights, the demonstrations and the data."""
    steps: int = 1500
    """Optimiser steps of the warm start."""
    train_rows: int = 1024
    """Rows of `train.parquet`."""
    val_rows: int = 64
    """Rows of `val.parquet`, held out from training."""


TINY = Parameters(steps=60, train_rows=32, val_rows=8)
"""A model that merely loads and data that merely parses, in seconds: enough for tests of the machinery around them."""


def source_fingerprint(task: str) -> str:
    """A SHA-256 over the names and the code of the modules that the task's folder depends on.

    Docstrings, lines of comment and blank lines are left out, so that better words do not make the weights outdated.
    """
    digest = hashlib.sha256()
    for package in dict.fromkeys((TASKS[0], task)):
        for path in sorted((Path(__file__).parent / package).glob("*.py")):
            if path.name != _NOT_FROZEN:
                digest.update(path.name.encode() + b"\0" + _code_lines(path.read_text()).encode() + b"\0")
    return digest.hexdigest()


def _code_lines(source: str) -> str:
    """Return the lines of a module without comments, docstrings and blank lines.

    Text is hashed, because a dump of the syntax tree differs between Python's releases.
    """
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            for line in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[line] = ""
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


def packed_file(task: str) -> Path:
    """The warm start that ships for `task`."""
    return Path(__file__).parent / "ready" / f"{task}_seed0.npz"


def restore(stored: dict[str, Any]) -> Weights:
    """The weights of a package file."""
    return {
        name: part * stored[name + SCALE] if name + SCALE in stored else part
        for name, part in stored.items()
        if not name.endswith(SCALE)
    }


def read_packed(file: Path) -> tuple[Weights, dict[str, Any], float]:
    """Weights, the manifest that they were packed with, and their largest error."""
    with np.load(file, allow_pickle=False) as archive:
        stored = dict(archive)
    manifest, error = json.loads(str(stored.pop("manifest"))), float(stored.pop("largest_error"))
    return restore(stored), manifest, error


def manifest_of(task: str, parameters: Parameters) -> dict[str, Any]:
    """Return the facts that determine the content of the task's folder."""
    return {"parameters": asdict(parameters), "fingerprint": source_fingerprint(task)}


def make_task(
    out: Path, parameters: Parameters, *, task: str = "clock10", file: Path | None = None, train: bool = False
) -> str:
    """Bring `out` up to date, from `file` where that fits and `train` does not forbid it; return what was done, in words.

    Raises:
        ValueError: `out` exists and is not a folder of an embedded task.
    """
    manifest = manifest_of(task, parameters)
    # A folder of unpacked weights has the same manifest as a trained one: `ORIGIN` tells them apart.
    found = _manifest_in(out)
    whole = found == manifest and (out / "model").is_dir() and (out / "data").is_dir()
    if whole and not (train and (out / ORIGIN).exists()):
        return "up to date"
    ours = isinstance(found, dict) and "fingerprint" in found
    if out.exists() and not ours and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out={out}: exists and was not made by this command; choose another folder or remove it")
    file = file or packed_file(task)
    facts, weights = {MANIFEST: manifest}, None
    if not train:
        weights, packed, error = read_packed(file)
        if packed != manifest:
            print(
                "packed warm start not used: it was made from other sources or parameters; training one",
                file=sys.stderr,
            )
            weights = None
        else:
            facts[ORIGIN] = {"weights": file.name, "largest_weight_error": error}
    staging = out.with_name(f".{out.name}.new-{os.getpid()}")
    try:
        staging.mkdir(parents=True)
        _write(staging, task, parameters, weights)
        for name, noted in facts.items():
            (staging / name).write_text(json.dumps(noted, indent=2) + "\n")
        shutil.rmtree(out, ignore_errors=True)
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return "trained" if weights is None else "unpacked from the package"


def _manifest_in(out: Path) -> Any:
    """Return the content of the manifest in `out`; None if it has none, or none that can be read."""
    try:
        return json.loads((out / MANIFEST).read_text())
    except (OSError, ValueError):
        return None


def _write(folder: Path, task: str, parameters: Parameters, weights: Weights | None) -> None:
    """Write data and model into `folder`; train the model if `weights` is None."""
    # Imported late: these load torch and transformers, which takes longer than finding that nothing is to be done.
    import torch
    from transformers.utils import logging

    from recipe.partial_rollout.tasks.clock10.dataset import draw_training, draw_validation

    # transformers would show a progress bar for a single shard.
    logging.disable_progress_bar()
    (folder / "data").mkdir()
    validation = draw_validation(parameters.val_rows, parameters.seed)
    _module(task, "dataset").write_dataset(folder / "data", parameters.train_rows, validation, parameters.seed)
    architecture = _module(task, "model")
    model = architecture.build_model(parameters.seed)
    tokenizer = _module(task, "tokenizer").build_tokenizer()
    if weights is None:
        demonstrated = draw_training(random.Random(f"demonstrated-{parameters.seed}"), frozenset(validation))
        warm_start = _module(task, "warm_start").warm_start
        warm_start(model, tokenizer, demonstrated, steps=parameters.steps, seed=parameters.seed)
    else:
        tensors = {name: torch.from_numpy(weight) for name, weight in weights.items()}
        # The output head shares the embedding's weights, which the file has only once.
        (embedding,) = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
        model.load_state_dict({**tensors, "lm_head.weight": embedding})
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    if hasattr(architecture, "save_processor"):
        architecture.save_processor(folder / "model")


def _module(task: str, name: str) -> Any:
    """The module `name` of `task`."""
    own = f"{__package__}.{task}.{name}"
    return import_module(own if find_spec(own) else f"{__package__}.{TASKS[0]}.{name}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 after one line on stderr that says what is wrong."""
    parser = argparse.ArgumentParser(
        prog="ready_start", description="Write an embedded task: data, and a model with the warm start that ships."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to build")
    parser.add_argument("--task", choices=TASKS, default="clock10")
    parser.add_argument("--train", action="store_true", help="train the warm start, do not unpack the one that ships")
    parser.add_argument("--tiny", action="store_true", help="a model that merely loads, trained in seconds, for tests")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights, demonstrations and data; any but 0 trains"
    )
    options, started = parser.parse_args(arguments), time.monotonic()
    try:
        parameters = replace(TINY if options.tiny else Parameters(), seed=options.seed)
        done = make_task(options.out, parameters, task=options.task, train=options.train)
        print(f"{options.task} task at {options.out}: {done} in {time.monotonic() - started:.0f} s")
    except (ValueError, OSError) as error:
        print(f"ready_start: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
