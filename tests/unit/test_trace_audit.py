"""The audit compares the trace with the ledger: a sound run passes, also after kills, and each tampering is named."""

import json
import re

import pytest

from recipe.partial_rollout.records.calls import EngineCall, RolloutPhase
from recipe.partial_rollout.records.jsonl import Checkpoint, Resumed
from recipe.partial_rollout.records.ledger import Admitted, Complete, Ledger, RunSizes, Trained
from recipe.partial_rollout.records.trace import Arm, RoundRecord, RunSettings, RunTrace
from recipe.partial_rollout.tools.audit import audit, main
from recipe.partial_rollout.tools.reading.trace import iter_trace
from recipe.partial_rollout.tools.run_record import last_attempts
from tests.unit.runs import large_group

STEPS = 3
SIZES = RunSizes("PR", 8, 2, 4, epoch_prompts=6, total=2 * STEPS, offered=2 * STEPS)
RUN = RunSettings(Arm.PR, "tiny", 2, 8, 1, 8, 4, "window", "bounded", "0", "0")


class Life:
    """One process of a training, which trains two groups a step."""

    def __init__(self, run_dir, resumed=None):
        self.trace = RunTrace(run_dir, ["r0"], RUN, resumed or 0)
        self.ledger = Ledger(run_dir)
        self.ledger.add(SIZES)
        if resumed is not None:
            self.ledger.add(Resumed(resumed))

    def step(self, number, *, dies_after=None):
        """Rollout and update of step ``number``; ends early after ``dies_after``."""
        version, groups = number - 1, [large_group(2 * number + i, staleness=int(number > 1)) for i in (-2, -1)]
        self.trace.begin(number)
        if dies_after == "begin":
            return
        self.ledger.add(Admitted(number, version, [group.uid for group in groups]))
        phase = RolloutPhase(0.0, 3.0, (EngineCall("r0", 1.0, 2.0, 20, version),))
        self.trace.round(RoundRecord(number, version, phase, groups))
        if dies_after == "round":
            return
        self.ledger.add(Trained(number, version, groups))
        self.trace.checkpoint(number)
        self.ledger.add(Checkpoint(number), sync=True)

    def finish(self, *numbers):
        """Train these steps, the last ones."""
        for number in numbers:
            self.step(number)
        self.ledger.add(Complete())


@pytest.fixture
def whole(tmp_path):
    """A training of three steps without a kill."""
    Life(tmp_path).finish(1, 2, 3)
    return tmp_path


def with_round_changed(run_dir, change, *, step=2):
    """``run_dir``, in whose trace ``change`` has replaced the round event of ``step`` by any number of events."""
    path = run_dir / "trace.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    (at,) = [i for i, event in enumerate(events) if event["event"] == "round" and event["step"] == step]
    events[at : at + 1] = change(events[at])
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return run_dir


def tamper(run_dir, change, **which):
    return audit(with_round_changed(run_dir, change, **which))[0].violations


def changed(**fields):
    return lambda event: [{**event, **fields}]


def group_changed(**fields):
    """In a trace, of the first group of a round."""
    return lambda event: [{**event, "trained": [{**event["trained"][0], **fields}, *event["trained"][1:]]}]


def test_run_without_a_trace_is_judged_by_its_ledger(whole, capsys):
    (whole / "trace.jsonl").unlink()
    assert main([str(whole)]) == 0
    assert "none: not compared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda event: [], "step 2 is trained and has no round in the trace"),
        (lambda event: [event, event], "step 2 has two rounds in the trace"),
        (changed(version=0), "in step 2 the ledger has version 1, the trace 0"),
        (
            changed(calls=[EngineCall(0, 1.0, 2.0, 20, 2).to_json()]),
            "step 2 under version 1 has engine calls of version 2",
        ),
        (changed(lost_samples=3), "3 samples were unaccounted for after the round of step 2"),
        (lambda event: [{**event, "trained": event["trained"][1:]}], "is trained in step 2 and not in its round"),
        (lambda event: [{**event, "trained": event["trained"][:1] * 2}], "in step 2 the trace has a group twice"),
        (group_changed(group=99), "group 99 is in the trace's round of step 2, and not trained in it"),
        (group_changed(lengths=[6] * 8), r"the ledger has lengths \[.*\], the trace \[6, 6"),
        (group_changed(staleness=[3] * 8), r"the ledger has staleness \[1, .*\], the trace \[3, 3"),
        (group_changed(tokens=99), "100 off-policy tokens of 99 generated ones in 24300 are impossible"),
        (group_changed(off_policy_tokens=0), "do not agree with staleness"),
    ],
)
def test_tampering_is_named(whole, change, message):
    lines = tamper(whole, change)
    assert lines and all("\n" not in line for line in lines)
    assert re.search(message, "; ".join(lines))


@pytest.mark.parametrize("dies_after", ["begin", "round"])
def test_killed_and_resumed_run_passes(tmp_path, dies_after):
    first = Life(tmp_path)
    first.step(1)
    first.step(2)
    first.step(3, dies_after=dies_after)
    assert audit(tmp_path)[0].violations == [], "before it is resumed"
    second = Life(tmp_path, resumed=1)
    assert audit(tmp_path)[0].violations == [], "before the resumed run has done anything"
    second.finish(2, 3)
    result, _ = audit(tmp_path)
    assert result.violations == [] and result.rounds_compared == 3 and result.undone == 2


def test_a_resume_from_an_abandoned_branch_compares_that_branch(tmp_path):
    """The second life resumes step 1 and dies in step 2; the third resumes the first life's step 2."""
    first = Life(tmp_path)
    first.step(1)
    first.step(2)
    Life(tmp_path, resumed=1).step(2, dies_after="round")
    Life(tmp_path, resumed=2).finish(3)
    result, _ = audit(tmp_path)
    assert result.violations == [] and result.rounds_compared == 3
    steps, _ = last_attempts(iter_trace(tmp_path / "trace.jsonl"))
    assert [round_.step for round_ in steps] == [1, 2, 3]


def test_power_cut_may_take_the_last_rounds_until_the_run_is_resumed(tmp_path):
    life = Life(tmp_path)
    for number in (1, 2):
        life.step(number)
    assert tamper(tmp_path, lambda event: []) == []
    assert tamper(tmp_path, lambda event: [], step=1) == [], "no later round is there"
