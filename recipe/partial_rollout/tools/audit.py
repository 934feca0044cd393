"""``python -m recipe.partial_rollout.tools audit RUN_DIR``: was every prompt trained, or filtered, once, in time and whole?

Reads ``run.jsonl`` of a run of PR. Exit code 0: no violation; 1: violations, one line each; 2: unreadable.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec import structs

from recipe.partial_rollout.records.run_log import NAME, Arm, Checkpoint, Ended, Event, Round, RunSettings
from recipe.partial_rollout.records.trained_group import TrainedGroup
from recipe.partial_rollout.tools.command_line import described
from recipe.partial_rollout.tools.reading.lineage import Lineage
from recipe.partial_rollout.tools.reading.run_log import RunRecordError, read_log

_SHOWN = 20
_PARTS = ("tokens", "log-probs", "versions", "mask entries")
_POSITIONS = 1 << 32
"""A prompt is one number, ``epoch * _POSITIONS + position``; they sort as the data does."""
_LASTING = ("samples_per_group", "batch_groups", "epoch_prompts")
"""settings that no process of a run may change"""


def _keys(uids: Iterable[str]) -> array[int]:
    pairs = (uid.partition("/") for uid in uids)
    return array("q", (int(epoch) * _POSITIONS + int(position) for epoch, _, position in pairs))


def _uid(key: int) -> str:
    return f"{key // _POSITIONS}/{key % _POSITIONS}"


@dataclass(frozen=True, slots=True)
class Entry:
    """What the audit keeps of a round, in little memory: 8 bytes a prompt."""

    step: int
    admitted: array[int]
    trained: array[int]
    filtered: array[int]
    masked: int
    """samples"""
    staleness: int
    """the largest"""
    faults: tuple[str, ...]
    """what is wrong with it by itself"""

    @classmethod
    def of(cls, round_: Round, settings: RunSettings) -> Entry:
        """A round, judged by the ``settings`` in force."""
        groups = round_.trained
        return cls(
            round_.step,
            _keys(round_.admitted),
            _keys(group.uid for group in groups),
            _keys(group.uid for group in round_.filtered),
            masked=sum(group.masked for group in groups),
            staleness=max((age for group in groups for age in group.staleness), default=0),
            faults=(
                *_faults_of_round(round_),
                *(line for group in groups for line in _faults_of_group(group, round_.step, settings)),
            ),
        )


def _faults_of_round(round_: Round) -> Iterator[str]:
    step, version = round_.step, round_.version
    if (latest := round_.phase.column("version").max(initial=-1)) > version:
        yield f"the round of step {step} under version {version} has engine calls of version {latest}"
    if round_.lost_samples:
        yield f"{round_.lost_samples} samples were unaccounted for after the round of step {step}"


def _faults_of_group(group: TrainedGroup, step: int, settings: RunSettings) -> Iterator[str]:
    """What is wrong with a group that ``step`` trained under ``settings``, a line each."""
    for index, staleness in enumerate(group.staleness):
        if staleness > settings.max_staleness:
            yield (
                f"sample {group.uid}#{index} was trained in step {step} with staleness {staleness}: "
                f"at most {settings.max_staleness}"
            )
    for index, counts in enumerate(group.parts):
        if len(set(counts)) != 1:
            parts = ", ".join(f"{count} {part}" for count, part in zip(counts, _PARTS, strict=True))
            yield f"sample {group.uid}#{index} of step {step} has {parts}: must be equal"
    samples, tokens, off_policy = len(group.lengths), group.tokens, group.off_policy_tokens
    if samples != settings.samples_per_group:
        yield f"prompt {group.uid} was trained in step {step} with {samples} samples of {settings.samples_per_group}"
    if not off_policy <= tokens <= sum(group.lengths):
        yield (
            f"prompt {group.uid} in step {step}: {off_policy} off-policy tokens of {tokens} generated ones in "
            f"{sum(group.lengths)} are impossible"
        )
    elif bool(off_policy) != any(group.staleness):
        yield (
            f"prompt {group.uid} in step {step}: {off_policy} off-policy tokens do not agree with "
            f"staleness {group.staleness}"
        )


class Prompts:
    """The prompts of one kind in the rounds that count.

    Args:
        entries: of these rounds.
        kind: ``admitted``, ``trained`` or ``filtered``.
    """

    def __init__(self, entries: Iterable[Entry], kind: str) -> None:
        self._rounds = [(entry.step, getattr(entry, kind)) for entry in entries]
        self.all = np.concatenate([np.zeros(0, np.int64), *(np.array(prompts) for _, prompts in self._rounds)])
        """[prompt] in the order of the rounds"""
        self.once, times = np.unique(self.all, return_counts=True)
        """[prompt] sorted, each once"""
        self.repeated = self.once[times > 1]

    def steps_of(self, prompts: np.ndarray) -> dict[int, list[int]]:
        """For each of a few ``prompts`` its steps."""
        steps: dict[int, list[int]] = {int(prompt): [] for prompt in prompts}
        for step, here in self._rounds if steps else ():
            for prompt in here:
                if prompt in steps:
                    steps[prompt].append(step)
        return steps


@dataclass(slots=True)
class Audit:
    """The account of a training, without what resumes have undone."""

    sizes: RunSettings | None = None
    """of the process that began last; ``total`` is at most what the data suffices for"""
    offered: int = 0
    """most prompts that any process of the training may admit"""
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
    lineage: Lineage[Entry] = field(init=False)
    entries: list[Entry] = field(default_factory=list)
    """of the rounds that count; filled in by ``judge``, with the three that follow"""
    admitted: Prompts = field(init=False)
    trained: Prompts = field(init=False)
    filtered: Prompts = field(init=False)
    """what dynamic sampling consumed"""

    def __post_init__(self) -> None:
        self.lineage = Lineage(lambda round_: Entry.of(round_, self._sizes))

    def book(self, event: Event) -> None:
        """Take the next event of the run."""
        match event:
            case RunSettings():
                self._book_process(event)
            case Round() | Checkpoint():
                self.worked = True
            case Ended():
                self.worked, self.complete, self.exhausted = False, event.complete, event.exhausted
        self.lineage.take(event)

    def _book_process(self, sizes: RunSettings) -> None:
        if (before := self.sizes) is not None:
            self.kills += self.worked
            self.resumes += 1
            for key in _LASTING:
                if getattr(sizes, key) != getattr(before, key):
                    change = f"{getattr(before, key)} to {getattr(sizes, key)}"
                    self.violations.append(f"a resumed run changed {key} from {change}")
        # ``trainer.total_training_steps`` may be more than the data suffices for.
        self.sizes = structs.replace(sizes, total=min(sizes.total, sizes.offered))
        self.worked, self.complete = False, False
        self.drains &= sizes.drains
        self.offered = max(self.offered, sizes.offered)

    @property
    def _sizes(self) -> RunSettings:
        assert self.sizes is not None
        return self.sizes

    def judge(self) -> None:
        """Fill in the violations."""
        self.entries = list(self.lineage.standing())
        self.admitted, self.trained, self.filtered = (
            Prompts(self.entries, kind) for kind in ("admitted", "trained", "filtered")
        )
        rounds = Counter(entry.step for entry in self.entries)
        steps = range(1, max(rounds, default=0) + 1)
        self.violations += [f"step {step} has {rounds[step]} rounds" for step in steps if rounds[step] != 1]
        self._judge_prompts()
        self._judge_filtered()
        self.violations += [fault for entry in self.entries for fault in entry.faults]

    def _judge_prompts(self) -> None:
        admitted, trained, filtered = self.admitted.once, self.trained.once, self.filtered.once
        for prompt, steps in self.trained.steps_of(self.trained.repeated).items():
            listed = ", ".join(map(str, steps))
            self.violations.append(f"prompt {_uid(prompt)} was trained {len(steps)} times: in steps {listed}")
            self.repeated += 1
        known, booked = self._known(trained), np.isin(trained, admitted)
        for at in np.flatnonzero(~known | ~booked):
            what = " and never admitted" if known[at] else ": the training has no such prompt"
            self.violations.append(f"prompt {_uid(int(trained[at]))} was trained{what}")
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
        repeated, admitted, filtered = self.filtered.repeated, self.admitted.once, self.filtered.once
        wrong = np.isin(filtered, self.trained.once) | np.isin(filtered, repeated) | ~np.isin(filtered, admitted)
        trained = self.trained.steps_of(np.intersect1d(filtered, self.trained.once))
        for prompt, at in self.filtered.steps_of(filtered[wrong]).items():
            steps, uid = ", ".join(map(str, at)), _uid(prompt)
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
            f"prompt {_uid(int(prompt))} was lost: later ones were admitted, it was not"
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
            self.violations += [f"prompt {_uid(int(prompt))} was lost: never trained" for prompt in untrained]
        else:
            self.violations.append(
                f"{len(untrained)} prompts are admitted and not trained, admission allows {in_flight}: "
                f"{len(untrained) - in_flight} were lost, the first maybe {_uid(int(untrained[0]))}"
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
        return places // size * _POSITIONS + places % size

    def _places(self, prompts: np.ndarray) -> np.ndarray:
        """The inverse of ``_prompts``."""
        return prompts // _POSITIONS * self._sizes.epoch_prompts + prompts % _POSITIONS

    def _known(self, prompts: np.ndarray) -> np.ndarray:
        """bool [prompt] whether the training has such a prompt"""
        return (prompts % _POSITIONS < self._sizes.epoch_prompts) & (self._places(prompts) < self.offered)

    @property
    def max_staleness(self) -> int:
        """The largest of a trained sample, in versions."""
        return max((entry.staleness for entry in self.entries), default=0)

    @property
    def undone(self) -> int:
        """Number of trained groups that resumes have undone."""
        return sum(len(entry.trained) for entry in self.lineage.all()) - len(self.trained.all)

    @property
    def _consumed(self) -> np.ndarray:
        return np.union1d(self.trained.once, self.filtered.once)

    @property
    def complete_epochs(self) -> int:
        """Number of epochs of which every prompt is trained or filtered."""
        size = self._sizes.epoch_prompts
        epochs = (self.offered if self._sizes.filters else self._sizes.total) // size
        places = self._places(self._consumed[self._known(self._consumed)])
        return int(np.sum(np.bincount(places // size, minlength=epochs)[:epochs] == size))

    @property
    def end(self) -> str:
        """How far the training has come."""
        if not self.complete:
            return "not complete"
        return "complete: the data could not fill another batch" if self.exhausted else "complete"

    def _in_flight(self) -> str:
        consumed = self._consumed
        waiting = [(entry.step, int(np.sum(~np.isin(entry.admitted, consumed)))) for entry in self.entries]
        steps = [step for step, count in waiting if count]
        return f"{sum(count for _, count in waiting)}" + (f", the oldest since step {min(steps)}" if steps else "")

    def table(self) -> str:
        """The figures, one a line."""
        sizes = self._sizes
        rows = {
            "arm": sizes.arm,
            "training": self.end,
            "steps": max((entry.step for entry in self.entries), default=0),
            "epochs complete": f"{self.complete_epochs} of {sizes.total / sizes.epoch_prompts:g}",
            "prompts trained": f"{len(self.trained.once)} of {sizes.total}",
            "prompts filtered": len(self.filtered.once),
            "prompts in flight": self._in_flight(),
            "prompts lost": self.lost,
            "prompts repeated": self.repeated,
            "samples masked": sum(entry.masked for entry in self.entries),
            "max staleness": f"{self.max_staleness} (bound {sizes.max_staleness})",
            "kills survived": self.kills,
            "resumes": self.resumes,
            "trained groups undone by resumes": self.undone,
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def audit(run_dir: Path) -> tuple[Audit, int]:
    """The judged account of the run in ``run_dir``, and how many lines of it were cut off by a dying process.

    Raises:
        RunRecordError: it cannot be read, or is of noPR; names the file and line.
    """
    result, cut_off = Audit(), []
    for event in read_log(run_dir, cut_off):
        if isinstance(event, RunSettings) and event.arm is Arm.NOPR:
            raise RunRecordError(f"{run_dir}: a run of noPR has nothing to audit: no prompt outlives a step")
        result.book(event)
    if result.sizes is None:
        raise RunRecordError(f"{run_dir / NAME} has no event")
    result.judge()
    return result, len(cut_off)


def main(arguments: list[str] | None = None) -> int:
    """Print the table and the violations; the exit code of the module docstring."""
    parser = argparse.ArgumentParser(
        **described(
            "audit",
            "Check that a run trained every prompt exactly once, in time and whole.",
            "outputs/quickstart/PR",
            more="Reads run.jsonl of a run of PR. A filtered prompt counts as trained. "
            "Exit code: 0 without violations, 1 with violations (one line each), 2 if the file cannot be read.",
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
