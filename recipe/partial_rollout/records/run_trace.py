"""``trace.jsonl``: what each round of a run cost, and what it trained. The report and the audit read it."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from recipe.partial_rollout.records.fields import Fields
from recipe.partial_rollout.records.jsonl import JsonLines, read_lines
from recipe.partial_rollout.records.resumed import Resumed
from recipe.partial_rollout.records.round import Round
from recipe.partial_rollout.records.run_settings import RunSettings
from recipe.partial_rollout.records.trace_events import Begin, Phase, Probe

NAME = "trace.jsonl"
TraceEvent = Probe | Begin | Round | Phase | Resumed


class RunTrace:
    """Appends to the trace of one run directory, and keeps its ``run.json``.

    Args:
        directory: of the run; created if missing.
        replicas: server ids, in replica order; a call is noted under its replica's index.
        resumed_step: the step that the run continues from; events of later steps are undone (0: all of them).
        append: to the trace of an earlier run in the directory, instead of starting it over.
    """

    def __init__(
        self,
        directory: Path,
        replicas: list[str],
        run: RunSettings,
        resumed_step: int = 0,
        *,
        append: bool = False,
    ) -> None:
        self._directory, self._run = directory, run
        self._index: dict[str | int, int] = {address: i for i, address in enumerate(replicas)}
        self._lines = JsonLines(directory / NAME, append=append)
        self.last_round: Round | None = None
        """the round noted last, its replicas by index"""
        self._run.write(directory)
        if self._lines.continues:
            self._lines.add(to_json(Resumed(resumed_step)))

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
        self.last_round = replace(round_, phase=replace(round_.phase, calls=calls))
        self._lines.add(to_json(self.last_round))

    def phase(self, name: str, step: int, start: float, end: float) -> None:
        """Note a phase that is not a rollout; ``name`` is a ``PhaseName``."""
        self._lines.add(to_json(Phase(name, step, start, end)))

    def sync(self) -> None:
        """Sync every line to disk."""
        self._lines.sync()


def read_trace(path: Path, replicas: int | None = None) -> tuple[list[TraceEvent], list[str]]:
    """The events, and a warning for each line that a dying process left torn.

    Args:
        replicas: number of the run's replicas, to check its calls; None: any.

    Raises:
        RunRecordError: the file is missing, or a line is not an event; names it.
    """
    lines, warnings = read_lines(path, restarts=(Resumed.EVENT,))
    events = [from_json(line, replicas) for line in lines]
    return [event for event in events if event is not None], warnings


def to_json(event: Begin | Round | Phase | Resumed) -> dict[str, Any]:
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
        case Resumed.EVENT:
            return Resumed(line.integer("step"))
    return None
