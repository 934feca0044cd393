"""A Chrome trace of runs, for `ui.perfetto.dev` or `chrome://tracing` (the Trace Event Format, JSON object form).

A process is the driver of a run or one of its replicas, a thread a slot; under separate placement a replica's first thread
says when it decodes and when it is held. Threads of tools have the time of samples between two turns. An arrow leads from
an interrupted segment to the one that resumes its sample. Times are microseconds from each run's first round, so that runs
lie over each other.
"""

import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from recipe.partial_rollout.records.figures import running_curve
from recipe.partial_rollout.records.trace import PhaseName
from recipe.partial_rollout.tools.report.comparison import Comparison, Side
from recipe.partial_rollout.tools.report.lanes import lanes_of
from recipe.partial_rollout.tools.report.segments import Lane, Segments, segments_of
from recipe.partial_rollout.tools.run_record import RunRecord

Event = dict[str, Any]
ROUNDS, TRAINER, SYNC, STAGE, HOLD = range(1, 6)
"""Threads of a driver; the trainer's has waits, training and validation, which may contain a sync, and that the others."""
DRIVER_THREADS = {ROUNDS: "rounds", TRAINER: "trainer", SYNC: "weight sync"}
SEPARATE_THREADS = {STAGE: "staging weights", HOLD: "engines held"}
PHASE_THREADS: dict[str, int] = {
    PhaseName.SYNC: SYNC,
    PhaseName.STAGE: STAGE,
    PhaseName.HOLD: HOLD,
    PhaseName.FLUSH: HOLD,
}
"""Those that are not the trainer's."""
ENGINE = 1_000_000
TOOLS = 500_000
"""Threads of a replica, beside those of its slots, which count from 1: that of its engine, and the first of its tools."""


def write_chrome_trace(comparison: Comparison, path: Path) -> None:
    """Write the trace; compressed if the name ends with `.gz`, which Perfetto opens as it is."""
    text = json.dumps(chrome_trace(comparison), separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, compresslevel=4) if path.suffix == ".gz" else text)


def chrome_trace(comparison: Comparison) -> dict[str, Any]:
    """The trace; its events are in the order of their times, those that name processes and threads first."""
    names: list[Event] = []
    events: list[Event] = []
    pid, flows = 1, itertools.count(1)
    for side in comparison.sides:
        segments = segments_of(side.run)
        names += _names(side, segments, pid)
        events += [*_driver_events(side.run, pid), *_segment_events(side.run, segments, pid, flows)]
        events += [*_engine_events(side.run, pid), *_counters(side.run, pid)]
        pid += 1 + side.run.settings.replicas
    # Python's sort is stable: what begins and ends at one moment keeps its order.
    events.sort(key=lambda event: event["ts"])
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def _names(side: Side, segments: Segments, pid: int) -> Iterator[Event]:
    state = "" if side.run.settings.complete else " (not complete)"
    for process in range(1 + side.run.settings.replicas):
        name = f"{side.name}{state}: " + (f"replica {process - 1}" if process else "driver")
        yield _meta("process_name", pid + process, 0, name=name)
        yield _meta("process_sort_index", pid + process, 0, sort_index=pid + process)
    separate = side.run.settings.separate
    for thread, name in (DRIVER_THREADS | SEPARATE_THREADS if separate else DRIVER_THREADS).items():
        yield _meta("thread_name", pid, thread, name=name)
    for replica in range(side.run.settings.replicas if separate else 0):
        yield _meta("thread_name", pid + 1 + replica, ENGINE, name="engine")
        yield _meta("thread_sort_index", pid + 1 + replica, ENGINE, sort_index=0)
    for lane in segments.lanes:
        kind = "tools" if lane.tools else "slot"
        yield _meta("thread_name", pid + 1 + lane.replica, _thread(lane), name=f"{kind} {lane.slot}")


def _thread(lane: Lane) -> int:
    return lane.slot + (TOOLS if lane.tools else 1)


