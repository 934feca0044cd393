"""Audit a run: ``python -m recipe.partial_rollout.tools audit RUN_DIR``.

Each prompt must be trained or filtered exactly once, within ``max_staleness``, and with all its samples.

Reads ``run.jsonl`` of a run of PR. Exit code 0: no violation; 1: violations, one line each; 2: unreadable.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

from msgspec import structs

from recipe.partial_rollout.manager.types import position_of
from recipe.partial_rollout.records.run_log import Arm, Checkpoint, Ended, Event, Round, RunSettings, TrainedGroup
from recipe.partial_rollout.tools.command_line import Parser, typed
from recipe.partial_rollout.tools.reading.lineage import Lineage
from recipe.partial_rollout.tools.reading.run_log import RunRecordError, read_log

_LASTING = ("arm", "samples_per_group", "batch_groups", "epoch_prompts")
"""settings that must be the same in every process of a run"""


@dataclass(frozen=True, slots=True)
class Entry:
    """The part of a round that the audit keeps. Prompts are uids, such as ``"0/7"``, interned to save memory."""

    step: int
    admitted: list[str]
    trained: list[str]
    filtered: list[str]
    orders: list[int]
    """dispatch order of each group: the trained ones, then the filtered ones"""
    samples: int
    """number of trained samples"""
    rows: int
    """number of trained rows: one per sample, or one per output of its agent loop"""
    sources: list[int | None]
    """hash of epoch and dataset row of each trained group; None if the row has no index or index 0, because rows
    without an index may have the same text"""
    masked: int
    """number of masked samples"""
    staleness: int
    """largest of a trained sample"""
    faults: tuple[str, ...]
    """violations that the round shows by itself"""

    @classmethod
    def of(cls, round_: Round, settings: RunSettings) -> Entry:
        """A round, judged by the ``settings`` in force."""
        groups = round_.trained
        return cls(
            round_.step,
            list(map(sys.intern, round_.admitted)),
            [sys.intern(group.uid) for group in groups],
            [sys.intern(group.uid) for group in round_.filtered],
            orders=[group.order for group in chain(groups, round_.filtered)],
            samples=sum(len(group.lengths) for group in groups),
            rows=sum(group.rows for group in groups),
            sources=[None if group.prompt.startswith("0-") else hash((group.epoch, group.prompt)) for group in groups],
            masked=sum(group.masked for group in groups),
            staleness=max((age for group in groups for age in group.staleness), default=0),
            faults=tuple(_faults(round_, settings)),
        )


def _faults(round_: Round, settings: RunSettings) -> Iterator[str]:
    """Violations of a round and its groups under ``settings``, a line each."""
    step, version = round_.step, round_.version
    if (latest := round_.phase.column("version").max(initial=-1)) > version:
        yield f"the round of step {step} under version {version} has engine calls of version {latest}"
    if round_.lost_samples:
        yield f"{round_.lost_samples} samples were unaccounted for after the round of step {step}"
    if len(round_.trained) != settings.batch_groups:
        yield f"step {step} trained {len(round_.trained)} groups instead of {settings.batch_groups}"
    own = sum(group.tokens - group.off_policy_tokens for group in round_.trained)
    # A round without calls is no violation: a worker that dies after its samples finished loses its record of calls.
    if own and len(round_.phase.calls) and not round_.phase.decoded_tokens:
        yield f"step {step} trained {own} tokens of version {version}; no engine call of its round decoded any"
    for group in round_.trained:
        yield from _faults_of_group(group, step, settings)
    since = version - settings.max_staleness
    for group in round_.filtered:
        if group.birth is not None and not since <= group.birth <= version:
            yield (
                f"prompt {group.uid} was filtered in step {step} with birth {group.birth}: "
                f"its birth must be from {max(0, since)} to {version}"
            )


def _faults_of_group(group: TrainedGroup, step: int, settings: RunSettings) -> Iterator[str]:
    for index, staleness in enumerate(group.staleness):
        if staleness > settings.max_staleness:
            yield (
                f"sample {group.uid}#{index} was trained in step {step} with staleness {staleness}: "
                f"max_staleness is {settings.max_staleness}"
            )
    # The first sample starts no later than any sample's first token.
    since, until = step - 1 - settings.max_staleness, step - 1 - max(group.staleness, default=0)
    if group.birth is not None and not since <= group.birth <= until:
        yield (
            f"prompt {group.uid} was trained in step {step} with birth {group.birth} and staleness {group.staleness}: "
            f"its birth must be from {max(0, since)} to {until}"
        )
    samples, tokens, off_policy = len(group.lengths), group.tokens, group.off_policy_tokens
    if samples != settings.samples_per_group:
        yield f"prompt {group.uid} was trained in step {step} with {samples} of {settings.samples_per_group} samples"
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


class Audit:
    """Counts and violations of a training, from the events of its log. Rounds that a resume has undone do not count."""

    def __init__(self, events: Iterable[Event]) -> None:
        processes, worked, self.kills = list[RunSettings](), False, 0
        self.unlogged = set[int]()
        """steps up to a resumed checkpoint that the log lacks: the machine failed before their lines were on disk"""
        lineage = Lineage(lambda round_: Entry.of(round_, lineage.settings))
        for event in events:
            lineage.take(event)
            match event:
                case RunSettings():
                    processes.append(event)
                    self.kills += worked
                    worked = False
                    logged = max((entry.step for entry in lineage.standing()), default=0)
                    self.unlogged |= set(range(logged + 1, event.resumed + 1))
                case Round() | Checkpoint():
                    worked = True
                case Ended():
                    worked = False
        sizes, ended = lineage.settings, lineage.ended
        # ``trainer.total_training_steps`` may be more than the data suffices for.
        self.sizes = structs.replace(sizes, total=min(sizes.total, sizes.offered))
        """settings of the process that began last, with ``total`` at most ``offered``, the prompts that it may admit"""
        self.offered = max(each.offered for each in processes)
        """most prompts that any process of the training may admit"""
        self.drains = all(each.drains for each in processes)
        self.resumes = len(processes) - 1
        self.complete = ended is not None and ended.complete
        self.exhausted = ended is not None and ended.exhausted
        """whether the training is over because the data could not fill another batch"""
        self.entries = lineage.standing()
        """entries of the rounds that count, in order"""
        self.unlogged -= {entry.step for entry in self.entries}
        self.admitted = {prompt for entry in self.entries for prompt in entry.admitted}
        self.trained = {prompt for entry in self.entries for prompt in entry.trained}
        self.filtered = {prompt for entry in self.entries for prompt in entry.filtered}
        self.undone = sum(len(entry.trained) for entry in lineage.undone)
        """trained groups that resumes have undone"""
        self._consumed = self.trained | self.filtered
        self._unseen = len(self.unlogged) * (self.offered if sizes.filters else sizes.batch_groups)
        """prompts that unlogged steps may have consumed"""
        self.max_staleness = max((entry.staleness for entry in self.entries), default=0)
        """the largest of a trained sample, in versions"""
        self.lost = self.repeated = 0
        self.violations = [
            f"a resumed run changed {key} from {getattr(before, key)} to {getattr(now, key)}"
            for before, now in pairwise(processes)
            for key in _LASTING
            if getattr(before, key) != getattr(now, key)
        ]
        self._judge()

    # -- violations --------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        rounds = Counter(entry.step for entry in self.entries)
        steps = range(1, max(rounds, default=0) + 1)
        self.violations += [
            f"step {step} has {rounds[step]} rounds"
            for step in steps
            if rounds[step] != 1 and step not in self.unlogged
        ]
        self._judge_prompts()
        orders = self._shared(lambda entry: zip(entry.orders, entry.trained + entry.filtered, strict=True))
        self.violations += [f"prompts {first} and {prompt} have the same dispatch order" for first, prompt in orders]
        self._judge_holes()
        self._judge_lost()
        trained, total = len(self.trained), self.sizes.total
        # ``_judge_lost`` has named each lost prompt of a training that drains: do not report the loss twice.
        by_prompt = self.drained and not self.sizes.filters
        if self.complete and not self.exhausted and not by_prompt and trained + self._unseen < total:
            self.violations.append(f"the training is complete, but trained {trained} of {total} prompts")
        self.violations += [fault for entry in self.entries for fault in entry.faults]

    def _judge_prompts(self) -> None:
        """Check that each prompt is admitted once, then consumed once: trained or filtered."""
        admitted, consumed = dict[str, str](), dict[str, str]()
        for entry in self.entries:
            for verb, prompts, once in (
                ("admitted", entry.admitted, admitted),
                ("trained", entry.trained, consumed),
                ("filtered", entry.filtered, consumed),
            ):
                here = f"{verb} in step {entry.step}"
                for prompt in prompts:
                    line = f"prompt {prompt} was {here}"
                    if prompt in once:
                        self.violations.append(f"{line}, and {once[prompt]}")
                        self.repeated += once is consumed
                    once.setdefault(prompt, here)
                    if once is consumed and not self._knows(prompt):
                        self.violations.append(f"{line}: the training has no such prompt")
                    elif prompt not in admitted and not self.unlogged:
                        self.violations.append(f"{line} and not admitted before")

    def _shared(self, marks: Callable[[Entry], Iterable[tuple[int | None, str]]]) -> list[tuple[str, str]]:
        """Return each prompt that has the mark of an earlier one, after that one.

        Args:
            marks: returns the pairs (mark, prompt) of an entry; a mark of None is not compared.
        """
        owners: dict[int | None, str] = {}
        return [
            (owners[mark], prompt)
            for mark, prompt in chain.from_iterable(map(marks, self.entries))
            if mark is not None and owners.setdefault(mark, prompt) != prompt
        ]

    def _judge_holes(self) -> None:
        """Check for skipped prompts: prompts are admitted in order, so a skipped one will never come."""
        if self.unlogged or (self.drained and not self.sizes.filters):
            return
        indices = set(map(self._index, filter(self._knows, self.admitted | self._consumed)))
        skipped = sorted(set(range(max(indices, default=0))) - indices)
        self.violations += [
            f"prompt {self._prompt(index)} was lost: later prompts were admitted, this one was not" for index in skipped
        ]
        self.lost += len(skipped)

    def _judge_lost(self) -> None:
        """Check that no more prompts are unconsumed than can be in flight: none in a training that has drained."""
        sizes, due = self.sizes, self.admitted
        in_flight = (1 + sizes.max_staleness) * sizes.batch_groups
        if self.drained:
            due, in_flight = due if sizes.filters else map(self._prompt, range(sizes.total)), 0
        elif self.complete and self.exhausted:
            # The prompts left at the end of the data are fewer than a batch.
            due, in_flight = map(self._prompt, range(self.offered)), sizes.batch_groups - 1
        untrained = sorted(set(due) - self._consumed, key=position_of)
        lost = max(0, len(untrained) - in_flight - self._unseen)
        self.lost += lost
        if lost and self.drained:
            self.violations += [f"prompt {prompt} was lost: never trained" for prompt in untrained]
        elif lost:
            self.violations.append(
                f"{len(untrained)} prompts are admitted and not trained, but at most {in_flight} can be in flight: "
                f"{lost} were lost, the first is perhaps {untrained[0]}"
            )

    @property
    def drained(self) -> bool:
        """Whether nothing may be in flight: the training is complete, and trains every prompt that it admits.

        It does so if it drains, or if it has admitted no more prompts than it trains. A training that ended because the
        data could not fill another batch may leave some.
        """
        kept = len(self.admitted - self.filtered)
        ends = self.drains if self.sizes.filters else self.offered <= self.sizes.total
        return self.complete and not self.exhausted and (ends or kept <= self.sizes.total)

    def _prompt(self, index: int) -> str:
        """Return the uid (``epoch/position``) of the prompt at ``index``, counted from 0 over all epochs."""
        epoch, position = divmod(index, self.sizes.epoch_prompts)
        return f"{epoch}/{position}"

    def _index(self, prompt: str) -> int:
        """Return the index of a uid, counted over all epochs: the inverse of ``_prompt``."""
        epoch, position = position_of(prompt)
        return epoch * self.sizes.epoch_prompts + position

    def _knows(self, prompt: str) -> bool:
        """Whether the training's data has a prompt of this uid."""
        return position_of(prompt)[1] < self.sizes.epoch_prompts and self._index(prompt) < self.offered

    def notes(self) -> list[str]:
        """Return a line about prompts whose rows are alike. It is no violation, because the data may repeat rows."""
        alike = self._shared(lambda entry: zip(entry.sources, entry.trained, strict=True))
        if not alike:
            return []
        first, prompt = alike[0]
        words = (
            f"{len(alike)} trained prompt(s) have index and text of another of their epoch, such as {prompt} of {first}"
        )
        return [f"{words}; the data may hold rows twice"]

    # -- figures -----------------------------------------------------------------------------------------------------

    def table(self) -> str:
        """The figures, one a line."""
        sizes, ended = self.sizes, ": the data could not fill another batch" if self.exhausted else ""
        rows = {
            "arm": sizes.arm,
            "training": "not complete" if not self.complete else f"complete{ended}",
            "steps": max((entry.step for entry in self.entries), default=0),
            "prompts trained": f"{len(self.trained)} of {sizes.total}",
            "prompts filtered": len(self.filtered),
            "prompts in flight": len(self.admitted - self._consumed),
            "prompts lost": self.lost,
            "prompts repeated": self.repeated,
            "samples trained": sum(entry.samples for entry in self.entries),
            "rows trained": sum(entry.rows for entry in self.entries),
            "samples masked": sum(entry.masked for entry in self.entries),
            "max staleness": f"{self.max_staleness} (bound {sizes.max_staleness})",
            "kills survived": self.kills,
            "resumes": self.resumes,
            "trained groups undone by resumes": self.undone,
            "steps that the log has lost": ", ".join(map(str, sorted(self.unlogged))) or 0,
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def audit(run_dir: Path) -> tuple[Audit, int]:
    """The judged account of the run in ``run_dir``, and how many lines of it were cut off by a dying process.

    Raises:
        RunRecordError: it cannot be read, or is of noPR; names the file and line.
    """
    cut_off: list[str] = []
    events = read_log(run_dir, cut_off)
    first = next(events)
    assert isinstance(first, RunSettings), "read_log has looked"
    if first.arm is Arm.NOPR:
        raise RunRecordError(f"{run_dir}: a run of noPR has nothing to audit: it carries no prompt to the next step")
    audited = Audit(chain([first], events))
    return audited, len(cut_off)


def main(arguments: list[str] | None = None) -> int:
    """Print the table and the violations; the exit code of the module docstring."""
    parser = Parser(
        typed("audit"),
        "Check that a run trained every prompt exactly once, within the staleness bound, with all its samples.",
        ["outputs/quickstart/PR"],
        "Reads run.jsonl of a run of PR. A filtered prompt counts as trained. "
        "Exit code: 0 without violations, 1 with violations (one line each), 2 if the file cannot be read.",
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
    for line in result.notes():
        print(f"note: {line}")
    for line in result.violations:
        print(f"violation: {line}")
    return 1 if result.violations else 0
