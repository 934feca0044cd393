"""How many of the decoded tokens outlived the kills, from the log that all lives of a run have written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recipe.partial_rollout.records.run_log import Begin, Event, Round
from recipe.partial_rollout.tools.reading.lineage import Lineage
from recipe.partial_rollout.tools.reading.run_log import read_log


@dataclass(frozen=True, slots=True)
class Survival:
    """Decoded tokens of a run that was killed, and what became of them."""

    logged: int
    """decoded in rounds that ended"""
    estimated: float
    """decoded in rounds that a kill cut off: their seconds at the run's own mean rate"""
    trained: int

    @property
    def decoded(self) -> float:
        return self.logged + self.estimated

    @property
    def share(self) -> float:
        """Of the decoded tokens, those that were trained in the end."""
        return self.trained / self.decoded if self.decoded else float("nan")


def survival(run_dir: Path, kills: list[float]) -> Survival:
    """Of the finished run in ``run_dir``, killed at ``kills`` (unix seconds).

    Raises:
        RunRecordError: its log cannot be read.
    """
    events = list(read_log(run_dir, []))
    lineage = Lineage[int](lambda round_: sum(group.tokens for group in round_.trained))
    for event in events:
        lineage.take(event)
    rounds = [event for event in events if isinstance(event, Round)]
    logged = sum(round_.phase.decoded_tokens for round_ in rounds)
    seconds = sum(round_.phase.seconds for round_ in rounds)
    rate = logged / seconds if seconds else 0.0
    return Survival(logged, rate * sum(_cut_off_s(events, kill) for kill in kills), sum(lineage.standing()))


def _cut_off_s(events: list[Event], kill: float) -> float:
    """Seconds from the start of the round that was open at ``kill``; 0 when none was."""
    begun = [event.start for event in events if isinstance(event, Begin) and event.start <= kill]
    if not begun:
        return 0.0
    last = begun[-1]
    phases = [event.phase for event in events if isinstance(event, Round)]
    ended = any(phase.start >= last - 1.0 and phase.end <= kill for phase in phases)
    return 0.0 if ended else kill - last
