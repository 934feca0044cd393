"""Cost of a checkpoint of the manager: seconds to capture, write and load it, and its size.

One process, no Ray: a manager whose groups are half finished and half cached in segments, as after an interruption.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from recipe.partial_rollout.checkpoint.manifest import read_snapshot, write_snapshot
from recipe.partial_rollout.manager.codec import capture, encode, restore
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.types import Prompt, SampleOutput, Segment
from tests.bench.manager import manager_of

BOUND = "Exit code 1 if saving takes more than 3 s, 5% of a step of a minute."
_SAVE_S = 3.0
_VOCABULARY = 150_000
_GROUP, _REPEATS = 8, 3
_CALLS = 3
"""engine calls of a cached sample"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--groups", type=int, default=512, metavar="N", help="groups in flight")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="tokens of a sample")


def _fill(groups: int, tokens: int) -> PromptsManager:
    manager = manager_of(groups, _GROUP)
    row = {"raw_prompt": [{"role": "user", "content": "x" * 400}], "index": 0, "extra_info": {"split": "train"}}
    manager.backlog.enqueue(Prompt(f"0/{i}", row) for i in range(manager.wanted))
    manager.slots.register("w0", groups * _GROUP)
    manager.begin_version(0)
    random = np.random.default_rng(0)
    ones, versions = np.ones(tokens, np.int8), np.zeros(tokens, np.int32)
    for index, lease in enumerate(manager.claim("w0")):
        ids, log_probs = random.integers(0, _VOCABULARY, tokens, np.int32), -random.random(tokens, np.float32)
        if index % _GROUP and index % 2:
            output = SampleOutput(ids[:200], ids, ones, log_probs, versions, 1, 1.0, {"acc": 1.0}, 2, {})
            manager.finish(lease.sample_id, output)
        else:
            for some, probs in zip(np.array_split(ids, _CALLS), np.array_split(log_probs, _CALLS), strict=True):
                manager.add(lease.sample_id, [Segment(some.copy(), probs.copy(), index % 3)])
            manager.interrupt(lease.sample_id)
    return manager


def _measure(manager: PromptsManager, groups: int, path: Path) -> dict[str, float]:
    """Seconds; in those of the capture the manager answers nobody."""
    began = time.perf_counter()
    captured = capture(manager)
    blocked = time.perf_counter()
    state = encode(captured, dict)
    encoded = time.perf_counter()
    write_snapshot(path, state)
    saved = time.perf_counter()
    restore(manager_of(groups, _GROUP), read_snapshot(path))
    return {
        "blocked": blocked - began,
        "encode": encoded - blocked,
        "save": saved - began,
        "load": time.perf_counter() - saved,
        "MB": path.stat().st_size / 1e6,
    }


def run(options: argparse.Namespace) -> int:
    """Print the medians; exit code 1 when saving takes too long."""
    manager = _fill(options.groups, options.tokens)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "manager.snapshot"
        times = [_measure(manager, options.groups, path) for _ in range(_REPEATS)]
    medians = {name: statistics.median(row[name] for row in times) for name in times[0]}
    print(f"{options.groups} groups x {_GROUP} samples x {options.tokens} tokens, median of {_REPEATS}")
    for name, value in medians.items():
        print(f"{name:<8} {value:.3f}")
    return 0 if medians["save"] <= _SAVE_S else 1
