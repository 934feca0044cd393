"""The faults: what each does to a training, and what becomes of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

import psutil

from recipe.partial_rollout.records.run_log import NAME, Phase
from recipe.partial_rollout.tools.reading.run_log import read_log
from tests.chaos.victim import Victim, processes_of_session

ORDERS = "PARTIAL_ROLLOUT_CHAOS_ORDERS"
"""environment variable: a directory in which a file named after a fault asks an agent loop for it, once"""
_WORKER = "ray::PartialRolloutAgentLoopWorker"
SLACK_S = 10.0
"""seconds beyond a deadline within which a training must go on, or have ended"""


class Kind(StrEnum):
    """A kind of fault."""

    KILL = "kill"
    """SIGKILL to every process; the training is resumed, as after every fault that ends it"""
    DRIVER = "driver"
    """SIGKILL to the driver, as to one process of each of the next four"""
    WORKER = "worker"
    ENGINE = "engine"
    NODE = "node"
    """its raylet: Ray ends what runs there, which is all"""
    TRAINER = "trainer"
    STOP = "stop"
    """SIGSTOP to an agent-loop worker, for longer than it has to answer"""
    DROP = "drop"
    """Ray loses its connection to a replica that lives (``ActorUnavailableError``, injected into a worker)"""
    CANCEL = "cancel"
    """an agent loop lets out the cancellation of something that it awaited"""


TITLES = {
    Kind.DRIVER: "recipe.partial_rollout.main_ppo",
    Kind.WORKER: _WORKER,
    Kind.ENGINE: "VLLM::EngineCore",
    Kind.NODE: "raylet/raylet",
    Kind.TRAINER: "ray::WorkerDict",
}
"""in the command line of the process that is killed"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a fault."""

    kind: Kind
    at: float
    """unix seconds"""
    ended: str | None
    """the line with which the training ended; None if it went on"""
    silent_s: float
    """seconds until a step ended that had not when the fault came, or the training did; 0 for a kill"""
    allowed_s: float
    """deadline, ``SLACK_S``, and the longest step so far"""

    @property
    def violation(self) -> str | None:
        """What is wrong with it."""
        if self.silent_s > self.allowed_s:
            return f"{self.kind}: nothing for {self.silent_s:.0f} s, where {self.allowed_s:.0f} s are allowed"
        # Without a driver nobody is left to say why.
        if self.ended is not None and "training failed: " not in self.ended and self.kind is not Kind.DRIVER:
            return f"{self.kind}: the training ended without a cause"
        return None


def inflict(kind: Kind, victim: Victim, run_dir: Path, orders: Path, deadline_s: float) -> Outcome:
    """Do ``kind`` to ``victim``, and see what becomes of it.

    Args:
        orders: directory that ``ORDERS`` names.
        deadline_s: ``partial_rollout.deadlines.interrupt_s`` of the training.
    """
    if kind is Kind.KILL:
        return Outcome(kind, victim.kill(), None, 0.0, SLACK_S)
    at, steps = time.time(), step_ends(run_dir, victim.started)
    longest = max((later - step for step, later in pairwise(steps)), default=60.0)
    allowed_s = deadline_s + SLACK_S + longest
    heals = _nothing
    if kind is Kind.STOP:
        heals = _stop_worker(victim, deadline_s + SLACK_S / 2)
    elif kind in TITLES:
        _process(victim, TITLES[kind]).kill()
    else:
        (orders / kind).touch()
    silent_s = _until(lambda: len(step_ends(run_dir, victim.started)) > len(steps), victim, 2 * allowed_s)
    heals()
    return Outcome(kind, at, victim.last_words, silent_s, allowed_s)


def step_ends(run_dir: Path, since: float) -> list[float]:
    """When each step ended since ``since`` (unix seconds), by the log's weight syncs."""
    syncs = (event for event in read_log(run_dir, []) if isinstance(event, Phase) and event.name == "sync")
    return [sync.end for sync in syncs if sync.end > since] if (run_dir / NAME).exists() else []


def _stop_worker(victim: Victim, seconds: float) -> Callable[[], None]:
    """Stop a worker; returns what lets it go on, which waits until ``seconds`` are over."""
    began, worker = time.monotonic(), _process(victim, _WORKER)
    worker.send_signal(signal.SIGSTOP)

    def go_on() -> None:
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        try:
            worker.send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            return

    return go_on


def _process(victim: Victim, title: str, within_s: float = 60.0) -> psutil.Process:
    """A process with this title, which may be starting.

    Raises:
        TimeoutError: there is none ``within_s``.
    """
    began = time.monotonic()
    while not (found := processes_of_session(victim.pid, title)):
        if time.monotonic() - began > within_s:
            raise TimeoutError(f"the training has no process {title!r} after {within_s:g} s")
        time.sleep(0.1)
    return found[0]


def _nothing() -> None:
    """There is nothing to undo."""


def _until(happened: Callable[[], bool], victim: Victim, patience_s: float) -> float:
    """Seconds until something ``happened``, or ``victim`` ended; at most ``patience_s``."""
    began = time.monotonic()
    while not happened() and victim.exit_code is None and time.monotonic() - began < patience_s:
        time.sleep(0.2)
    return time.monotonic() - began
