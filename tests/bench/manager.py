"""Latency of every ``PromptsManager`` verb with many samples in flight.

One process, no Ray: a synthetic trainer and its workers drive the state machine through whole rounds, in which samples
finish, are interrupted and resume, and a worker dies. Each call is timed by itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from recipe.partial_rollout.config.choices import Mode, SchedulingPolicy
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.types import Prompt, SampleOutput, Segment

P99_BOUND_MS = 1.0
_BULK = ("begin_version", "release_worker", "take_batch", "acknowledge")
"""verbs whose work grows with what they move; their bound is per group or sample moved"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--samples", type=int, default=100_000, metavar="N", help="samples in flight")
    parser.add_argument("--group", type=int, default=8, metavar="N", help="samples in a group")
    parser.add_argument("--workers", type=int, default=64, metavar="N", help="agent-loop workers")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="rounds to play")
    parser.add_argument(
        "--policy",
        choices=list(SchedulingPolicy),
        default=SchedulingPolicy.BOUNDED,
        help="partial_rollout.scheduling.policy",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the synthetic rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.set_defaults(run=run)


class Stopwatch:
    """Times calls by name; a bulk call counts by the items it moved."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def __call__(self, name: str, verb: Callable[[], Any], items: Callable[[Any], int] = lambda _: 1) -> Any:
        start = time.perf_counter()
        result = verb()
        elapsed = time.perf_counter() - start
        self.seconds[name].append(elapsed / max(1, items(result)))
        return result


class Drive:
    """Plays trainer, workers and engine against one manager."""

    def __init__(self, options: argparse.Namespace) -> None:
        groups = options.samples // options.group
        self.batch = groups // 2
        admission = Admission(
            Mode.WINDOW, self.batch, options.group, 1.0, groups, self.batch * options.group, max_staleness=4
        )
        self.watch = Stopwatch()
        self.random = random.Random(options.seed)
        self.manager = PromptsManager(admission, Scheduling(SchedulingPolicy(options.policy)), time.monotonic)
        self.workers = [f"w{i}" for i in range(options.workers)]
        self.capacity = -(-options.samples // options.workers)
        for worker in self.workers:
            self.manager.register_worker(worker, self.capacity)
        self.running: dict[str, list[str]] = {worker: [] for worker in self.workers}
        self.offered = self.version = 0
        self.most_in_flight = 0

    def round(self) -> None:
        """One whole round: fill, finish until the batch is complete, interrupt, train."""
        m, watch = self.manager, self.watch
        wanted = m.wanted
        m.offer(Prompt(f"0/{self.offered + i}", 0, {}) for i in range(wanted))
        self.offered += wanted
        watch("begin_version", lambda: m.begin_version(self.version), items=int)
        self._claim_all()
        self.most_in_flight = max(self.most_in_flight, int(m.metrics()["inflight/samples"]))
        self._finish_until_complete()
        taken = watch("take_batch", lambda: m.take_batch(stop=True), items=len)
        self._interrupt_all()
        watch("acknowledge", lambda: m.acknowledge(g.uid for g in taken), items=lambda _: len(taken))
        self.version += 1

    def _claim_all(self) -> None:
        claimed = True
        while claimed:
            claimed = False
            for worker in self.workers:
                grants = self.watch("claim", lambda w=worker: self.manager.claim(w, limit=1))
                self.running[worker] += [grant.sample_id for grant in grants]
                claimed = claimed or bool(grants)

    def _finish_until_complete(self) -> None:
        output = _output(64)
        pool = [(worker, sample) for worker, samples in self.running.items() for sample in samples]
        self.random.shuffle(pool)
        # Groups end together more often than samples drawn one by one would: siblings are alike.
        pool.sort(key=lambda item: hash(item[1].split("#")[0]) % 97)
        for worker, sample in pool:
            if self.watch("round_complete", self.manager.round_complete):
                return
            self.watch("finish", lambda s=sample: self.manager.finish(s, output))
            self.running[worker].remove(sample)
            self.watch("admit", self.manager.admit)

    def _interrupt_all(self) -> None:
        segment = _segment(32, self.manager.version)
        for worker, samples in self.running.items():
            for sample in samples:
                self.watch("add_segment", lambda s=sample: self.manager.add_segment(s, segment))
                self.watch("interrupt", lambda s=sample: self.manager.interrupt(s))
            self.running[worker] = []

    def kill_worker(self) -> None:
        """The last worker dies with what it holds, and another joins."""
        worker = self.workers[-1]
        self.watch("release_worker", lambda: self.manager.release_worker(worker), items=int)
        self.manager.register_worker(worker, self.capacity)
        self.running[worker] = []


def _output(length: int) -> SampleOutput:
    zeros = np.zeros(length, np.int32)
    return SampleOutput(zeros, zeros, np.ones(length, np.int8), zeros.astype(np.float32), zeros, 1, 1.0, {}, 2, {})


def _segment(length: int, version: int) -> Segment:
    return Segment(np.zeros(length, np.int32), np.zeros(length, np.float32), version)


def run(options: argparse.Namespace) -> int:
    """Print the table; exit code 1 when a p99 is over its bound."""
    drive = Drive(options)
    gc.freeze()
    for _ in range(options.rounds):
        drive.round()
        drive.kill_worker()
    rows = {}
    for name, seconds in sorted(drive.watch.seconds.items()):
        ms = np.array(seconds) * 1e3
        rows[name] = {"calls": len(ms), "p50_ms": np.percentile(ms, 50), "p99_ms": np.percentile(ms, 99)}
        rows[name] |= {"max_ms": ms.max(), "per": "item" if name in _BULK else "call"}
    print(f"{drive.most_in_flight:,} samples in flight, {len(drive.workers)} workers, policy {options.policy}")
    print(f"{'verb':<16}{'calls':>9}{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}  per")
    for name, row in rows.items():
        print(
            f"{name:<16}{row['calls']:>9,}{row['p50_ms']:>10.4f}{row['p99_ms']:>10.4f}{row['max_ms']:>10.3f}  {row['per']}"
        )
    worst = max(rows, key=lambda name: rows[name]["p99_ms"])
    passed = rows[worst]["p99_ms"] < P99_BOUND_MS
    print(f"worst p99: {worst} {rows[worst]['p99_ms']:.4f} ms ({'under' if passed else 'OVER'} {P99_BOUND_MS:g} ms)")
    if options.json:
        figures = {"samples_in_flight": drive.most_in_flight, "policy": str(options.policy), "verbs": rows}
        options.json.write_text(json.dumps(figures, indent=2, default=float) + "\n")
    return 0 if passed else 1
