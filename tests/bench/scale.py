"""What scheduling costs at scale: the real manager actor and workers against replicas that follow an engine curve.

Overhead is the share of a round's slot time that is lost to scheduling: what slots wait from its opening until they
decode, and all of them from the decision to interrupt until the engines are quiet. (A round's length says little: what a
late round leaves undone, the next one has decoded already.) Not counted: moving the batch to the trainer, which any rollout
must; collecting what was interrupted, while the trainer updates; preparing the next round, while the weights load (their
seconds are what these may not be shorter than). All actors share this machine, so what workers cost on nodes of
their own is counted against it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError

from recipe.partial_rollout.config.settings import Deadlines, PartialRolloutConfig
from recipe.partial_rollout.manager.actor import ManagerActor, RayObjects
from recipe.partial_rollout.manager.types import Prompt
from recipe.partial_rollout.tools.planner.engine_curve import PRESETS
from recipe.partial_rollout.tools.planner.lengths import LengthTrace
from recipe.partial_rollout.tools.table import Table
from tests.bench.scripted_engine import ScriptedWorker

BOUND = (
    "The real manager actor and workers drive replicas that follow an engine curve. Overhead is the share of a round's "
    "slot time lost to scheduling: from the start of the round until a slot decodes, and from the decision to interrupt "
    "until the engines are quiet. Exit code 1 if it is over 1%."
)
_OVERHEAD = 0.01
_GROUP, _WORKERS = 8, 2
_CURVE = PRESETS["h100-qwen3-4b"]
_DEADLINE_S = 1800.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--replicas", type=int, nargs="+", default=[1, 8, 64, 256, 1024], metavar="N", help="numbers of replicas"
    )
    parser.add_argument(
        "--samples-per-replica", type=int, default=98, metavar="N", help="samples in flight on each replica"
    )
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="measured rounds, after one that is not")
    parser.add_argument(
        "--lognormal",
        type=float,
        nargs=3,
        default=[3000, 3600, 18384],
        metavar=("MEDIAN", "MEAN", "CAP"),
        help="distribution of response lengths, in tokens",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """One size; means over the measured rounds."""

    replicas: int
    samples: int
    """in flight at the start of a round"""
    round_s: float
    decoded_tokens: float
    open_s: float
    """from the round's opening until every slot decodes"""
    open_lost_s: float
    """of that: what the mean slot waited"""
    interrupt_s: float
    """from the decision to interrupt until no engine runs"""
    take_s: float
    """until the trainer has the arrays of the batch's outputs, as with any rollout: no overhead"""
    collect_s: float
    """from then until the manager knows of every token"""
    prepare_s: float
    """from then until every sample of the next round waits for its opening"""
    trained_samples: int
    """in all rounds, the one that fills included"""
    manager_cpu_s: float
    manager_rss_mb: float
    """at the end"""

    @property
    def overhead(self) -> float:
        """Share of the round."""
        return (self.open_lost_s + self.interrupt_s) / self.round_s

    @property
    def manager_us_per_token(self) -> float:
        return 1e6 * self.manager_cpu_s / self.decoded_tokens

    @property
    def manager_ms_per_sample(self) -> float:
        return 1e3 * self.manager_cpu_s / self.samples


def run(options: argparse.Namespace) -> int:
    """Print a row a size; exit code 1 when one is over the bound."""
    median, mean, cap = options.lognormal
    lengths = LengthTrace.lognormal(median=median, mean=mean, cap=int(cap), samples_per_group=_GROUP)
    rows = []
    for replicas in options.replicas:
        # A Ray of its own for each size, unless the caller has one: what the last size left must not slow the next.
        own = not ray.is_initialized()
        if own:
            ray.init(num_cpus=_WORKERS + 2, include_dashboard=False, log_to_driver=False)
        try:
            rows.append(measure(replicas, lengths, options))
        finally:
            if own:
                ray.shutdown()
        print(Table.of("Scheduling at scale", rows, _COLUMNS).console(), flush=True)
    if options.json:
        figures = [{**asdict(row), "overhead": row.overhead} for row in rows]
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    over = [row.replicas for row in rows if row.overhead > _OVERHEAD]
    print(
        f"overhead {'OVER' if over else 'under'} {_OVERHEAD:.0%} of the round"
        + (f" at {over} replicas" if over else "")
    )
    return 1 if over else 0


