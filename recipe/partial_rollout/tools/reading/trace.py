"""``run.json`` and ``trace.jsonl``, read back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from recipe.partial_rollout.records.calls import EngineCall, RolloutPhase
from recipe.partial_rollout.records.jsonl import Checkpoint, Resumed
from recipe.partial_rollout.records.trace import RUN, Phase, RoundRecord, RunSettings, TraceEvent
from recipe.partial_rollout.records.trained_group import IN_TRACE, TrainedGroup
from recipe.partial_rollout.tools.reading.columns import CallColumns, GroupColumns
from recipe.partial_rollout.tools.reading.lineage import Lineage
from recipe.partial_rollout.tools.reading.lines import Fields, RunRecordError, iter_lines, kinds_of, read_object

T = TypeVar("T")
_KINDS = kinds_of(TraceEvent)


def read_settings(directory: Path) -> RunSettings:
    """``run.json`` in the run's directory.

    Raises:
        RunRecordError: the file cannot be read, or a field is missing, mistyped or out of range; names it.
    """
    return read_object(directory / RUN).read(RunSettings)


def iter_trace(path: Path, replicas: int | None = None, warnings: list[str] | None = None) -> Iterator[TraceEvent]:
    """The events, one at a time.

    Args:
        replicas: number of the run's replicas, to check its calls; None: any.
        warnings: gets a line for each line that a dying process left torn.

    Raises:
        RunRecordError: the file is missing, or a line is not an event; names it.
    """
    for line in iter_lines(path, [] if warnings is None else warnings, restarts=(Resumed.EVENT,)):
        if (event := event_of(line, replicas)) is not None:
            yield event


def lineage(events: Iterable[TraceEvent], keep: Callable[[RoundRecord], T]) -> Lineage[T]:
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
        if isinstance(event, RoundRecord):
            found.add(event.step, keep(event))
        elif isinstance(event, Checkpoint):
            found.checkpoint(event.step)
    return found


def event_of(line: Fields, replicas: int | None) -> TraceEvent | None:
    """The inverse of ``to_json``; None for an event of another version of the recipe.

    Args:
        replicas: number of the run's replicas, to check its calls; None: any.

    Raises:
        RunRecordError: a field is missing, mistyped or impossible; names the line.
    """
    kind = _KINDS.get(line.get("event", str))
    if kind is None:
        return None
    if kind is RoundRecord:
        return round_of(line, replicas)
    if kind is Phase:
        line.span()
    return line.read(kind)


def round_of(line: Fields, replicas: int | None) -> RoundRecord:
    """The inverse of ``RoundRecord.to_json``; ``replicas`` is the number of the run's replicas (None: any).

    Raises:
        RunRecordError: a field is missing, mistyped or impossible; names the line.
    """
    span, rows = line.span(), line.get("calls", list)
    phase = RolloutPhase(*span, CallColumns(call_of(values, line.place, replicas) for values in rows))
    trained = GroupColumns(map(trained_of, line.objects("trained")))
    return line.read(RoundRecord, phase=phase, trained=trained, at=line.at)


def call_of(values: object, place: str, replicas: int | None) -> EngineCall:
    """The inverse of ``EngineCall.to_json``.

    Args:
        place: of the row, for the error. replicas: number of the run's replicas; None if any index is valid.

    Raises:
        RunRecordError: ``values`` is not such a row, or names a replica that the run does not have.
    """
    match values:
        case [
            int(replica),
            int() | float() as start,
            int() | float() as end,
            int(tokens),
            int(version),
            int(resumed),
            int() | None as context,
            int() | float() as queued_s,
            str(sample),
            bool(interrupted),
            int(earlier),
            int() | float() as waited_s,
        ]:
            if replica < 0 or (replicas is not None and replica >= replicas):
                raise RunRecordError(f"{place}: a call names replica {replica}, but run.json says {replicas} replicas")
            if end < start:
                raise RunRecordError(f"{place}: a call ends ({end}) before it starts ({start})")
            spent = float(start), float(end), tokens, version, resumed, context, queued_s
            return EngineCall(replica, *spent, sample, interrupted, earlier, waited_s)
    raise RunRecordError(
        f"{place}: a call should be [replica, start, end, tokens, version, resumed tokens, context tokens, "
        f"queued seconds, sample, interrupted, earlier tokens, waited seconds], got {values!r:.60}"
    )


def trained_of(fields: Fields) -> TrainedGroup:
    """The inverse of ``TrainedGroup.to_trace``.

    Raises:
        RunRecordError: a field is missing or of another type, or lists differ in length.
    """
    group = fields.read(TrainedGroup, IN_TRACE)
    if not len(group.lengths) == len(group.staleness) == len(group.segments):
        raise RunRecordError(
            f"{fields.place}: group {group.order} has lists of different lengths, one entry a sample each"
        )
    return group
