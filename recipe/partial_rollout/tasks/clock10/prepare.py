"""Build the task's folder: `model/`, `data/train.parquet`, `data/val.parquet` and `manifest.json`.

    python -m recipe.partial_rollout.tasks.clock10.prepare --out outputs/quickstart/task

The folder is complete or absent: everything is written beside it and renamed at the end. The manifest records the
parameters and a fingerprint of this package's source; a call that would write the same manifest does nothing, and does
so before torch is imported.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Parameters:
    """What determines the folder's content, apart from this package's source."""

    seed: int = 0
    """Seed of the weights, the demonstrations and the data."""
    steps: int = 1500
    """Optimiser steps of the warm start."""
    train_rows: int = 1024
    """Rows of `train.parquet`."""
    val_rows: int = 64
    """Rows of `val.parquet`, held out from training."""
    careful_share: float = 0.30
    """Share of demonstrations that never accept a wrong line."""
    false_accept: float = 0.20
    """Probability that the other demonstrations accept a wrong line."""
    threads: int = 2
    """Torch threads of the warm start."""

    def __post_init__(self) -> None:
        for name in ("steps", "train_rows", "val_rows", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: want at least 1")
        for name in ("careful_share", "false_accept"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)}: want 0..1")


TINY = {"steps": 60, "train_rows": 32, "val_rows": 8}
"""A model that merely loads and data that merely parses, in seconds: enough for tests of the machinery around them."""


def build(out: Path, parameters: Parameters) -> bool:
    """Bring `out` up to date; return whether anything was built.

    Raises:
        ValueError: a parameter is out of range, or `out` exists and is not a folder of this task.
    """
    manifest = {"parameters": asdict(parameters), "fingerprint": source_fingerprint()}
    if _read_manifest(out) == manifest and (out / "model").is_dir() and (out / "data").is_dir():
        return False
    if out.exists() and not (out / MANIFEST).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out={out}: exists and was not made by this command; choose another folder or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = out.with_name(f".{out.name}.new-{os.getpid()}")
    try:
        staging.mkdir()
        _write_content(staging, parameters)
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        _swap(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True


def source_fingerprint() -> str:
    """Return a SHA-256 over the names and contents of this package's modules."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _read_manifest(out: Path) -> dict[str, Any] | None:
    try:
        return json.loads((out / MANIFEST).read_text())
    except (OSError, ValueError):
        return None


def _write_content(folder: Path, parameters: Parameters) -> None:
    # Imported late: these load torch and transformers, which takes longer than finding that nothing is to be done.
    import random

    from recipe.partial_rollout.tasks.clock10.dataset import draw_training, draw_validation, write_dataset
    from recipe.partial_rollout.tasks.clock10.demonstration import Mixture
    from recipe.partial_rollout.tasks.clock10.model import build_model
    from recipe.partial_rollout.tasks.clock10.tokenizer import build_tokenizer
    from recipe.partial_rollout.tasks.clock10.warm_start import WarmStart, train

    validation = draw_validation(parameters.val_rows, parameters.seed)
    (folder / "data").mkdir()
    write_dataset(folder / "data", parameters.train_rows, validation, parameters.seed)

    model, tokenizer = build_model(parameters.seed), build_tokenizer()
    problems = draw_training(random.Random(f"demonstrated-{parameters.seed}"), frozenset(validation))
    mixture = Mixture(parameters.careful_share, parameters.false_accept)
    settings = WarmStart(steps=parameters.steps, threads=parameters.threads, mixture=mixture)
    train(model, tokenizer, problems, settings, parameters.seed)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def _swap(staging: Path, out: Path) -> None:
    retired = out.with_name(f".{out.name}.old-{os.getpid()}")
    if out.exists():
        out.rename(retired)
    staging.rename(out)
    shutil.rmtree(retired, ignore_errors=True)


def _parse(arguments: list[str] | None) -> tuple[Path, Parameters]:
    parser = argparse.ArgumentParser(prog="clock10.prepare", description="Build the embedded clock-10 task.")
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart/task"), help="folder to build")
    parser.add_argument("--tiny", action="store_true", help="a model that merely loads, in seconds, for tests")
    for name, value in asdict(Parameters()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=f"default {value}")
    options = vars(parser.parse_args(arguments))
    out, tiny = options.pop("out"), options.pop("tiny")
    given = {name: value for name, value in options.items() if value is not None}
    return out, replace(Parameters(**(TINY if tiny else {})), **given)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 after one line on stderr that says what is wrong."""
    started = time.monotonic()
    try:
        out, parameters = _parse(arguments)
        built = build(out, parameters)
    except (ValueError, OSError) as error:
        print(f"clock10.prepare: {error}", file=sys.stderr)
        return 2
    state = f"built in {time.monotonic() - started:.0f} s" if built else "up to date"
    print(f"clock10 task at {out}: {state} (seed {parameters.seed}, {parameters.steps} warm-start steps)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
