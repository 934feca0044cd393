"""Latency of every ``PromptsManager`` verb with many samples in flight.

One process, no Ray: a synthetic trainer and its workers drive the state machine through whole rounds, in which samples
finish, are interrupted and resume, and a worker dies. Each call is timed by itself.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.types import Prompt, Segment
from tests.bench.scripted_engine import output_of

BOUND = "Exit code 1 if the p99 of a verb is over 1 ms; verbs that move many groups or samples count by the item."
_P99_MS = 1.0
_GROUP = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--samples", type=int, default=100_000, metavar="N", help="samples in flight")
    parser.add_argument("--workers", type=int, default=64, metavar="N", help="agent-loop workers")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="rounds to play")


def manager_of(groups: int, group: int) -> PromptsManager:
    """One that admits ``groups`` groups, two batches of them."""
    settings = PartialRolloutConfig(batch_groups=max(1, groups // 2), samples_per_group=group)
    return PromptsManager(settings, time.monotonic)


class Drive:
    """Plays trainer, workers and engine against one manager."""

    def __init__(self, samples: int, workers: int) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        """of each call of a verb, or of each item that it moved"""
        self.random = random.Random(0)
        self.manager = manager_of(samples // _GROUP, _GROUP)
        self.workers = [f"w{i}" for i in range(workers)]
        self.capacity = -(-samples // workers)
        for worker in self.workers:
            self.manager.slots.register(worker, self.capacity)
        self.running: dict[str, list[str]] = {worker: [] for worker in self.workers}
        self.offered = self.version = 0
        self.most_in_flight = 0

    def timed(self, name: str, verb: Callable[[], Any], items: Callable[[Any], int] = lambda _: 1) -> Any:
        start = time.perf_counter()
        result = verb()
        self.seconds[name].append((time.perf_counter() - start) / max(1, items(result)))
        return result

    def round(self) -> None:
        """One whole round: fill, finish until the batch is complete, interrupt, train."""
        m, wanted = self.manager, self.manager.wanted
        m.backlog.enqueue(Prompt(f"0/{self.offered + i}", {}) for i in range(wanted))
        self.offered += wanted
        self.timed("begin_version", lambda: m.begin_version(self.version), items=lambda _: wanted)
        self._claim_all()
        self.most_in_flight = max(self.most_in_flight, int(m.metrics()["inflight/samples"]))
        self._finish_until_complete()
        taken = self.timed("take_batch", lambda: m.take_batch(stop=True), items=len)
        self._interrupt_all()
        self.timed("train", m.groups.train, items=lambda _: len(taken))
        self.version += 1

    def _claim_all(self) -> None:
        claimed = True
        while claimed:
            claimed = False
            for worker in self.workers:
                leases = self.timed("claim", lambda w=worker: self.manager.claim(w, limit=1))
                self.running[worker] += [lease.sample_id for lease in leases]
                claimed = claimed or bool(leases)

    def _finish_until_complete(self) -> None:
        output = output_of(64, 0)
        pool = [(worker, sample) for worker, samples in self.running.items() for sample in samples]
        self.random.shuffle(pool)
        # Groups end together more often than samples drawn one by one would: siblings are alike.
        pool.sort(key=lambda item: hash(item[1].split("#")[0]) % 97)
        for worker, sample in pool:
            if self.timed("round_complete", self.manager.round_complete):
                return
            self.timed("finish", lambda s=sample: self.manager.finish(s, output))
            self.running[worker].remove(sample)
            self.timed("admit", self.manager.admit)

    def _interrupt_all(self) -> None:
        segment = Segment(np.zeros(32, np.int32), np.zeros(32, np.float32), self.manager.version)
        for worker, samples in self.running.items():
            for sample in samples:
                self.timed("add", lambda s=sample: self.manager.add(s, [segment]))
                self.timed("interrupt", lambda s=sample: self.manager.interrupt(s))
            self.running[worker] = []

    def kill_worker(self) -> None:
        """The last worker dies with what it holds, and another joins."""
        worker = self.workers[-1]
        self.timed("release_worker", lambda: self.manager.release_worker(worker), items=int)
        self.manager.slots.register(worker, self.capacity)
        self.running[worker] = []


def run(options: argparse.Namespace) -> int:
    """Print the table; exit code 1 when a p99 is over its bound."""
    drive = Drive(options.samples, options.workers)
    gc.freeze()
    for _ in range(options.rounds):
        drive.round()
        drive.kill_worker()
    print(f"{drive.most_in_flight:,} samples in flight, {len(drive.workers)} workers")
    print(f"{'verb':<16}{'calls':>9}{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}")
    worst = 0.0
    for name, seconds in sorted(drive.seconds.items()):
        p50, p99, most = np.percentile(np.array(seconds) * 1e3, [50, 99, 100])
        print(f"{name:<16}{len(seconds):>9,}{p50:>10.4f}{p99:>10.4f}{most:>10.3f}")
        worst = max(worst, float(p99))
    return 0 if worst < _P99_MS else 1
