"""The ledger is written and read line by line, and the audit finds what is wrong in it."""

import json

import pytest

from recipe.partial_rollout.records.jsonl import Resumed
from recipe.partial_rollout.records.ledger import NAME, Ledger, RunSizes, to_json
from recipe.partial_rollout.tools.audit import audit, main
from recipe.partial_rollout.tools.reading.ledger import iter_ledger
from tests.unit.runs import build_run

RUN = to_json(RunSizes("PR", 2, 2, 1, epoch_prompts=4, total=8, offered=8))


def group(uid, *, staleness=0, lengths=(3, 3, 3, 3), masked=False, samples=2):
    columns = {"staleness": [staleness], "lengths": [list(lengths)], "masked": [masked]}
    return {"uid": uid, "order": 0, "birth": 0, **{name: column * samples for name, column in columns.items()}}


def admitted(step, *uids):
    return {"event": "admitted", "step": step, "version": step - 1, "uids": list(uids)}


def trained(step, *groups):
    groups = [group(item) if isinstance(item, str) else item for item in groups]
    return {"event": "trained", "step": step, "version": step - 1, "groups": groups}


def filtered(step, *uids):
    groups = [{"uid": uid, "order": 0, "birth": 0, "value": 0.0, "lengths": [3, 3]} for uid in uids]
    return {"event": "filtered", "step": step, "version": step - 1, "groups": groups}


def resumed(step):
    return {"event": "resumed", "step": step}


COMPLETE = {"event": "complete"}

GOOD = [
    RUN,
    admitted(1, "0/0", "0/1", "0/2"),
    trained(1, "0/0", "0/2"),
    admitted(2, "0/3", "1/0"),
    trained(2, "0/1", "0/3"),
    admitted(3, "1/1"),
    trained(3, "1/0", "1/1"),
    admitted(4, "1/2", "1/3"),
    trained(4, "1/2", "1/3"),
    COMPLETE,
]


# Two epochs of four prompts, two steps: 0/1 and 0/2 are filtered, 1/2 and 1/3 not needed.
FILTERING = {**RUN, "total": 4, "offered": 8, "filters": True}
SAMPLED = [
    FILTERING,
    admitted(1, "0/0", "0/1", "0/2", "0/3"),
    filtered(1, "0/1"),
    trained(1, "0/0", "0/3"),
    admitted(2, "1/0", "1/1"),
    filtered(2, "0/2"),
    trained(2, "1/0", "1/1"),
    COMPLETE,
]


@pytest.fixture
def write(tmp_path):
    def build(*lines):
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        (tmp_path / NAME).write_text(text)
        return tmp_path

    return build


def violations(run_dir):
    return audit(run_dir)[0].violations


def replaced(index, line, lines=GOOD):
    return [*lines[:index], line, *lines[index + 1 :]]


def test_whole_training_has_no_violation(write, capsys):
    run_dir = write(*replaced(8, trained(4, "1/2", group("1/3", masked=True))))
    assert main([str(run_dir)]) == 0
    table = capsys.readouterr().out
    assert "epochs complete" in table and "2 of 2" in table and "8 of 8" in table
    assert "samples masked                    2" in table, "and no violation"


WRONG = [
    ("prompt 1/1 was lost: never trained", replaced(6, trained(3, "1/0"))),
    ("prompt 0/1 was trained 2 times: in steps 2, 4", replaced(8, trained(4, "1/2", "1/3", "0/1"))),
    ("prompt 1/3 was trained and never admitted", replaced(7, admitted(4, "1/2"))),
    ("prompt 7/0 was trained: the training has no such prompt", replaced(8, trained(4, "1/2", "1/3", "7/0"))),
    (
        "sample 1/3#0 was trained in step 4 with staleness 2: at most 1",
        replaced(8, trained(4, "1/2", group("1/3", staleness=2))),
    ),
    ("prompt 1/3 was trained in step 4 with 1 samples of 2", replaced(8, trained(4, "1/2", group("1/3", samples=1)))),
    (
        "sample 1/3#0 of step 4 has 3 tokens, 3 log-probs, 4 versions, 3 mask entries: must be equal",
        replaced(8, trained(4, "1/2", group("1/3", lengths=(3, 3, 4, 3)))),
    ),
    ("a resumed run changed batch_groups from 2 to 4", [*GOOD[:5], {**RUN, "batch_groups": 4}, resumed(2), *GOOD[5:]]),
    (
        "prompt 0/1 was lost: later ones were admitted, it was not",
        [RUN, admitted(1, "0/0", "0/2"), trained(1, "0/0", "0/2")],
    ),
    (
        "5 prompts are admitted and not trained, admission allows 4: 1 were lost, the first maybe 0/0",
        [RUN, admitted(1, "0/0", "0/1", "0/2", "0/3", "1/0", "1/1"), trained(1, "0/1")],
    ),
    ("prompt 0/3 was filtered in step 1 and trained in step 1", replaced(2, filtered(1, "0/3", "0/1"), SAMPLED)),
    ("prompt 0/1 was filtered 2 times: in steps 1, 2", replaced(5, filtered(2, "0/2", "0/1"), SAMPLED)),
    ("prompt 1/2 was filtered and never admitted", replaced(5, filtered(2, "0/2", "1/2"), SAMPLED)),
    ("prompt 0/2 was lost: never trained", replaced(5, filtered(2), SAMPLED)),
    ("the training is complete with 4 prompts trained of 6", replaced(0, {**FILTERING, "total": 6}, SAMPLED)),
]


