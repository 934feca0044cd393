"""Does ``trace.jsonl`` agree with the ledger? Part of ``audit``.

The round of a step is written before the step is trained, both line by line, so a kill leaves no trained step without its
round. A round without a trained step is the last one of its process, and a resume undoes it. What is compared:

* every trained step has one round, under the version that the ledger has, and with the same groups;
* the epoch of every group, and the length and the staleness of every sample, agree; a group has off-policy tokens if and
  only if one of its samples is stale, and no more generated tokens than its samples are long;
* no engine call of a round has a later version than the round, and no sample was unaccounted for at its end.

Totals of decoded and trained tokens are not compared: a worker that dies, or a round that SIGTERM interrupts, loses the
record of its calls, while the tokens are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from recipe.partial_rollout.records import ledger
from recipe.partial_rollout.records.trace import RoundRecord
from recipe.partial_rollout.records.trained_group import TrainedGroup
from recipe.partial_rollout.tools.reading.ledger import event_of
from recipe.partial_rollout.tools.reading.lines import line_at
from recipe.partial_rollout.tools.reading.trace import iter_trace, lineage, trained_of


@dataclass(frozen=True, slots=True)
class RoundNote:
    """What the audit remembers of a round, until it reads its line again beside that of its step."""

    step: int
    version: int
    at: int
    """byte of the trace at which its line begins"""
    faults: list[str]
    """what is wrong with it by itself"""

    @classmethod
    def of(cls, round_: RoundRecord) -> RoundNote:
        """The note of a round that was read from a trace."""
        return cls(round_.step, round_.version, round_.at, _of_round(round_))


def standing_rounds(trace: Path) -> list[RoundNote]:
    """The rounds that count, with a step's second round if no resume undid the first: that is an error to report.

    Raises:
        RunRecordError: the trace cannot be read; names the line.
    """
    return list(lineage(iter_trace(trace), keep=RoundNote.of).standing())


def disagreements(
    trained: Iterable[tuple[int, int]], rounds: list[RoundNote], files: tuple[Path, Path], *, complete: bool
) -> list[str]:
    """A line for each way in which the trace's ``rounds`` and the ``trained`` steps of the ledger differ.

    Args:
        trained: step, and the byte of the ledger at which a line of it begins.
        files: ledger and trace.
        complete: the training is over. Until then the trace may lack the last steps, which a power cut can remove.
    """
    by_step: dict[int, RoundNote] = {}
    found: list[str] = []
    for note in rounds:
        if note.step in by_step:
            found.append(f"step {note.step} has two rounds in the trace")
        by_step[note.step] = note
        found += note.faults
    last = max(by_step, default=0)
    lines: dict[int, list[int]] = {}
    for step, at in trained:
        lines.setdefault(step, []).append(at)
    for step, places in lines.items():
        if step in by_step:
            found += _of_step(_trained(files[0], places), by_step[step], files[1])
        elif complete or step < last:
            found.append(f"step {step} is trained and has no round in the trace")
    found += [
        f"step {step} has a round in the trace and is not trained, later steps are"
        for step in sorted(by_step)
        if step not in lines and step < max(lines, default=0)
    ]
    return found


def _trained(path: Path, places: list[int]) -> ledger.Trained:
    """A step of the ledger ``path``, from all its lines."""
    events = [event_of(line_at(path, at)) for at in places]
    steps = [event for event in events if isinstance(event, ledger.Trained)]
    return ledger.Trained(steps[0].step, steps[0].version, [group for step in steps for group in step.groups])


def _of_round(round_: RoundRecord) -> list[str]:
    step, version = round_.step, round_.version
    found = []
    if (latest := max((call.version for call in round_.phase.calls), default=-1)) > version:
        found.append(f"the round of step {step} under version {version} has engine calls of version {latest}")
    if round_.lost_samples:
        found.append(f"{round_.lost_samples} samples were unaccounted for after the round of step {step}")
    return found


def _of_step(step: ledger.Trained, round_: RoundNote, trace: Path) -> list[str]:
    at = f"in step {step.step}"
    if step.version != round_.version:
        return [f"{at} the ledger has version {step.version}, the trace {round_.version}"]
    trained = [trained_of(group) for group in line_at(trace, round_.at).objects("trained")]
    ours = {group.order: group for group in step.groups}
    theirs = {group.order: group for group in trained}
    if len(theirs) < len(trained):
        return [f"{at} the trace has a group twice"]
    found = [
        f"prompt {ours[order].uid} is trained {at} and not in its round in the trace"
        for order in ours
        if order not in theirs
    ]
    found += [
        f"group {order} is in the trace's round of step {step.step}, and not trained in it"
        for order in theirs
        if order not in ours
    ]
    for order in sorted(ours.keys() & theirs.keys()):
        found += [f"prompt {ours[order].uid} {at}: {line}" for line in _of_group(ours[order], theirs[order])]
    return found


def _of_group(ours: TrainedGroup, theirs: TrainedGroup) -> list[str]:
    """Disagreements on one group; ``ours`` is the ledger's record, ``theirs`` the trace's."""
    pairs = (
        ("epoch", ours.epoch, theirs.epoch),
        ("lengths", ours.lengths, theirs.lengths),
        ("staleness", ours.staleness, theirs.staleness),
    )
    found = [f"the ledger has {what} {mine}, the trace {other}" for what, mine, other in pairs if mine != other]
    tokens, off_policy = theirs.tokens, theirs.off_policy_tokens
    if not 0 <= off_policy <= tokens <= sum(ours.lengths):
        found.append(f"{off_policy} off-policy tokens of {tokens} generated ones in {sum(ours.lengths)} are impossible")
    elif bool(off_policy) != any(ours.staleness):
        found.append(f"{off_policy} off-policy tokens do not agree with staleness {ours.staleness}")
    return found
