"""Model of one replica of a continuous-batching engine: each step gives every running sample a token."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

from recipe.partial_rollout.tools.planner.engine_curve import EngineCurve


@dataclass(slots=True)
class Decoding:
    """A sample as the engine sees it."""

    id: str
    context: int
    """tokens in its context: prompt and response so far"""
    left: int
    """tokens that it has yet to decode"""


class ReplicaModel:
    """Decodes samples on one replica; the simulation calls it and decides up to which time. The KV cache never fills
    up.

    ``clock`` is the replica's own time in seconds.
    """

    def __init__(self, curve: EngineCurve) -> None:
        self._curve = curve
        self.clock = 0.0
        self._steps = 0
        self._base = 0
        """sum over running samples of (context at its start - step at its start), so that the tokens in all contexts
        are ``base + running * steps``"""
        self._ends: list[tuple[int, int, Decoding]] = []
        """heap of step at which a sample ends, its number, and the sample"""
        self._began: dict[str, int] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Number of its samples."""
        return len(self._began)

    @property
    def _context(self) -> int:
        return self._base + len(self._began) * self._steps

    def add(self, sample: Decoding, *, reads: bool = True) -> None:
        """Start ``sample``; with ``reads`` its context is prefilled first."""
        self.clock += self._curve.prefill_s * sample.context * reads
        self._began[sample.id] = self._steps
        self._base += sample.context - self._steps
        heapq.heappush(self._ends, (self._steps + sample.left, next(self._numbers), sample))

    def advance(self, clock: float) -> None:
        """Run the steps that begin before ``clock``, at most until a sample ends; then the clock is at least
        ``clock``."""
        if self._ends:
            self._run(min(self._steps_by(clock), self._until_end()))
        self.clock = max(self.clock, clock)

    def next_end(self) -> float:
        """Clock at which the next sample ends; infinity if it has none."""
        return self.clock + self._seconds(self._until_end()) if self._ends else math.inf

    def _until_end(self) -> int:
        return self._ends[0][0] - self._steps

    def run_to_end(self) -> list[str]:
        """Run until the next sample ends; returns the ids of those that end then."""
        self._run(self._until_end())
        ended = []
        while self._ends and self._ends[0][0] <= self._steps:
            ended.append(self._leave(heapq.heappop(self._ends)[2]).id)
        return ended

    def interrupt(self, clock: float) -> list[Decoding]:
        """Run whole steps until at least ``clock``, then return all samples; a step that has begun is completed."""
        self.advance(clock)
        given_back = [self._leave(sample) for _, _, sample in self._ends]
        self._ends.clear()
        return given_back

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
        """Seconds of the next ``steps`` steps; every context grows by a token a step."""
        running = len(self._began)
        growth = self._curve.context_s * running * steps * (steps - 1) / 2
        return steps * self._curve.decode_s(running, self._context) + growth

    def _steps_by(self, clock: float) -> int:
        """Number of steps that have begun by ``clock``."""
        if clock <= self.clock:
            return 0
        running = len(self._began)
        first, half = self._curve.decode_s(running, self._context), self._curve.context_s * running / 2
        seconds = clock - self.clock
        if half < 1e-15:
            return math.ceil(seconds / first)
        linear = first - half
        return math.ceil((-linear + math.sqrt(linear * linear + 4 * half * seconds)) / (2 * half))
