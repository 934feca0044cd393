"""The audit compares the trace with the ledger: a sound run passes, also after kills, and each tampering is named."""

import json
import re
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from recipe.partial_rollout.records.calls import EngineCall, RolloutPhase
from recipe.partial_rollout.records.ledger import Ledger, RunSizes
from recipe.partial_rollout.records.trace import Arm, RoundRecord, RunSettings, RunTrace, iter_trace
from recipe.partial_rollout.records.trained_group import TrainedGroup
from recipe.partial_rollout.tools.audit import audit, main
from recipe.partial_rollout.tools.run_record import last_attempts

STEPS = 3
SIZES = RunSizes("PR", 2, 2, 4, epoch_prompts=6, total=2 * STEPS, offered=2 * STEPS)
RUN = RunSettings(Arm.PR, "tiny", 2, 2, 1, 8, 4, "window", "bounded", "0", "0")


class Life:
    """One process of a training: the recipe's manager, ledger and trace; two of a sample's 5 tokens are a version old."""

    def __init__(self, run_dir, manager, output, *, resumed=None, state=None):
        self.manager, self.output = manager, output
        if state is not None:
            manager.load_state_dict(state)
        self.trace = RunTrace(run_dir, ["r0"], RUN, resumed or 0, append=True)
        self.ledger = Ledger(run_dir)
        self.ledger.run(SIZES)
        if resumed is not None:
            self.ledger.resumed(resumed)

    def step(self, number, *, dies_after=None):
        """RoundRecord and update of step ``number``; ends early after ``dies_after``."""
        manager, version = self.manager, number - 1
        manager.begin_version(version)
        for grant in manager.claim("w0"):
            output = self.output(version=version)
            born = max(0, version - 1)
            versions = np.array([born, born, version, version, version], np.int32)
            manager.finish(grant.sample_id, replace(output, versions=versions))
        groups = manager.take_batch(stop=True)
        admitted = manager.admitted
        self.trace.begin(number)
        if dies_after == "begin":
            return
        self.ledger.admitted(number, version, admitted)
        call = EngineCall("r0", 1.0, 2.0, 20, version)
        phase = RolloutPhase(0.0, 3.0, (call,))
        self.trace.round(RoundRecord(number, version, phase, [TrainedGroup.of(group, version) for group in groups]))
        if dies_after == "round":
            return
        manager.acknowledge([group.uid for group in groups])
        self.ledger.trained(number, version, [TrainedGroup.of(group, version) for group in groups])
        self.trace.checkpoint(number)
        self.ledger.checkpoint(number)


@pytest.fixture
def start(tmp_path, manager, output):
    def build(*, prompts=0, **resumption):
        return Life(tmp_path, manager(batch=2, n=2, prompts=prompts, max_staleness=4), output, **resumption)

    return build


@pytest.fixture
def whole(start, tmp_path):
    """A training of three steps without a kill."""
    life = start(prompts=2 * STEPS)
    for number in range(1, STEPS + 1):
        life.step(number)
    life.ledger.complete()
    return tmp_path


def with_round_changed(run_dir, change, *, step=2):
    """``run_dir``, in whose trace ``change`` has replaced the round event of ``step`` by any number of events."""
    path = run_dir / "trace.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    (at,) = [i for i, event in enumerate(events) if event["event"] == "round" and event["step"] == step]
    events[at : at + 1] = change(deepcopy(events[at]))
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return run_dir


def tamper(run_dir, change, **which):
    return audit(with_round_changed(run_dir, change, **which))[0].violations


def changed(**fields):
    return lambda event: [{**event, **fields}]


def group_changed(**fields):
    """In a trace, of the first group of a round."""
    return lambda event: [{**event, "trained": [{**event["trained"][0], **fields}, *event["trained"][1:]]}]


def test_sound_run_passes_and_says_what_was_compared(whole, capsys):
    result, _ = audit(whole)
    assert result.violations == [] and result.rounds_compared == STEPS
    (whole / "trace.jsonl").unlink()
    assert main([str(whole)]) == 0
    assert "none: not compared" in capsys.readouterr().out, "judged by its ledger alone"


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
        (group_changed(lengths=[5, 6]), r"the ledger has lengths \[5, 5\], the trace \[5, 6\]"),
        (group_changed(staleness=[0, 3]), r"the ledger has staleness \[., .\], the trace \[0, 3\]"),
        (group_changed(tokens=11), "off-policy tokens of 11 generated ones in 10 are impossible"),
        (group_changed(off_policy_tokens=0), "do not agree with staleness"),
    ],
)
def test_tampering_is_named(whole, change, message):
    lines = tamper(whole, change)
    assert lines and all("\n" not in line for line in lines)
    assert re.search(message, "; ".join(lines))


@pytest.mark.parametrize("dies_after", ["begin", "round"])
def test_killed_and_resumed_run_passes(start, tmp_path, dies_after):
    first = start(prompts=2 * STEPS)
    first.step(1)
    state = first.manager.state_dict()
    first.step(2)
    first.step(3, dies_after=dies_after)
    assert audit(tmp_path)[0].violations == [], "before it is resumed"
    second = start(resumed=1, state=state)
    assert audit(tmp_path)[0].violations == [], "before the resumed run has done anything"
    for number in (2, 3):
        second.step(number)
    second.ledger.complete()
    result, _ = audit(tmp_path)
    assert result.violations == [] and result.rounds_compared == 3 and result.undone == 2


def test_a_resume_from_an_abandoned_branch_compares_that_branch(start, tmp_path):
    """The second life resumes step 1 and dies in step 2; the third resumes the first life's step 2."""
    first, states = start(prompts=2 * STEPS), {}
    for number in (1, 2):
        first.step(number)
        states[number] = first.manager.state_dict()
    start(resumed=1, state=states[1]).step(2, dies_after="round")
    third = start(resumed=2, state=states[2])
    third.step(3)
    third.ledger.complete()
    result, _ = audit(tmp_path)
    assert result.violations == [] and result.rounds_compared == 3
    steps, _ = last_attempts(iter_trace(tmp_path / "trace.jsonl"))
    assert [round_.step for round_ in steps] == [1, 2, 3]


def test_power_cut_may_take_the_last_rounds_until_the_run_is_resumed(start, tmp_path):
    life = start(prompts=2 * STEPS)
    for number in (1, 2):
        life.step(number)
    assert tamper(tmp_path, lambda event: []) == []
    assert tamper(tmp_path, lambda event: [], step=1) == [], "no later round is there"
