"""``trace.jsonl``: what each round of a run cost, and what it trained. The report and the audit read it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from recipe.partial_rollout.records.engine_call import CallTotals
from recipe.partial_rollout.records.fields import Fields
from recipe.partial_rollout.records.jsonl import JsonLines, iter_lines
from recipe.partial_rollout.records.lineage import Checkpoint, Lineage, Resumed
from recipe.partial_rollout.records.rollout_phase import RolloutPhase
from recipe.partial_rollout.records.round import Round
from recipe.partial_rollout.records.run_settings import RunSettings
from recipe.partial_rollout.records.running_curve import slot_seconds
from recipe.partial_rollout.records.trace_events import Begin, Phase, Probe, Thinned

NAME = "trace.jsonl"
T = TypeVar("T")
TraceEvent = Thinned | Probe | Begin | Round | Phase | Checkpoint | Resumed


class RunTrace:
    """Appends to the trace of one run directory, and keeps its ``run.json``.

    Args:
        directory: of the run; created if missing.
        replicas: server ids, in replica order; a call is noted under its replica's index.
        resumed_step: the step that the run continues from; events of later steps are undone (0: all of them).
        append: to the trace of an earlier run in the directory, instead of starting it over.
        every: steps from one round whose calls are kept to the next (``partial_rollout.dashboard.trace_every``).
    """

    def __init__(
        self,
        directory: Path,
        replicas: list[str],
        run: RunSettings,
        resumed_step: int = 0,
        *,
        append: bool = False,
        every: int = 1,
    ) -> None:
        self._directory, self._run, self._every = directory, run, every
        self._index: dict[str | int, int] = {address: i for i, address in enumerate(replicas)}
        self._lines = JsonLines(directory / NAME, append=append)
        self.last_round: Round | None = None
        """the round noted last, its replicas by index, with all its calls"""
        self._run.write(directory)
        if self._lines.continues:
            self._lines.add(to_json(Resumed(resumed_step)))
        if every > 1:
            self._lines.add(to_json(Thinned(every)))

    def use_replicas(self, replicas: list[str]) -> None:
        """From here on the replicas have these server ids, in replica order."""
        self._index.update({address: i for i, address in enumerate(replicas)})

    def complete(self) -> None:
        """Note that the training reached its last step."""
        self._run = replace(self._run, complete=True)
        self._run.write(self._directory)

    def probe(self, start: float, end: float, tokens: int, concurrency: int) -> None:
        """Note a probe: the engines ran ``concurrency`` samples throughout."""
        rate = tokens / (end - start)
        span = {"start": start, "end": end, "tokens": tokens}
        self._lines.add({"event": Probe.EVENT, **span, "tokens_per_s": rate, "concurrency": concurrency})

    def begin(self, step: int) -> None:
        """The rollout of ``step`` begins."""
        self._lines.add(to_json(Begin(step, time.time())))

    def round(self, round_: Round) -> None:
        """Note one rollout phase and what it trains; the trace must know the replicas of its calls."""
        calls = tuple(replace(call, replica=self._index[call.replica]) for call in round_.phase.calls)
        phase = replace(round_.phase, calls=calls)
        self.last_round = replace(round_, phase=phase)
        if self._every > 1:
            kept = calls if (round_.step - 1) % self._every == 0 else ()
            round_ = replace(round_, phase=replace(phase, calls=kept, totals=self._totals(phase)))
        else:
            round_ = self.last_round
        self._lines.add(to_json(round_))

    def _totals(self, phase: RolloutPhase) -> CallTotals:
        if self._run.separate:
            # Calls outlast their rounds: those that ended in it count whole.
            slot_s = sum(call.end - call.busy_from for call in phase.calls)
        else:
            slot_s = slot_seconds(phase, self._run.full_concurrency)
        return CallTotals.of(phase.calls, self._run.replicas, slot_s)

    def phase(self, name: str, step: int, start: float, end: float) -> None:
        """Note a phase that is not a rollout; ``name`` is a ``PhaseName``."""
        self._lines.add(to_json(Phase(name, step, start, end)))

    def checkpoint(self, step: int) -> None:
        """Note that the checkpoint of ``step`` is whole, and sync every line to disk."""
        self._lines.add(to_json(Checkpoint(step)))
        self._lines.sync()


def iter_trace(path: Path, replicas: int | None = None, warnings: list[str] | None = None) -> Iterator[TraceEvent]:
    """The events, one at a time.

    Args:
        replicas: number of the run's replicas, to check its calls; None: any.
        warnings: gets a line for each line that a dying process left torn.

    Raises:
        RunRecordError: the file is missing, or a line is not an event; names it.
    """
    for line in iter_lines(path, [] if warnings is None else warnings, restarts=(Resumed.EVENT,)):
        if (event := from_json(line, replicas)) is not None:
            yield event


def lineage(events: Iterable[TraceEvent], keep: Callable[[Round], T]) -> Lineage[T]:
    """What to ``keep`` of each round. A resume undoes rounds only once its process has added something."""
    found: Lineage[T] = Lineage()
    resumed: int | None = None
    for event in events:
        if isinstance(event, Resumed):
            resumed = event.step
            continue
        if resumed is not None:
            found.resume(resumed)
            resumed = None
        if isinstance(event, Round):
            found.add(event.step, keep(event))
        elif isinstance(event, Checkpoint):
            found.checkpoint(event.step)
    return found


def to_json(event: Thinned | Begin | Round | Phase | Checkpoint | Resumed) -> dict[str, Any]:
    """The event's line."""
    return {"event": event.EVENT, **(event.to_json() if isinstance(event, Round) else asdict(event))}


def from_json(line: Fields, replicas: int | None) -> TraceEvent | None:
    """The inverse of ``to_json``; None for an event of another version of the recipe.

    Args:
        replicas: number of the run's replicas, to check its calls; None: any.

    Raises:
        RunRecordError: a field is missing, mistyped or impossible; names the line.
    """
    match line.text("event"):
        case Probe.EVENT:
            return Probe(line.number("tokens_per_s"), line.integer("concurrency"))
        case Begin.EVENT:
            return Begin(line.integer("step"), line.number("start"))
        case Round.EVENT:
            return Round.from_json(line, replicas)
        case Phase.EVENT:
            return Phase(line.text("name"), line.integer("step"), *line.span())
        case Thinned.EVENT:
            return Thinned(line.integer("every", least=1))
        case Checkpoint.EVENT:
            return Checkpoint(line.integer("step"))
        case Resumed.EVENT:
            return Resumed(line.integer("step"))
    return None
