"""How many of the decoded tokens outlived the kills, from the trace that all lives of a run have written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    """Of the finished run in ``run_dir``, killed at ``kills`` (unix seconds)."""
    events = _events(run_dir / "trace.jsonl")
    rounds = [event for event in events if event["event"] == "round"]
    logged = sum(call[3] for event in rounds for call in event["calls"])
    seconds = sum(event["end"] - event["start"] for event in rounds)
    rate = logged / seconds if seconds else 0.0
    counted: dict[int, int] = {}
    for event in rounds:
        counted = {step: tokens for step, tokens in counted.items() if step < event["step"]}
        counted[event["step"]] = sum(group["tokens"] for group in event["trained"])
    return Survival(logged, rate * sum(_cut_off_s(events, kill) for kill in kills), sum(counted.values()))


def _cut_off_s(events: list[dict[str, Any]], kill: float) -> float:
    """Seconds from the start of the round that was open at ``kill``; 0 when none was."""
    begun = [event for event in events if event["event"] == "begin" and event["start"] <= kill]
    if not begun:
        return 0.0
    last = begun[-1]
    ended = any(e["event"] == "round" and e["start"] >= last["start"] - 1.0 and e["end"] <= kill for e in events)
    return 0.0 if ended else kill - last["start"]


def _events(path: Path) -> list[dict[str, Any]]:
    events = []
    for line in path.read_text().splitlines():
        try:
            events.append(json.loads(line))
        except ValueError:
            # A kill cuts the last line of a life off.
            continue
    return events