def _meta(kind: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _driver_events(run: RunRecord, pid: int) -> Iterator[Event]:
    origin = run.rounds[0].phase.start
    for round_ in run.rounds:
        start, end = _us(round_.phase.start - origin), _us(round_.phase.end - origin)
        args = {"version": round_.version, "carried_groups": round_.carried_groups, "lost_samples": round_.lost_samples}
        place = {"pid": pid, "tid": ROUNDS, "cat": "rollout"}
        yield {"ph": "X", "name": f"round {round_.step}", "ts": start, "dur": end - start, **place, "args": args}
        if round_.interrupt_s is not None:
            decided = max(start, end - _us(round_.interrupt_s))
            yield {"ph": "i", "name": "decided to interrupt", "ts": decided, "s": "p", **place}
    for phase in run.phases:
        if phase.start < origin:
            continue
        start, end = _us(phase.start - origin), _us(phase.end - origin)
        name = f"version {phase.step}" if phase.name == PhaseName.SYNC else f"{phase.name} {phase.step}"
        place = {"pid": pid, "tid": PHASE_THREADS.get(phase.name, TRAINER), "cat": phase.name}
        yield {"ph": "X", "name": name, "ts": start, "dur": end - start, **place}


def _engine_events(run: RunRecord, pid: int) -> Iterator[Event]:
    """Under separate placement: when each replica decodes, and when it is held."""
    if not run.settings.separate:
        return
    origin, lanes = run.rounds[0].phase.start, lanes_of(run)
    for replica, decoding in enumerate(lanes.decoding):
        place = {"pid": pid + 1 + replica, "tid": ENGINE, "cat": "engine"}
        for name, spans in (("decoding", decoding), ("held", lanes.held)):
            for start, end in ((_us(start - origin), _us(end - origin)) for start, end in spans):
                yield {"ph": "X", "name": name, "ts": start, "dur": end - start, **place}


def _segment_events(run: RunRecord, segments: Segments, pid: int, flows: Iterator[int]) -> Iterator[Event]:
    origin = run.rounds[0].phase.start
    starts, ends = (
        np.maximum(np.rint((side - origin) * 1e6), 0).astype(int) for side in (segments.start, segments.end)
    )
    lanes = [segments.lanes[lane] for lane in segments.lane.tolist()]
    places = [{"pid": pid + 1 + lane.replica, "tid": _thread(lane)} for lane in lanes]
    columns = zip(
        starts.tolist(), ends.tolist(), segments.tokens.tolist(), segments.version.tolist(),
        segments.interrupted.tolist(), segments.sample.tolist(), lanes, places, strict=True,
    )  # fmt: skip
    for start, end, tokens, version, interrupted, sample, lane, place in columns:
        name, cat = segments.samples[sample] or "sample", "segment"
        args = {"tokens": tokens, "version": version}
        if lane.tools:
            # Viewers give each name a colour.
            name, cat, args = "tools", "tools", {"sample": name}
        yield {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start, **place, "args": args}
        if interrupted:
            yield {"ph": "i", "name": "interrupted", "cat": "segment", "ts": end, "s": "t", **place}
    for cut, resumed in segments.resumptions():
        flow = {"name": "resumes", "cat": "resumption", "id": next(flows)}
        # An arrow starts in the segment that encloses its time, so just before its end.
        leaves = max(int(starts[cut]), int(ends[cut]) - 1)
        yield {"ph": "s", "ts": leaves, **flow, **places[cut]}
        yield {"ph": "f", "bp": "e", "ts": max(leaves, int(starts[resumed])), **flow, **places[resumed]}


def _counters(run: RunRecord, pid: int) -> Iterator[Event]:
    """Running samples of each replica, and the staleness of each trained batch."""
    origin, replicas = run.rounds[0].phase.start, run.settings.replicas
    for step, phase in zip(run.steps, run.decoding, strict=True):
        curve = running_curve(phase, replicas)
        times = np.maximum(np.rint((curve.times - origin) * 1e6), 0).astype(int).tolist()
        for replica in range(replicas):
            running = curve.running[replica]
            changed = np.flatnonzero(np.diff(running, prepend=-1))
            for i in changed.tolist():
                yield _counter("running samples", pid + 1 + replica, times[i], running=round(float(running[i])))
        if ages := step.staleness:
            at = _us(step.round.phase.end - origin)
            yield _counter("staleness", pid, at, mean=sum(ages) / len(ages), max=max(ages))


def _counter(name: str, pid: int, ts: int, **values: float) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": ts, "args": values}


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))
