"""One run, read back from its directory.

A step counts if it has both its round (``trace.jsonl``) and its timers (``metrics.jsonl``): a run that crashed between
the two has not trained that step. If a resumed run repeats steps, the last attempt counts. A warning names everything
that is left out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from recipe.partial_rollout.records.calls import EngineCall, RolloutPhase
from recipe.partial_rollout.records.jsonl import METRICS
from recipe.partial_rollout.records.trace import TRACE, Phase, RoundRecord, RunSettings, TraceEvent
from recipe.partial_rollout.records.trained_group import TrainedGroup
from recipe.partial_rollout.tools.reading.columns import CallColumns, GroupColumns
from recipe.partial_rollout.tools.reading.lines import RunRecordError, read_lines
from recipe.partial_rollout.tools.reading.trace import iter_trace, lineage, read_settings


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One line: a training step, or the validation before the first step."""

    step: int
    values: dict[str, float] = field(repr=False)
    """metrics by verl's key; NaN, which verl logs as null, is left out"""

    @property
    def trained(self) -> bool:
        """Whether it is a training step."""
        return "training/global_step" in self.values


def read_metrics(path: Path) -> tuple[list[StepMetrics], list[str]]:
    """The lines in order, and a warning if the last one is torn.

    Raises:
        RunRecordError: the file cannot be read, or a line holds no metrics; names it.
    """
    lines, warnings = read_lines(path)
    found = []
    for line in lines:
        data = line.values.get("data")
        if not isinstance(data, dict):
            raise RunRecordError(
                f"{line.place}: 'data' is missing; it should hold the metrics that verl's file logger writes"
            )
        numbers = {key: float(value) for key, value in data.items() if isinstance(value, int | float)}
        found.append(StepMetrics(line.get("step", int), numbers))
    return found, warnings


CLOCK_TOLERANCE = 0.05
"""verl's rollout timer and the trace may differ by this share before the report warns."""


