"""Cost of a checkpoint of the manager: seconds to capture, write and load it, and its size.

One process, no Ray: a manager whose groups are half finished and half cached in segments, as after an interruption.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from recipe.partial_rollout.checkpoint.snapshot import read_snapshot, write_snapshot
from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.codec import encode
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.types import Prompt, SampleOutput, Segment

_VOCABULARY = 150_000
_CALLS = 3
"""engine calls of a cached sample"""


@dataclass(frozen=True, slots=True)
class SnapshotTimes:
    """One save and load; seconds."""

    blocked_s: float
    """in which the manager answers nobody"""
    encode_s: float
    write_s: float
    load_s: float
    megabytes: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--groups", type=int, default=512, metavar="N", help="groups in flight")
    parser.add_argument("--group", type=int, default=8, metavar="N", help="samples in a group")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="tokens of a sample")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="repeats, of which the median counts")
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="where to write (default: the system's temporary directory)"
    )
    parser.add_argument("--step-s", type=float, default=60.0, metavar="S", help="seconds of a step to compare with")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.set_defaults(run=run)


def _admission(options: argparse.Namespace) -> Admission:
    batch = max(1, options.groups // 2)
    return Admission(Mode.WINDOW, batch, options.group, 1.0, options.groups, batch * options.group, 4)


def _fill(options: argparse.Namespace) -> PromptsManager:
    manager = PromptsManager(_admission(options), Scheduling(), time.monotonic)
    row = {"raw_prompt": [{"role": "user", "content": "x" * 400}], "index": 0, "extra_info": {"split": "train"}}
    manager.offer(Prompt(f"0/{i}", 0, row) for i in range(manager.wanted))
    manager.register_worker("w0", options.groups * options.group)
    manager.begin_version(0)
    random = np.random.default_rng(0)
    for index, grant in enumerate(manager.claim("w0")):
        tokens = random.integers(0, _VOCABULARY, options.tokens, np.int32)
        log_probs = -random.random(options.tokens, np.float32)
        if index % options.group and index % 2:
            manager.finish(grant.sample_id, _output(tokens, log_probs))
        else:
            for ids, probs in zip(np.array_split(tokens, _CALLS), np.array_split(log_probs, _CALLS), strict=True):
                manager.add_segment(grant.sample_id, Segment(ids.copy(), probs.copy(), index % 3))
            manager.interrupt(grant.sample_id)
    return manager


def _output(tokens: np.ndarray, log_probs: np.ndarray) -> SampleOutput:
    ones = np.ones(len(tokens), np.int8)
    versions = np.zeros(len(tokens), np.int32)
    return SampleOutput(tokens[:200], tokens, ones, log_probs, versions, 1, 1.0, {"acc": 1.0}, 2, {})


def _measure(manager: PromptsManager, options: argparse.Namespace, path: Path) -> SnapshotTimes:
    start = time.perf_counter()
    captured = manager.capture()
    blocked_s = time.perf_counter() - start
    state = encode(captured)
    encode_s = time.perf_counter() - start - blocked_s
    written = write_snapshot(path, state)
    start = time.perf_counter()
    PromptsManager(_admission(options), Scheduling(), time.monotonic).load_state_dict(read_snapshot(path))
    return SnapshotTimes(blocked_s, encode_s, written.seconds, time.perf_counter() - start, written.bytes / 1e6)


def run(options: argparse.Namespace) -> int:
    """Print the medians; exit code 1 when saving takes more than 5% of a step."""
    manager = _fill(options)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        path = Path(directory) / "manager.snapshot"
        times = [asdict(_measure(manager, options, path)) for _ in range(options.repeats)]
    medians = {name: statistics.median(row[name] for row in times) for name in times[0]}
    save_s = medians["blocked_s"] + medians["encode_s"] + medians["write_s"]
    passed = save_s <= 0.05 * options.step_s
    print(f"{options.groups} groups x {options.group} samples x {options.tokens} tokens, median of {options.repeats}")
    print(f"snapshot  {medians['megabytes']:.1f} MB")
    print(f"save      {save_s:.3f} s: encode {medians['encode_s']:.3f} s, write {medians['write_s']:.3f} s")
    print(f"blocked   {medians['blocked_s']:.3f} s ({medians['blocked_s'] / save_s:.1%} of it)")
    print(f"load      {medians['load_s']:.3f} s")
    verdict = "at most" if passed else "OVER"
    print(f"a step of {options.step_s:g} s spends {save_s / options.step_s:.2%} on it ({verdict} 5%)")
    if options.json:
        options.json.write_text(json.dumps({**medians, "save_s": save_s, "runs": times}, indent=2) + "\n")
    return 0 if passed else 1