@pytest.mark.parametrize(("violation", "lines"), WRONG, ids=[violation for violation, _ in WRONG])
def test_violation_is_named(write, capsys, violation, lines):
    run_dir = write(*lines)
    assert violations(run_dir)[0] == violation and main([str(run_dir)]) == 1
    assert f"violation: {violation}" in capsys.readouterr().out


def test_training_that_does_not_drain_ends_with_prompts_in_flight(write):
    """What is in flight may be as much as admission allows, and every step must have trained its batch."""
    beyond = {**RUN, "total": 4, "offered": 8}
    assert violations(write(beyond, *GOOD[1:5], COMPLETE)) == []
    assert violations(write(RUN, *GOOD[1:5], COMPLETE))[0] == "prompt 1/0 was lost: never trained"
    short = violations(write(beyond, *GOOD[1:4], trained(2, "0/1"), COMPLETE))
    assert short == ["the training is complete with 3 prompts trained of 4"]


def test_training_that_drains_after_one_that_did_not_may_have_prompts_left(write):
    """The first process admitted five prompts; the second trains four of them in all."""
    beyond = {**RUN, "total": 2, "offered": 8}
    lines = [beyond, admitted(1, "0/0", "0/1", "0/2", "0/3", "1/0"), trained(1, "0/0", "0/3"), COMPLETE]
    goes_on = [{**RUN, "total": 4, "offered": 4}, resumed(1), trained(2, "0/1", "1/0"), COMPLETE]
    assert violations(write(*lines, *goes_on)) == []


def test_data_may_end_a_filtering_training_with_less_than_a_batch_in_flight(write, capsys):
    ended = {"event": "complete", "exhausted": True}
    sizes = {**FILTERING, "offered": 4}
    assert main([str(write(sizes, *SAMPLED[1:4], ended))]) == 0
    assert "complete: the data could not fill another batch" in capsys.readouterr().out
    for lines, said in (
        ((sizes, SAMPLED[1], trained(1, "0/0", "0/3"), ended), "2 prompts are admitted"),
        ((FILTERING, *SAMPLED[1:4], ended), "5 prompts are admitted and not trained, admission allows 1"),
    ):
        assert violations(write(*lines))[0].startswith(said)


@pytest.mark.parametrize("sampling", [False, True])
def test_prompts_that_the_data_does_not_have_are_not_lost(write, capsys, sampling):
    """``trainer.total_training_steps`` is beyond the data."""
    if sampling:
        lines = ({**FILTERING, "total": 40, "offered": 4}, *SAMPLED[1:4], {"event": "complete", "exhausted": True})
    else:
        lines = ({**RUN, "total": 40}, *GOOD[1:])
    assert main([str(write(*lines))]) == 0, capsys.readouterr().out


def test_start_that_failed_before_it_trained_is_no_kill_and_one_that_trained_is(write):
    failed = [RUN, RUN, *GOOD[1:3]]
    assert audit(write(*failed, RUN, resumed(1), RUN, resumed(1), *GOOD[3:]))[0].kills == 1
    assert audit(write(*failed, *GOOD[3:]))[0].kills == 0


def test_audit_of_nopr_says_what_it_has(tmp_path, capsys):
    build_run(tmp_path / "noPR")
    assert main([str(tmp_path / "noPR")]) == 2
    assert "a run of noPR has no ledger.jsonl" in capsys.readouterr().err


def test_resume_undoes_later_steps_and_staleness_is_judged_by_the_bound_in_force(write):
    result, _ = audit(write(*GOOD, RUN, resumed(0), *GOOD[1:]))
    assert result.violations == [] and result.undone == 8 and result.complete
    late = trained(4, "1/2", group("1/3", staleness=2))
    assert violations(write(*GOOD[:5], {**RUN, "max_staleness": 2}, resumed(2), *GOOD[5:8], late, COMPLETE)) == []


def test_line_cut_off_by_a_kill_is_tolerated_before_a_resume_and_at_the_end(write, capsys):
    run_dir = write(*GOOD[:7], '{"event":"trai', RUN, resumed(1), *GOOD[3:-1], '{"event":"comp')
    assert main([str(run_dir)]) == 0
    assert "2 lines were cut off by a dying process" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        *[([*GOOD[:3], cut, *GOOD[3:]], "line 4: not a JSON object") for cut in ('{"event":"trai', "[]", "\x00\x00")],
        ([*GOOD[:3], '{"event":"dropped"}'], "line 4: 'dropped' is no event"),
        ([*GOOD, "{", "{"], "line 11: not a JSON object"),
        ([RUN, {"event": "trained", "step": 1}], "line 2: 'groups' is missing; it should be a list"),
        (GOOD[1:], "a ledger begins with run"),
        ([], ""),
    ],
)
def test_anything_else_is_unreadable(write, lines, message, capsys):
    assert main([str(write(*lines))]) == 2
    assert message in capsys.readouterr().err


def test_ledger_goes_on_behind_a_line_that_was_cut_off_and_each_line_is_in_the_file_at_once(tmp_path):
    Ledger(tmp_path).add(RunSizes("PR", 2, 1, 1, 2, 2, 2))
    with (tmp_path / NAME).open("a") as file:
        file.write('{"event":"admi')
    ledger = Ledger(tmp_path)
    ledger.add(RunSizes("PR", 2, 1, 1, 2, 2, 2))
    ledger.add(Resumed(0))
    cut_off = []
    events = [event for _, event in iter_ledger(tmp_path / NAME, cut_off)]
    assert [type(event) for event in events] == [RunSizes, RunSizes, Resumed] and len(cut_off) == 1
