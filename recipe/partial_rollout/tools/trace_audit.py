"""Does ``trace.jsonl`` tell of the same training as the ledger? Part of ``audit``.

The round of a step is written before the step is trained, both line by line, so that a kill leaves no trained step without
its round; a round without a trained step is the last one of its life, and a resume undoes it. What is compared:

* every trained step has one round, under the version that the ledger has, and with the same groups;
* of every group the epoch, and of every sample the length and the staleness; a group has off-policy tokens if, and only
  if, one of its samples is stale, and no more generated tokens than its samples are long;
* no engine call of a round is of a version later than the round's, and no sample was unaccounted for at its end.

Decoded tokens are not added up against trained ones: a worker that dies takes the account of its calls with it, and so
does a round that SIGTERM interrupts, while their tokens live on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe.partial_rollout.records.ledger import LedgerError

NAME = "trace.jsonl"
_VERSION = 4
"""column of an engine call"""


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A ``trained`` event of the ledger that no resume has undone."""

    step: int
    version: int
    groups: list[dict[str, Any]]


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """The ``round`` events that count: a resume undoes those after its checkpoint, once its life has added something.

    Raises:
        LedgerError: a line is no event, and no dying process can have left it.
    """
    rounds: list[dict[str, Any]] = []
    resumed: int | None = None
    broken: int | None = None
    with path.open(errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            event = _parse(line)
            if event is None or (broken is not None and event["event"] != "resumed"):
                if broken is not None:
                    raise LedgerError(f"{path}:{broken} is not an event, and the run did not end or resume there")
                broken = number
                continue
            broken = None
            if event["event"] == "resumed":
                resumed = event["step"] if resumed is None else min(resumed, event["step"])
                continue
            if resumed is not None:
                rounds = [row for row in rounds if row["step"] <= resumed]
                resumed = None
            if event["event"] == "round":
                rounds.append(event)
    return rounds


def _parse(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "event" in event else None


def disagreements(steps: Iterable[TrainedStep], rounds: list[dict[str, Any]], *, complete: bool) -> list[str]:
    """A line for each way in which the trace's ``rounds`` and the trained ``steps`` of the ledger differ.

    Args:
        complete: the training is over. Until then the trace may lack the last steps: a power cut takes lines of it.
    """
    by_step: dict[int, dict[str, Any]] = {}
    found: list[str] = []
    for row in rounds:
        if row["step"] in by_step:
            found.append(f"step {row['step']} has two rounds in the trace")
        by_step[row["step"]] = row
        found += _of_round(row)
    last = max(by_step, default=0)
    trained = list(steps)
    for step in trained:
        if step.step in by_step:
            found += _of_step(step, by_step[step.step])
        elif complete or step.step < last:
            found.append(f"step {step.step} is trained and has no round in the trace")
    done = {step.step for step in trained}
    found += [
        f"step {step} has a round in the trace and is not trained, later steps are"
        for step in sorted(by_step)
        if step not in done and step < max(done, default=0)
    ]
    return found


def _of_round(row: dict[str, Any]) -> list[str]:
    step, late = row["step"], [call[_VERSION] for call in row["calls"] if call[_VERSION] > row["version"]]
    found = []
    if late:
        found.append(f"the round of step {step} under version {row['version']} has engine calls of version {max(late)}")
    if row["lost_samples"]:
        found.append(f"{row['lost_samples']} samples were unaccounted for after the round of step {step}")
    return found


def _of_step(step: TrainedStep, row: dict[str, Any]) -> list[str]:
    at = f"in step {step.step}"
    if step.version != row["version"]:
        return [f"{at} the ledger has version {step.version}, the trace {row['version']}"]
    ours = {group["order"]: group for group in step.groups}
    theirs = {group["group"]: group for group in row["trained"]}
    if len(theirs) < len(row["trained"]):
        return [f"{at} the trace has a group twice"]
    found = [
        f"prompt {ours[order]['uid']} is trained {at} and not in its round in the trace"
        for order in ours
        if order not in theirs
    ]
    found += [
        f"group {order} is in the trace's round of step {step.step}, and not trained in it"
        for order in theirs
        if order not in ours
    ]
    for order in sorted(ours.keys() & theirs.keys()):
        found += [f"prompt {ours[order]['uid']} {at}: {line}" for line in _of_group(ours[order], theirs[order])]
    return found


def _of_group(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    lengths = [row[0] for row in ours["lengths"]]
    pairs = (
        ("epoch", int(ours["uid"].partition("/")[0]), theirs["epoch"]),
        ("lengths", lengths, theirs["lengths"]),
        ("staleness", ours["staleness"], theirs["staleness"]),
    )
    found = [f"the ledger has {what} {mine}, the trace {other}" for what, mine, other in pairs if mine != other]
    tokens, off_policy = theirs["tokens"], theirs["off_policy_tokens"]
    if not 0 <= off_policy <= tokens <= sum(lengths):
        found.append(f"{off_policy} off-policy tokens of {tokens} generated ones in {sum(lengths)} are impossible")
    elif bool(off_policy) != any(ours["staleness"]):
        found.append(f"{off_policy} off-policy tokens do not agree with staleness {ours['staleness']}")
    return found
