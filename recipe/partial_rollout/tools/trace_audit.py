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

from recipe.partial_rollout.records.ledger_events import Trained
from recipe.partial_rollout.records.resumed import Resumed
from recipe.partial_rollout.records.round import Round
from recipe.partial_rollout.records.run_trace import TraceEvent
from recipe.partial_rollout.records.trained_group import TrainedGroup


def standing_rounds(events: Iterable[TraceEvent]) -> list[Round]:
    """The rounds that count: a resume undoes those after its checkpoint, once its process has added something.

    Unlike ``last_attempts`` it keeps a step's second round if no resume undid the first: that is an error to report.
    """
    rounds: list[Round] = []
    resumed: int | None = None
    for event in events:
        if isinstance(event, Resumed):
            resumed = event.step if resumed is None else min(resumed, event.step)
            continue
        if resumed is not None:
            rounds = [round_ for round_ in rounds if round_.step <= resumed]
            resumed = None
        if isinstance(event, Round):
            rounds.append(event)
    return rounds


def disagreements(steps: Iterable[Trained], rounds: list[Round], *, complete: bool) -> list[str]:
    """A line for each way in which the trace's ``rounds`` and the trained ``steps`` of the ledger differ.

    Args:
        complete: the training is over. Until then the trace may lack the last steps, which a power cut can remove.
    """
    by_step: dict[int, Round] = {}
    found: list[str] = []
    for round_ in rounds:
        if round_.step in by_step:
            found.append(f"step {round_.step} has two rounds in the trace")
        by_step[round_.step] = round_
        found += _of_round(round_)
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


def _of_round(round_: Round) -> list[str]:
    step, version = round_.step, round_.version
    late = [call.version for call in round_.phase.calls if call.version > version]
    found = []
    if late:
        found.append(f"the round of step {step} under version {version} has engine calls of version {max(late)}")
    if round_.lost_samples:
        found.append(f"{round_.lost_samples} samples were unaccounted for after the round of step {step}")
    return found


def _of_step(step: Trained, round_: Round) -> list[str]:
    at = f"in step {step.step}"
    if step.version != round_.version:
        return [f"{at} the ledger has version {step.version}, the trace {round_.version}"]
    ours = {group.order: group for group in step.groups}
    theirs = {group.order: group for group in round_.trained}
    if len(theirs) < len(round_.trained):
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