def measure(replicas: int, lengths: LengthTrace, options: argparse.Namespace) -> ScaleRow:
    """Rounds with ``replicas`` replicas."""
    groups = max(2, replicas * options.samples_per_replica // _GROUP)
    batch = groups // 2
    deadlines = Deadlines(stall_s=_DEADLINE_S)
    settings = PartialRolloutConfig(batch_groups=batch, samples_per_group=_GROUP, deadlines=deadlines)
    drive = _Drive(settings, lengths, replicas, slots=-(-groups * _GROUP // replicas))
    played = [drive.round(version) for version in range(1 + options.rounds)]
    measured = played[1:]
    return ScaleRow(
        replicas=replicas,
        samples=2 * batch * _GROUP,
        trained_samples=int(sum(figures.pop("trained_samples") for figures in played)),
        manager_rss_mb=drive.manager_process.memory_info().rss / 2**20,
        **{name: sum(figures[name] for figures in measured) / len(measured) for name in measured[0]},
    )


class _Drive:
    """Plays the trainer: rounds as ``PartialRolloutAgentLoopManager`` runs them, without batches or weights."""

    def __init__(self, settings: PartialRolloutConfig, lengths: LengthTrace, replicas: int, slots: int) -> None:
        self._slots = slots * replicas
        self._prompts = self._prompts_of(lengths)
        self._store = RayObjects(_DEADLINE_S)
        actor_class: Any = ray.remote(ManagerActor).options(num_cpus=0)
        self._manager: Any = actor_class.remote(settings, self._store)
        self.manager_process = psutil.Process(_get(self._manager.__ray_call__.remote(_pid), "the manager to start"))
        worker_class: Any = ray.remote(ScriptedWorker).options(num_cpus=0)
        workers = min(_WORKERS, replicas)
        shares = [replicas // workers + (i < replicas % workers) for i in range(workers)]
        self._workers = [worker_class.remote(_CURVE, share) for share in shares]
        for i, (worker, share) in enumerate(zip(self._workers, shares, strict=True)):
            # A scripted worker chooses among replicas of its own.
            connected = worker.connect.remote(f"w{i}", self._manager, slots * share, {})
            _get(connected, f"worker w{i} to start")
        self._serving = [worker.serve.remote() for worker in self._workers]

    @staticmethod
    def _prompts_of(lengths: LengthTrace) -> Iterator[Prompt]:
        for i, group in enumerate(cycle(lengths.groups.tolist())):
            yield Prompt(f"0/{i}", {"lengths": group})

    def round(self, version: int) -> dict[str, float]:
        """One round, from its preparation to its last report; seconds, tokens and the manager's CPU seconds."""
        decoded, cpu = self._total("decoded"), self._cpu_s()
        prepare_s, expected = self._prepare(version)
        began = time.monotonic()
        self._all("begin", version, began)
        self._unless_a_worker_ends(self._manager.wait_batch.remote(True))
        _get([*self._ask("close_round"), *self._ask("interrupt")], "workers and replicas to stop")
        quiet, quiet_at = time.monotonic(), time.time()
        ended = _get(self._manager.batch.remote(), "the batch")
        outputs = self._store.fetch({group.uid: group.outputs for group in ended.groups})
        groups = [replace(group, outputs=outputs[group.uid]) for group in ended.groups]
        take_s = time.monotonic() - quiet
        waits = self._all("waited")
        if (started := sum(slots for _, _, slots in waits)) < expected:
            raise RuntimeError(f"{started} samples of round {version} decoded; {expected} had been granted")
        _get(self._ask("flush"), "all workers to report")
        flushed_at = time.time()
        _get(self._manager.finish_step.remote(), "the manager to forget the batch")
        return {
            "round_s": quiet - began,
            "open_s": max(last for _, last, _ in waits),
            "open_lost_s": sum(seconds for seconds, _, _ in waits) / started,
            "interrupt_s": quiet_at - ended.decided_at,
            "take_s": take_s,
            "collect_s": max(0.0, flushed_at - quiet_at),
            "prepare_s": prepare_s,
            "decoded_tokens": self._total("decoded") - decoded,
            "manager_cpu_s": self._cpu_s() - cpu,
            "trained_samples": sum(len(group.outputs) for group in groups),
        }

    def _prepare(self, version: int) -> tuple[float, int]:
        """Seconds until every sample that has a slot waits for the round to open, and how many they are."""
        began = time.monotonic()
        prompts = list(islice(self._prompts, _get(self._manager.wanted.remote(), "what the manager wants")))
        _get(self._manager.begin_version.remote(version, prompts, True), "the manager to prepare a round")
        figures = _get(self._manager.__ray_call__.remote(_figures), "the manager's figures")
        expected = min(self._slots, int(figures["inflight/samples"]))
        while self._total("ready") < expected:
            if time.monotonic() - began > _DEADLINE_S:
                raise TimeoutError(f"waited {_DEADLINE_S:g} s for {expected} samples to be ready for a round")
            time.sleep(0.05)
        return time.monotonic() - began, expected

    def _unless_a_worker_ends(self, reference: Any) -> None:
        done, _ = ray.wait([reference, *self._serving], num_returns=1, timeout=_DEADLINE_S)
        if not done:
            raise TimeoutError(f"waited {_DEADLINE_S:g} s for the end of the round")
        ray.get(done[0])

    def _total(self, figure: str) -> int:
        return sum(self._all(figure))

    def _all(self, verb: str, *args: Any) -> list[Any]:
        return _get(self._ask(verb, *args), f"{verb} of all workers")

    def _ask(self, verb: str, *args: Any) -> list[Any]:
        return [getattr(worker, verb).remote(*args) for worker in self._workers]

    def _cpu_s(self) -> float:
        times = self.manager_process.cpu_times()
        return times.user + times.system


def _get(reference: Any, what: str) -> Any:
    try:
        return ray.get(reference, timeout=_DEADLINE_S)
    except GetTimeoutError:
        raise TimeoutError(f"waited {_DEADLINE_S:g} s for {what}") from None


def _pid(actor: Any) -> int:
    return os.getpid()


def _figures(actor: Any) -> dict[str, float]:
    return actor._manager.metrics()


_COLUMNS: tuple[tuple[str, Callable[[ScaleRow], str]], ...] = (
    ("replicas", lambda row: str(row.replicas)),
    ("samples", lambda row: f"{row.samples:,}"),
    ("round s", lambda row: f"{row.round_s:.2f}"),
    ("overhead", lambda row: f"{row.overhead:.2%}"),
    ("last slot s", lambda row: f"{row.open_s:.2f}"),
    ("mean slot s", lambda row: f"{row.open_lost_s:.2f}"),
    ("interrupt s", lambda row: f"{row.interrupt_s:.2f}"),
    ("take s", lambda row: f"{row.take_s:.2f}"),
    ("collect s", lambda row: f"{row.collect_s:.2f}"),
    ("prepare s", lambda row: f"{row.prepare_s:.2f}"),
    ("manager CPU s", lambda row: f"{row.manager_cpu_s:.2f}"),
    ("ms / sample", lambda row: f"{row.manager_ms_per_sample:.2f}"),
    ("us / token", lambda row: f"{row.manager_us_per_token:.3f}"),
    ("MB", lambda row: f"{row.manager_rss_mb:.0f}"),
)
