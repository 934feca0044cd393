"""One replica of a continuous-batching engine: samples run, each step gives every one of them a token."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from recipe.partial_rollout.planner.engine_curve import EngineCurve


@dataclass(slots=True)
class Decoding:
    """A sample as the engine sees it."""

    id: str
    context: int
    """tokens that its next step reads: prompt and response so far"""
    left: int
    """tokens that it has yet to decode"""
    order: int = 0
    """of dispatch: the last one makes room where KV blocks run out"""


class ReplicaModel:
    """Runs samples between events; the simulation tells it how far to go.

    Time passes within a replica alone, ``clock`` seconds of it; ``steps`` counts its decoding steps.
    """

    def __init__(self, curve: EngineCurve) -> None:
        self._curve = curve
        self.clock = 0.0
        self._steps = 0
        self._base = 0
        """contexts of the running samples, less the steps at which each began: context now = base + running * steps"""
        self._ends: list[tuple[int, int, Decoding]] = []
        self._began: dict[str, int] = {}
        self._queued: deque[tuple[Decoding, bool]] = deque()
        """with whether its context must be read"""
        self._order = 0

    def __len__(self) -> int:
        """Samples that it has, running or queued for want of KV blocks."""
        return len(self._began) + len(self._queued)

    @property
    def _context(self) -> int:
        return self._base + len(self._began) * self._steps

    def add(self, sample: Decoding, *, reads: bool = True) -> None:
        """Start ``sample`` when its context fits; ``reads``: its context must be prefilled first."""
        self._queued.append((sample, reads))
        self._start_queued()

    def advance(self, clock: float) -> None:
        """Run the steps that have begun by ``clock``."""
        if self._ends:
            self._run(min(self._steps_by(clock), self._until_event()))
        self.clock = max(self.clock, clock)

    def _start_queued(self) -> None:
        room = self._curve.kv_tokens
        while self._queued:
            sample, reads = self._queued[0]
            # A sample alone always runs: an engine can hold at least one. Others need room for a step of all of them.
            running = len(self._began)
            if room is not None and running and self._context + sample.context + running + 1 > room:
                return
            self._queued.popleft()
            self.clock += self._curve.prefill_s * sample.context * reads
            self._order += 1
            self._began[sample.id] = self._steps
            self._base += sample.context - self._steps
            heapq.heappush(self._ends, (self._steps + sample.left, self._order, sample))

    def next_end(self) -> float:
        """Clock at which the next sample ends, or KV blocks run out; infinity when it has nothing to do."""
        return self.clock + self._seconds(self._until_event()) if self._ends else math.inf

    def _until_event(self) -> int:
        to_end = self._ends[0][0] - self._steps
        room = self._curve.kv_tokens
        if room is None or len(self._began) < 2:
            return to_end
        return min(to_end, max(0, (room - self._context) // len(self._began)))

    def run_to_event(self) -> list[str]:
        """Run until the next sample ends; the ids of those that end there, or none when one had to make room."""
        self._run(self._until_event())
        ended = []
        while self._ends and self._ends[0][0] <= self._steps:
            ended.append(self._leave(heapq.heappop(self._ends)[2]).id)
        if not ended:
            self._preempt()
        self._start_queued()
        return ended

    def interrupt(self, clock: float) -> list[Decoding]:
        """Run whole steps until ``clock`` at least, then give everything back; the step that runs is let end."""
        self.advance(clock)
        given_back = [*(self._leave(sample) for _, _, sample in self._ends), *(sample for sample, _ in self._queued)]
        self._ends.clear()
        self._queued.clear()
        return given_back

    def _preempt(self) -> None:
        """What was dispatched last goes back to the queue, and its context is read again later."""
        last = max(self._ends, key=lambda end: (end[2].order, end[1]))
        self._ends.remove(last)
        heapq.heapify(self._ends)
        self._queued.appendleft((self._leave(last[2]), True))

    def _leave(self, sample: Decoding) -> Decoding:
        began = self._began.pop(sample.id)
        self._base -= sample.context - began
        made = self._steps - began
        sample.context += made
        sample.left -= made
        return sample

    def _run(self, steps: int) -> None:
        self.clock += self._seconds(steps)
        self._steps += steps

    def _seconds(self, steps: int) -> float:
        """Of the next ``steps`` steps, in which every context grows by a token a step."""
        running = len(self._began)
        growth = self._curve.context_s * running * steps * (steps - 1) / 2
        return steps * self._curve.decode_s(running, self._context) + growth

    def _steps_by(self, clock: float) -> int:
        """Steps that have begun by ``clock``."""
        if clock <= self.clock:
            return 0
        running = len(self._began)
        first, half = self._curve.decode_s(running, self._context), self._curve.context_s * running / 2
        seconds = clock - self.clock
        if half < 1e-15:
            return math.ceil(seconds / first)
        linear = first - half
        return math.ceil((-linear + math.sqrt(linear * linear + 4 * half * seconds)) / (2 * half))