@dataclass(frozen=True, slots=True)
class Step:
    """One training step: its round and what verl logged for it."""

    round: RoundRecord
    metrics: dict[str, float] = field(repr=False)

    @property
    def number(self) -> int:
        return self.round.step

    def seconds(self, phase: str) -> float:
        """verl's timer of that name; 0 if the step has no such phase."""
        return self.metrics.get(f"timing_s/{phase}", 0.0)

    @property
    def lengths(self) -> list[int]:
        """[trained sample]"""
        return [length for group in self.round.trained for length in group.lengths]

    @property
    def staleness(self) -> list[int]:
        """[trained sample]"""
        return [age for group in self.round.trained for age in group.staleness]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run. ``steps`` are ascending, at least one, each number once."""

    directory: str
    settings: RunSettings
    steps: list[Step]
    phases: list[Phase]
    warnings: list[str]

    @property
    def rounds(self) -> list[RoundRecord]:
        return [step.round for step in self.steps]

    @property
    def decoding(self) -> list[RolloutPhase]:
        """[step] what the engines ran in the span of each round; computed anew each time."""
        phases = [round_.phase for round_ in self.rounds]
        return dealt(phases) if self.settings.separate else phases

    @property
    def trained_groups(self) -> Sequence[TrainedGroup]:
        """Groups in training order."""
        return GroupColumns(group for step in self.steps for group in step.round.trained)


def dealt(phases: Sequence[RolloutPhase]) -> list[RolloutPhase]:
    """The same spans, each with the parts of all calls that ran in it.

    A call that crosses an end is cut there, its tokens shared by time; what ran outside of all spans is left out. Only the
    last part of an interrupted call is interrupted, only the first waited and read tokens again; no part queues.

    Args:
        phases: by start; they do not overlap.

    >>> long = EngineCall(0, start=2.0, end=12.0, tokens=100, version=1)
    >>> first, second = dealt([RolloutPhase(0.0, 10.0, ()), RolloutPhase(10.0, 20.0, (long,))])
    >>> [(call.start, call.end, call.tokens) for call in (*first.calls, *second.calls)]
    [(2.0, 10.0, 80), (10.0, 12.0, 20)]
    """
    starts = [phase.start for phase in phases]
    parts = [CallColumns() for _ in phases]
    for phase in phases:
        for call in phase.calls:
            for at, part in _cut(call, phases, max(0, bisect_right(starts, call.busy_from) - 1)):
                parts[at].append(part)
    return [replace(phase, calls=calls) for phase, calls in zip(phases, parts, strict=True)]


def _cut(call: EngineCall, phases: Sequence[RolloutPhase], first: int) -> Iterator[tuple[int, EngineCall]]:
    """The parts of ``call``, each with the index of its phase, from phase ``first`` on."""
    begun = call.busy_from
    for at in range(first, len(phases)):
        start, end = max(begun, phases[at].start), min(call.end, phases[at].end)
        if start > call.end:
            return
        if end > start or begun == call.end == start:
            last = end == call.end
            # Rounded at the cuts, so that the parts of a call add up to it.
            tokens = _made_by(call, end) - _made_by(call, start) if call.end > begun else call.tokens
            # What it waited for and read again came before its first part.
            rest = {"resumed_tokens": 0, "earlier_tokens": 0, "waited_s": 0.0}
            before = {"waited_s": call.waited_s + call.queued_s} if start == begun else rest
            cut = {"interrupted": call.interrupted and last, "queued_s": 0.0, **before}
            yield at, replace(call, start=start, end=end, tokens=tokens, **cut)
            if last:
                return


def _made_by(call: EngineCall, moment: float) -> int:
    return round(call.tokens_within(call.busy_from, moment))


def load_run(directory: Path) -> RunRecord:
    """The run in ``directory``.

    Raises:
        RunRecordError: a file is missing or cannot be read, or no step is complete; names the file and line.
    """
    if not directory.is_dir():
        raise RunRecordError(
            f"{directory}: no such directory; give the directory that a run wrote (trainer.default_local_dir)"
        )
    settings = read_settings(directory)
    trace = directory / TRACE
    warnings: list[str] = []
    phases: list[Phase] = []
    rounds, repeated = last_attempts(_split(iter_trace(trace, settings.replicas, warnings), phases))
    if repeated:
        warnings.append(f"{trace}: steps {_ranges(repeated)} were begun again (a resumed run); the last attempt counts")
    metrics, metric_warnings = _read_metrics(directory / METRICS)
    steps, join_warnings = _join(directory, rounds, metrics)
    warnings += metric_warnings + join_warnings
    if not settings.separate:
        # There verl's timer is the trainer's wait, and the rounds cover the run.
        warnings += _clock_warnings(directory, steps)
    return RunRecord(
        str(directory),
        settings,
        steps,
        phases,
        warnings,
    )


def _split(events: Iterable[TraceEvent], phases: list[Phase]) -> Iterator[TraceEvent]:
    """Passes the events on, and keeps the phases in ``phases``."""
    for event in events:
        if isinstance(event, Phase):
            phases.append(event)
        yield event


def last_attempts(events: Iterable[TraceEvent]) -> tuple[list[RoundRecord], set[int]]:
    """The rounds that count, of all that the run's processes played, and the steps that were begun again.

    Where a trace does not say where it was resumed, a round undoes earlier rounds of its own step and of later ones.
    """
    rounds = lineage(events, keep=lambda round_: round_)
    kept: list[RoundRecord] = []
    for round_ in rounds.standing():
        while kept and kept[-1].step >= round_.step:
            kept.pop()
        kept.append(round_)
    undone = Counter(round_.step for round_ in rounds.all()) - Counter(round_.step for round_ in kept)
    return kept, set(undone)


def _read_metrics(path: Path) -> tuple[dict[int, dict[str, float]], list[str]]:
    """Metrics by step; later lines override earlier ones, as a step may be validated again by a resumed run."""
    metrics: dict[int, dict[str, float]] = {}
    lines, warnings = read_metrics(path)
    for line in lines:
        metrics.setdefault(line.step, {}).update(line.values)
    return metrics, warnings


def _join(
    directory: Path, rounds: list[RoundRecord], metrics: dict[int, dict[str, float]]
) -> tuple[list[Step], list[str]]:
    timed = {step for step, values in metrics.items() if "timing_s/step" in values}
    steps = [Step(round_, metrics[round_.step]) for round_ in rounds if round_.step in timed]
    if not steps:
        raise RunRecordError(
            f"{directory}: no step has both a round in trace.jsonl and timing_s/step in metrics.jsonl; "
            "let the run finish a step, and keep 'file' in trainer.logger"
        )
    traced = {round_.step for round_ in rounds}
    warnings = []
    if untimed := traced - timed:
        warnings.append(f"{directory}: steps {_ranges(untimed)} have a round but no timers in metrics.jsonl; left out")
    if untraced := timed - traced:
        warnings.append(f"{directory}: steps {_ranges(untraced)} have timers but no round in trace.jsonl; left out")
    return steps, warnings


def _clock_warnings(directory: Path, steps: list[Step]) -> list[str]:
    timer = sum(step.seconds("gen") for step in steps)
    traced = sum(step.round.phase.seconds for step in steps)
    if abs(timer - traced) <= CLOCK_TOLERANCE * max(timer, traced):
        return []
    return [f"{directory}: timing_s/gen adds up to {timer:,.1f} s but the rounds of trace.jsonl to {traced:,.1f} s"]


def _ranges(numbers: set[int]) -> str:
    """{1, 2, 3, 7} as '1-3, 7'."""
    ends: list[list[int]] = []
    for number in sorted(numbers):
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ends)
