"""Engine calls dealt to the phases in whose time they ran.

Under separate placement the engines do not stop when a batch is taken: the trace has a call with the round that saw it end,
and it may have begun many rounds before. What a phase's engines did is therefore in its own record and in later ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

from recipe.partial_rollout.records.engine_call import CallColumns, EngineCall
from recipe.partial_rollout.records.rollout_phase import RolloutPhase


def dealt(phases: Sequence[RolloutPhase]) -> list[RolloutPhase]:
    """The same spans, each with the parts of all calls that ran in it.

    A call that crosses an end is cut there, its tokens shared by time; what ran outside of all spans is left out. Only the
    last part of an interrupted call is interrupted, only the first has its ``resumed_tokens``; no part queues.

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
            resumed = call.resumed_tokens if start == begun else 0
            cut = {"interrupted": call.interrupted and last, "resumed_tokens": resumed}
            yield at, replace(call, start=start, end=end, tokens=tokens, queued_s=0.0, **cut)
            if last:
                return


def _made_by(call: EngineCall, moment: float) -> int:
    return round(call.tokens_within(call.busy_from, moment))
