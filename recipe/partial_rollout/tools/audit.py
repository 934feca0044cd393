"""``python -m recipe.partial_rollout.tools audit RUN_DIR``: was every prompt trained, or filtered, once, in time and whole?

Reads ``ledger.jsonl``, and ``trace.jsonl`` where there is one (``trace_audit`` says what must agree). Exit code 0: no
violation; 1: violations, one line each; 2: unreadable.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from recipe.partial_rollout.records import ledger
from recipe.partial_rollout.records.jsonl import Checkpoint, Resumed
from recipe.partial_rollout.records.ledger import NAME
from recipe.partial_rollout.records.trace import RUN, TRACE, Arm
from recipe.partial_rollout.tools import trace_audit
from recipe.partial_rollout.tools.audit_entries import POSITIONS, Entries, Entry, uid_of
from recipe.partial_rollout.tools.command_line import described
from recipe.partial_rollout.tools.reading.ledger import iter_ledger
from recipe.partial_rollout.tools.reading.lines import RunRecordError
from recipe.partial_rollout.tools.reading.trace import read_settings

_SHOWN = 20


@dataclass(slots=True)
class Audit:
    """The ledger's account of a training, without what resumes have undone."""

    sizes: ledger.RunSizes | None = None
    offered: int = 0
    """most prompts that any process of the training may admit"""
    admitted: Entries = field(default_factory=Entries)
    trained: Entries = field(default_factory=Entries)
    filtered: Entries = field(default_factory=Entries)
    """what dynamic sampling consumed"""
    complete: bool = False
    exhausted: bool = False
    """whether it is complete because the data could not fill another batch"""
    drains: bool = True
    """whether every process so far drains"""
    worked: bool = False
    """whether the present process has booked anything, and has not ended on purpose: the next one survives its death"""
    resumes: int = 0
    kills: int = 0
    violations: list[str] = field(default_factory=list)
    lost: int = 0
    repeated: int = 0
    rounds_compared: int | None = None
    """rounds of the trace; None if there is no trace"""

    def book(self, event: ledger.LedgerEvent, at: int) -> None:
        """Take the next event of the ledger, whose line begins at byte ``at``."""
        if self.sizes is None and not isinstance(event, ledger.RunSizes):
            raise RunRecordError(f"the first event is {event.EVENT}: a ledger begins with {ledger.RunSizes.EVENT}")
        self.worked |= isinstance(event, ledger.Admitted | ledger.Trained | Checkpoint)
        match event:
            case ledger.RunSizes():
                self._book_run(event)
            case Resumed(step):
                self.resumes += 1
                self.complete = False
                for entries in self._kinds:
                    entries.lines.resume(step)
            case Checkpoint(step):
                for entries in self._kinds:
                    entries.lines.checkpoint(step)
            case ledger.Admitted(step, _, uids):
                self.admitted.lines.add(step, Entry.of(step, uids))
            case ledger.Trained():
                self.trained.lines.add(event.step, Entry.of_trained(event, at, self._sizes))
            case ledger.Filtered(step, _, groups):
                self.filtered.lines.add(step, Entry.of(step, (group.uid for group in groups)))
            case ledger.Stopped():
                self.worked, self.complete, self.exhausted = False, False, False
            case ledger.Complete(exhausted):
                self.worked, self.complete, self.exhausted = False, True, exhausted

    @property
    def _kinds(self) -> tuple[Entries, Entries, Entries]:
        return self.admitted, self.trained, self.filtered

    def _book_run(self, sizes: ledger.RunSizes) -> None:
        before = self.sizes
        if before is not None:
            self.kills += self.worked
            for key in ("arm", "samples_per_group", "batch_groups", "epoch_prompts"):
                if getattr(sizes, key) != getattr(before, key):
                    change = f"{getattr(before, key)} to {getattr(sizes, key)}"
                    self.violations.append(f"a resumed run changed {key} from {change}")
        # ``trainer.total_training_steps`` may be more than the data suffices for.
        self.sizes, self.worked = replace(sizes, total=min(sizes.total, sizes.offered)), False
        self.drains &= sizes.drains
        self.offered = max(self.offered, sizes.offered)

    @property
    def _sizes(self) -> ledger.RunSizes:
        assert self.sizes is not None
        return self.sizes

    def judge(self) -> None:
        """Fill in the violations."""
        for entries in self._kinds:
            entries.settle()
        self._judge_prompts()
        self._judge_filtered()
        for entry in self.trained:
            self.violations += entry.faults

    def compare(self, ledger_path: Path, trace: Path) -> None:
        """Add a violation for each disagreement of the files."""
        rounds = trace_audit.standing_rounds(trace)
        steps = ((entry.step, entry.at) for entry in self.trained)
        files = ledger_path, trace
        self.violations += trace_audit.disagreements(steps, rounds, files, complete=self.complete)
        self.rounds_compared = len(rounds)

    def _judge_prompts(self) -> None:
        admitted, trained, filtered = (entries.once for entries in self._kinds)
        for prompt, steps in self.trained.steps_of(self.trained.repeated()).items():
            listed = ", ".join(map(str, steps))
            self.violations.append(f"prompt {uid_of(prompt)} was trained {len(steps)} times: in steps {listed}")
            self.repeated += 1
        known, booked = self._known(trained), np.isin(trained, admitted)
        for at in np.flatnonzero(~known | ~booked):
            what = " and never admitted" if known[at] else ": the training has no such prompt"
            self.violations.append(f"prompt {uid_of(int(trained[at]))} was trained{what}")
        self._judge_holes(np.concatenate([admitted, trained, filtered]))
        by_data = self.drained and not self._sizes.filters
        if by_data or (self.complete and self.exhausted):
            expected = self._prompts(np.arange(self._sizes.total if by_data else self.offered))
        else:
            expected = admitted
        self._judge_lost(np.setdiff1d(expected, np.concatenate([trained, filtered])))
        if self.complete and not self.exhausted and not by_data and len(trained) < self._sizes.total:
            self.violations.append(
                f"the training is complete with {len(trained)} prompts trained of {self._sizes.total}"
            )

    def _judge_filtered(self) -> None:
        """Check filtered prompts: each is consumed once, after its admission, and not trained as well."""
        repeated, admitted, filtered = self.filtered.repeated(), self.admitted.once, self.filtered.once
        wrong = np.isin(filtered, self.trained.once) | np.isin(filtered, repeated) | ~np.isin(filtered, admitted)
        trained = self.trained.steps_of(np.intersect1d(filtered, self.trained.once))
        for prompt, at in self.filtered.steps_of(filtered[wrong]).items():
            steps, uid = ", ".join(map(str, at)), uid_of(prompt)
            if prompt in trained:
                self.violations.append(
                    f"prompt {uid} was filtered in step {steps} and trained in step {trained[prompt][-1]}"
                )
            elif len(at) > 1:
                self.violations.append(f"prompt {uid} was filtered {len(at)} times: in steps {steps}")
            else:
                self.violations.append(f"prompt {uid} was filtered and never admitted")
            self.repeated += bool(np.isin(prompt, admitted))

    def _judge_holes(self, seen: np.ndarray) -> None:
        """Check for skipped prompts: prompts are admitted in order, so a skipped one will never come."""
        if self.drained and not self._sizes.filters:
            return
        places = self._places(seen[self._known(seen)])
        skipped = np.setdiff1d(np.arange(places.max(initial=0)), places)
        self.violations += [
            f"prompt {uid_of(int(prompt))} was lost: later ones were admitted, it was not"
            for prompt in self._prompts(skipped)
        ]
        self.lost += len(skipped)

    def _judge_lost(self, untrained: np.ndarray) -> None:
        """Check untrained prompts: only as many as admission allows may be in flight, none once drained."""
        in_flight = (1 + self._sizes.max_staleness) * self._sizes.batch_groups
        if self.drained:
            in_flight = 0
        elif self.complete and self.exhausted:
            # The prompts left at the end of the data do not fill a batch.
            in_flight = self._sizes.batch_groups - 1
        if len(untrained) <= in_flight:
            return
        self.lost += len(untrained) - in_flight
        if self.drained:
            self.violations += [f"prompt {uid_of(int(prompt))} was lost: never trained" for prompt in untrained]
        else:
            self.violations.append(
                f"{len(untrained)} prompts are admitted and not trained, admission allows {in_flight}: "
                f"{len(untrained) - in_flight} were lost, the first maybe {uid_of(int(untrained[0]))}"
            )

    @property
    def drained(self) -> bool:
        """Whether nothing may be in flight: the training is complete and drains."""
        kept = len(np.setdiff1d(self.admitted.once, self.filtered.once))
        ends = self.drains if self._sizes.filters else self.offered <= self._sizes.total
        return self.complete and not self.exhausted and (ends or kept <= self._sizes.total)

    def _prompts(self, places: np.ndarray) -> np.ndarray:
        """The prompts at ``places`` of the whole training."""
        size = self._sizes.epoch_prompts
        return places // size * POSITIONS + places % size

    def _places(self, prompts: np.ndarray) -> np.ndarray:
        """The inverse of ``_prompts``."""
        return prompts // POSITIONS * self._sizes.epoch_prompts + prompts % POSITIONS

    def _known(self, prompts: np.ndarray) -> np.ndarray:
        """bool [prompt] whether the training has such a prompt"""
        return (prompts % POSITIONS < self._sizes.epoch_prompts) & (self._places(prompts) < self.offered)

    @property
    def undone(self) -> int:
        """Number of trained groups that resumes have undone."""
        return sum(len(entry.prompts) for entry in self.trained.lines.all()) - len(self.trained.all)

    @property
    def complete_epochs(self) -> int:
        """Number of epochs of which every prompt is trained or filtered."""
        size = self._sizes.epoch_prompts
        epochs = (self.offered if self._sizes.filters else self._sizes.total) // size
        consumed = np.union1d(self.trained.once, self.filtered.once)
        places = self._places(consumed[self._known(consumed)])
        return int(np.sum(np.bincount(places // size, minlength=epochs)[:epochs] == size))

    @property
    def end(self) -> str:
        """How far the training has come."""
        if not self.complete:
            return "not complete"
        return "complete: the data could not fill another batch" if self.exhausted else "complete"

    def _in_flight(self) -> str:
        consumed = np.union1d(self.trained.once, self.filtered.once)
        waiting = [(entry.step, int(np.sum(~np.isin(entry.prompts, consumed)))) for entry in self.admitted]
        steps = [step for step, count in waiting if count]
        return f"{sum(count for _, count in waiting)}" + (f", the oldest since step {min(steps)}" if steps else "")

    def table(self) -> str:
        """The figures, one a line."""
        sizes = self._sizes
        rows = {
            "arm": sizes.arm,
            "training": self.end,
            "steps": max((entry.step for entry in self.trained), default=0),
            "epochs complete": f"{self.complete_epochs} of {sizes.total / sizes.epoch_prompts:g}",
            "prompts trained": f"{len(self.trained.once)} of {sizes.total}",
            "prompts filtered": len(self.filtered.once),
            "prompts in flight": self._in_flight(),
            "prompts lost": self.lost,
            "prompts repeated": self.repeated,
            "samples masked": sum(entry.masked for entry in self.trained),
            "max staleness": f"{max((entry.staleness for entry in self.trained), default=0)} (bound {sizes.max_staleness})",
            "kills survived": self.kills,
            "resumes": self.resumes,
            "trained groups undone by resumes": self.undone,
            "trace": "none: not compared"
            if self.rounds_compared is None
            else f"{self.rounds_compared} rounds compared",
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def audit(run_dir: Path) -> tuple[Audit, int]:
    """The judged ledger and trace of ``run_dir``, and how many lines of the ledger were cut off by a dying process.

    Raises:
        RunRecordError: one of them cannot be read; names the file and line.
    """
    path, trace = run_dir / NAME, run_dir / TRACE
    if not path.exists() and (run_dir / RUN).exists() and read_settings(run_dir).arm is Arm.NOPR:
        raise RunRecordError(
            f"{run_dir}: a run of noPR has no {NAME}, for nothing of it outlives a step; its {TRACE} is for tools report"
        )
    result, cut_off = Audit(), []
    for at, event in iter_ledger(path, cut_off):
        result.book(event, at)
    if result.sizes is None:
        raise RunRecordError(f"{path} has no event")
    result.judge()
    if trace.exists():
        result.compare(path, trace)
    return result, len(cut_off)


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
