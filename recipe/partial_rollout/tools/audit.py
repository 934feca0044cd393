"""``python -m recipe.partial_rollout.tools audit RUN_DIR``: was every prompt trained, or filtered, once, in time and whole?

Reads ``ledger.jsonl``, and ``trace.jsonl`` where there is one (``trace_audit`` says what must agree). Exit code 0: no
violation; 1: violations, one line each; 2: unreadable.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from recipe.partial_rollout.records import ledger_events as ledger
from recipe.partial_rollout.records import run_trace
from recipe.partial_rollout.records.fields import RunRecordError
from recipe.partial_rollout.records.ledger import NAME, read_ledger
from recipe.partial_rollout.records.resumed import Resumed
from recipe.partial_rollout.records.round import Round
from recipe.partial_rollout.tools import trace_audit
from recipe.partial_rollout.tools.audited_group import AuditedGroup
from recipe.partial_rollout.tools.command_line import described

_SHOWN = 20


@dataclass(slots=True)
class Audit:
    """The ledger's account of a training, without what resumes have undone."""

    sizes: ledger.RunSizes | None = None
    offered: int = 0
    """most prompts that any process of the training may admit"""
    admitted: list[tuple[int, str]] = field(default_factory=list)
    """step and uid"""
    trained: list[AuditedGroup] = field(default_factory=list)
    filtered: list[tuple[int, str]] = field(default_factory=list)
    """step and uid of the groups that dynamic sampling consumed"""
    complete: bool = False
    exhausted: bool = False
    """whether it is complete because the data could not fill another batch"""
    drains: bool = True
    """whether every process so far drains"""
    ended_on_purpose: bool = True
    resumes: int = 0
    kills: int = 0
    undone: int = 0
    """number of trained groups that resumes have undone"""
    violations: list[str] = field(default_factory=list)
    lost: int = 0
    repeated: int = 0
    rounds_compared: int | None = None
    """rounds of the trace; None if there is no trace"""

    def book(self, event: ledger.LedgerEvent) -> None:
        """Take the next event of the ledger."""
        if self.sizes is None and not isinstance(event, ledger.RunSizes):
            raise RunRecordError(f"the first event is {event.EVENT}: a ledger begins with {ledger.RunSizes.EVENT}")
        match event:
            case ledger.RunSizes():
                self._book_run(event)
            case Resumed(step):
                self._book_resumed(step)
            case ledger.Admitted(step, _, uids):
                self.admitted += [(step, uid) for uid in uids]
            case ledger.Trained():
                self._book_trained(event)
            case ledger.Filtered(step, _, groups):
                self.filtered += [(step, group.uid) for group in groups]
            case ledger.Stopped():
                self.ended_on_purpose, self.complete, self.exhausted = True, False, False
            case ledger.Complete(exhausted):
                self.ended_on_purpose, self.complete, self.exhausted = True, True, exhausted

    def _book_run(self, sizes: ledger.RunSizes) -> None:
        before = self.sizes
        if before is not None:
            self.kills += not self.ended_on_purpose
            for key in ("arm", "samples_per_group", "batch_groups", "epoch_prompts"):
                if getattr(sizes, key) != getattr(before, key):
                    change = f"{getattr(before, key)} to {getattr(sizes, key)}"
                    self.violations.append(f"a resumed run changed {key} from {change}")
        self.sizes, self.ended_on_purpose = sizes, False
        self.drains &= sizes.drains
        self.offered = max(self.offered, sizes.offered, sizes.total)

    def _book_resumed(self, step: int) -> None:
        self.resumes += 1
        self.complete = False
        self.admitted = [row for row in self.admitted if row[0] <= step]
        self.filtered = [row for row in self.filtered if row[0] <= step]
        kept = [row for row in self.trained if row.step <= step]
        self.undone += len(self.trained) - len(kept)
        self.trained = kept

    def _book_trained(self, event: ledger.Trained) -> None:
        sizes = self.sizes
        assert sizes is not None
        self.trained += [
            AuditedGroup(event.step, event.version, sizes.max_staleness, sizes.samples_per_group, group)
            for group in event.groups
        ]

    def judge(self) -> None:
        """Fill in the violations."""
        self._judge_prompts()
        self._judge_filtered()
        for row in self.trained:
            self.violations += row.violations()

    def compare(self, rounds: list[Round]) -> None:
        """Add a violation for each disagreement with the trace's rounds."""
        steps: dict[int, ledger.Trained] = {}
        for row in self.trained:
            steps.setdefault(row.step, ledger.Trained(row.step, row.version, [])).groups.append(row.group)
        self.violations += trace_audit.disagreements(steps.values(), rounds, complete=self.complete)
        self.rounds_compared = len(rounds)

    def _judge_prompts(self) -> None:
        assert self.sizes is not None
        times = Counter(row.group.uid for row in self.trained)
        admitted = Counter(uid for _, uid in self.admitted)
        due = [self.uid(i) for i in range(self.offered)]
        known = set(due)
        for uid in sorted((uid for uid in times if times[uid] > 1), key=_position):
            steps = ", ".join(str(row.step) for row in self.trained if row.group.uid == uid)
            self.violations.append(f"prompt {uid} was trained {times[uid]} times: in steps {steps}")
            self.repeated += 1
        for uid in sorted(times, key=_position):
            if uid not in known:
                self.violations.append(f"prompt {uid} was trained: the training has no such prompt")
            elif not admitted[uid]:
                self.violations.append(f"prompt {uid} was trained and never admitted")
        filtered = {uid for _, uid in self.filtered}
        self._judge_holes(set(admitted) | set(times) | filtered)
        by_data = self.drained and not self.sizes.filters
        expected = due[: self.sizes.total] if by_data else due if self.complete and self.exhausted else admitted
        self._judge_lost([uid for uid in expected if not times[uid] and uid not in filtered])
        if self.complete and not self.exhausted and not by_data and len(times) < self.sizes.total:
            self.violations.append(f"the training is complete with {len(times)} prompts trained of {self.sizes.total}")

    def _judge_filtered(self) -> None:
        """Check filtered prompts: each is consumed once, after its admission, and not trained as well."""
        trained = {row.group.uid: row.step for row in self.trained}
        admitted = {uid for _, uid in self.admitted}
        times = Counter(uid for _, uid in self.filtered)
        for uid in sorted(times, key=_position):
            steps = ", ".join(str(step) for step, other in self.filtered if other == uid)
            if uid in trained:
                self.violations.append(f"prompt {uid} was filtered in step {steps} and trained in step {trained[uid]}")
            elif times[uid] > 1:
                self.violations.append(f"prompt {uid} was filtered {times[uid]} times: in steps {steps}")
            elif uid not in admitted:
                self.violations.append(f"prompt {uid} was filtered and never admitted")
            else:
                continue
            self.repeated += uid in admitted

    def _judge_holes(self, seen: set[str]) -> None:
        """Check for skipped prompts: prompts are admitted in order, so a skipped one will never come."""
        assert self.sizes is not None
        if self.drained and not self.sizes.filters:
            return
        last = max((i for i in range(self.offered) if self.uid(i) in seen), default=-1)
        for uid in (self.uid(i) for i in range(last)):
            if uid not in seen:
                self.violations.append(f"prompt {uid} was lost: later ones were admitted, it was not")
                self.lost += 1

    def _judge_lost(self, untrained: list[str]) -> None:
        """Check untrained prompts: only as many as admission allows may be in flight, none once drained."""
        assert self.sizes is not None
        in_flight = (1 + self.sizes.max_staleness) * self.sizes.batch_groups
        if self.drained:
            in_flight = 0
        elif self.complete and self.exhausted:
            # The prompts left at the end of the data do not fill a batch.
            in_flight = self.sizes.batch_groups - 1
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

    @property
    def drained(self) -> bool:
        """Whether nothing may be in flight: the training is complete and drains."""
        assert self.sizes is not None
        kept = len({uid for _, uid in self.admitted} - {uid for _, uid in self.filtered})
        ends = self.drains if self.sizes.filters else self.offered <= self.sizes.total
        return self.complete and not self.exhausted and (ends or kept <= self.sizes.total)

    def uid(self, index: int) -> str:
        """Uid of the ``index``-th prompt of the whole training."""
        assert self.sizes is not None
        return f"{index // self.sizes.epoch_prompts}/{index % self.sizes.epoch_prompts}"

    @property
    def complete_epochs(self) -> int:
        """Number of epochs of which every prompt is trained or filtered."""
        assert self.sizes is not None
        size = self.sizes.epoch_prompts
        consumed = {row.group.uid for row in self.trained} | {uid for _, uid in self.filtered}
        epochs = (self.offered if self.sizes.filters else self.sizes.total) // size
        return sum(all(f"{epoch}/{i}" in consumed for i in range(size)) for epoch in range(epochs))

    @property
    def end(self) -> str:
        """How far the training has come."""
        if not self.complete:
            return "not complete"
        return "complete: the data could not fill another batch" if self.exhausted else "complete"

    def table(self) -> str:
        """The figures, one a line."""
        sizes = self.sizes
        assert sizes is not None
        trained = {row.group.uid for row in self.trained}
        filtered = {uid for _, uid in self.filtered}
        waiting = [step for step, uid in self.admitted if uid not in trained and uid not in filtered]
        staleness = [age for row in self.trained for age in row.group.staleness]
        rows = {
            "arm": sizes.arm,
            "training": self.end,
            "steps": max((row.step for row in self.trained), default=0),
            "epochs complete": f"{self.complete_epochs} of {sizes.total / sizes.epoch_prompts:g}",
            "prompts trained": f"{len(trained)} of {sizes.total}",
            "prompts filtered": len(filtered),
            "prompts in flight": f"{len(waiting)}" + (f", the oldest since step {min(waiting)}" if waiting else ""),
            "prompts lost": self.lost,
            "prompts repeated": self.repeated,
            "samples masked": sum(sum(row.group.masked) for row in self.trained),
            "max staleness": f"{max(staleness, default=0)} (bound {sizes.max_staleness})",
            "kills survived": self.kills,
            "resumes": self.resumes,
            "trained groups undone by resumes": self.undone,
            "trace": "none: not compared"
            if self.rounds_compared is None
            else f"{self.rounds_compared} rounds compared",
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _position(uid: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else -1 for part in uid.split("/"))


def audit(run_dir: Path) -> tuple[Audit, int]:
    """The judged ledger and trace of ``run_dir``, and how many lines of the ledger were cut off by a dying process.

    Raises:
        RunRecordError: one of them cannot be read; names the file and line.
    """
    events, cut_off = read_ledger(run_dir / NAME)
    if not events:
        raise RunRecordError(f"{run_dir / NAME} has no event")
    result = Audit()
    for event in events:
        result.book(event)
    result.judge()
    trace = run_dir / run_trace.NAME
    if trace.exists():
        result.compare(trace_audit.standing_rounds(run_trace.read_trace(trace)[0]))
    return result, cut_off


def main(arguments: list[str] | None = None) -> int:
    """Print the table and the violations; the exit code of the module docstring."""
    parser = argparse.ArgumentParser(
        **described(
            "audit",
            "Check that a run trained every prompt exactly once, in time and whole.",
            "outputs/quickstart/PR",
            more="Reads ledger.jsonl, and trace.jsonl where there is one. A filtered prompt counts as trained. "
            "Exit code: 0 without violations, 1 with violations (one line each), 2 if the files cannot be read.",
        )
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's trainer.default_local_dir")
    options = parser.parse_args(arguments)
    try:
        result, cut_off = audit(options.run_dir)
    except RunRecordError as error:
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
