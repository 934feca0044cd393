"""``python -m recipe.partial_rollout.audit RUN_DIR``: was every prompt trained once, in time and whole?

Reads ``ledger.jsonl`` and nothing else. Exit code 0: no violation; 1: violations, one line each; 2: unreadable.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe.partial_rollout.ledger import NAME, Event, LedgerError, RunSizes, read_ledger

_SHOWN = 20
_PARTS = ("tokens", "log-probs", "versions", "mask entries")


@dataclass(frozen=True, slots=True)
class _Trained:
    """A group that counts: no resume has undone it."""

    step: int
    version: int
    max_staleness: int
    """in force when it was trained"""
    samples_per_group: int
    group: dict[str, Any]


@dataclass(slots=True)
class Audit:
    """What the ledger says, after its resumes have undone what they undo."""

    sizes: RunSizes | None = None
    offered: int = 0
    """prompts that any process of the training might admit"""
    admitted: list[tuple[int, str]] = field(default_factory=list)
    """step and uid"""
    trained: list[_Trained] = field(default_factory=list)
    complete: bool = False
    ended_on_purpose: bool = True
    resumes: int = 0
    kills: int = 0
    undone: int = 0
    """trained groups that a resume has undone"""
    violations: list[str] = field(default_factory=list)
    lost: int = 0
    repeated: int = 0

    # -- reading ---------------------------------------------------------------------------------------------------

    def book(self, event: dict[str, Any]) -> None:
        """Take the next event of the ledger."""
        kind = event["event"]
        if self.sizes is None and kind != Event.RUN:
            raise LedgerError(f"the first event is {kind}: a ledger begins with {Event.RUN}")
        if kind == Event.RUN:
            self._book_run(event)
        elif kind == Event.RESUMED:
            self._book_resumed(event["step"])
        elif kind == Event.ADMITTED:
            self.admitted += [(event["step"], uid) for uid in event["uids"]]
        elif kind == Event.TRAINED:
            self._book_trained(event)
        elif kind in (Event.STOPPED, Event.COMPLETE):
            self.ended_on_purpose = True
            self.complete = kind == Event.COMPLETE

    def _book_run(self, event: dict[str, Any]) -> None:
        sizes = RunSizes.of(event)
        before = self.sizes
        if before is not None:
            self.kills += not self.ended_on_purpose
            for key in ("arm", "samples_per_group", "batch_groups", "epoch_prompts"):
                if getattr(sizes, key) != getattr(before, key):
                    change = f"{getattr(before, key)} to {getattr(sizes, key)}"
                    self.violations.append(f"a resumed run changed {key} from {change}")
        self.sizes, self.ended_on_purpose = sizes, False
        self.offered = max(self.offered, sizes.offered, sizes.total)

    def _book_resumed(self, step: int) -> None:
        self.resumes += 1
        self.complete = False
        self.admitted = [row for row in self.admitted if row[0] <= step]
        kept = [row for row in self.trained if row.step <= step]
        self.undone += len(self.trained) - len(kept)
        self.trained = kept

    def _book_trained(self, event: dict[str, Any]) -> None:
        assert self.sizes is not None
        sizes = self.sizes
        self.trained += [
            _Trained(event["step"], event["version"], sizes.max_staleness, sizes.samples_per_group, group)
            for group in event["groups"]
        ]

    # -- judging ---------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """Fill in the violations."""
        self._judge_prompts()
        for row in self.trained:
            self._judge_group(row)

    def _judge_prompts(self) -> None:
        assert self.sizes is not None
        times = Counter(row.group["uid"] for row in self.trained)
        admitted = Counter(uid for _, uid in self.admitted)
        due = [self.uid(i) for i in range(self.offered)]
        known = set(due)
        for uid in sorted((uid for uid in times if times[uid] > 1), key=_position):
            steps = ", ".join(str(row.step) for row in self.trained if row.group["uid"] == uid)
            self.violations.append(f"prompt {uid} was trained {times[uid]} times: in steps {steps}")
            self.repeated += 1
        for uid in sorted(times, key=_position):
            if uid not in known:
                self.violations.append(f"prompt {uid} was trained: the training has no such prompt")
            elif not admitted[uid]:
                self.violations.append(f"prompt {uid} was trained and never admitted")
        self._judge_holes(set(admitted) | set(times))
        self._judge_lost([uid for uid in (due[: self.sizes.total] if self.drained else admitted) if not times[uid]])
        if self.complete and not self.drained and len(times) < self.sizes.total:
            self.violations.append(f"the training is complete with {len(times)} prompts trained of {self.sizes.total}")

    def _judge_holes(self, seen: set[str]) -> None:
        """Prompts are admitted in order: one that was passed over is not coming."""
        assert self.sizes is not None
        if self.drained:
            return
        last = max((i for i in range(self.offered) if self.uid(i) in seen), default=-1)
        for uid in (self.uid(i) for i in range(last)):
            if uid not in seen:
                self.violations.append(f"prompt {uid} was lost: later ones were admitted, it was not")
                self.lost += 1

    def _judge_lost(self, untrained: list[str]) -> None:
        """While a training goes on, or where it does not drain, prompts may be in flight: as many as admission allows."""
        assert self.sizes is not None
        in_flight = 0 if self.drained else (1 + self.sizes.max_staleness) * self.sizes.batch_groups
        if len(untrained) <= in_flight:
            return
        self.lost += len(untrained) - in_flight
        if self.drained:
            self.violations += [f"prompt {uid} was lost: never trained" for uid in sorted(untrained, key=_position)]
        else:
            self.violations.append(
                f"{len(untrained)} prompts are admitted and not trained, admission allows {in_flight}: "
                f"{len(untrained) - in_flight} were lost, the first maybe {min(untrained, key=_position)}"
            )

    def _judge_group(self, row: _Trained) -> None:
        group = row.group
        for index, staleness in enumerate(group["staleness"]):
            if staleness > row.max_staleness:
                self.violations.append(
                    f"sample {group['uid']}#{index} was trained in step {row.step} with staleness {staleness}: "
                    f"at most {row.max_staleness}"
                )
        for index, lengths in enumerate(group["lengths"]):
            if len(set(lengths)) != 1:
                parts = ", ".join(f"{count} {part}" for count, part in zip(lengths, _PARTS, strict=True))
                self.violations.append(f"sample {group['uid']}#{index} of step {row.step} has {parts}: must be equal")
        if len(group["lengths"]) != row.samples_per_group:
            self.violations.append(
                f"prompt {group['uid']} was trained in step {row.step} with {len(group['lengths'])} samples of "
                f"{row.samples_per_group}"
            )

    @property
    def drained(self) -> bool:
        """Whether nothing may be in flight any more."""
        assert self.sizes is not None
        admitted = {uid for _, uid in self.admitted}
        return self.complete and (self.offered <= self.sizes.total or len(admitted) <= self.sizes.total)

    # -- telling ---------------------------------------------------------------------------------------------------

    def uid(self, index: int) -> str:
        """Of the prompt that is ``index``-th over the whole training."""
        assert self.sizes is not None
        return f"{index // self.sizes.epoch_prompts}/{index % self.sizes.epoch_prompts}"

    @property
    def complete_epochs(self) -> int:
        """Epochs of which every prompt is trained."""
        assert self.sizes is not None
        size = self.sizes.epoch_prompts
        trained = {row.group["uid"] for row in self.trained}
        epochs = self.sizes.total // size
        return sum(all(f"{epoch}/{i}" in trained for i in range(size)) for epoch in range(epochs))

    def table(self) -> str:
        """The figures, one a line."""
        assert self.sizes is not None
        trained = {row.group["uid"] for row in self.trained}
        waiting = [step for step, uid in self.admitted if uid not in trained]
        staleness = [age for row in self.trained for age in row.group["staleness"]]
        rows = {
            "arm": self.sizes.arm,
            "training": "complete" if self.complete else "not complete",
            "steps": max((row.step for row in self.trained), default=0),
            "epochs complete": f"{self.complete_epochs} of {self.sizes.total / self.sizes.epoch_prompts:g}",
            "prompts trained": f"{len(trained)} of {self.sizes.total}",
            "prompts in flight": f"{len(waiting)}" + (f", the oldest since step {min(waiting)}" if waiting else ""),
            "prompts lost": self.lost,
            "prompts repeated": self.repeated,
            "samples masked": sum(sum(row.group["masked"]) for row in self.trained),
            "max staleness": f"{max(staleness, default=0)} (bound {self.sizes.max_staleness})",
            "kills survived": self.kills,
            "resumes": self.resumes,
            "trained groups undone by resumes": self.undone,
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _position(uid: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else -1 for part in uid.split("/"))


def audit(run_dir: Path) -> tuple[Audit, int]:
    """The judged ledger of ``run_dir``, and how many of its lines were cut off by a dying process.

    Raises:
        LedgerError: it cannot be read.
    """
    events, cut_off = read_ledger(run_dir / NAME)
    if not events:
        raise LedgerError(f"{run_dir / NAME} has no event")
    result = Audit()
    try:
        for event in events:
            result.book(event)
        result.judge()
    except (KeyError, TypeError, AttributeError) as error:
        raise LedgerError(f"{run_dir / NAME} has an event that lacks a field: {error!r}") from error
    return result, cut_off


def main(arguments: list[str] | None = None) -> int:
    """Print the table and the violations; the exit code of the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m recipe.partial_rollout.audit", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="trainer.default_local_dir of the run")
    options = parser.parse_args(arguments)
    try:
        result, cut_off = audit(options.run_dir)
    except LedgerError as error:
        print(f"unreadable: {error}", file=sys.stderr)
        return 2
    print(result.table())
    if cut_off:
        print(f"{cut_off} lines were cut off by a dying process")
    for line in result.violations[:_SHOWN]:
        print(f"violation: {line}")
    if len(result.violations) > _SHOWN:
        print(f"and {len(result.violations) - _SHOWN} more violations")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
