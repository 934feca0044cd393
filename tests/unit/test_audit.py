"""``run.jsonl`` is written and read line by line, and the audit finds what is wrong in it."""

import msgspec
import pytest

from recipe.partial_rollout.records.run_log import (
    EngineCall,
    RolloutPhase,
    Round,
    RunLog,
    RunSettings,
    prompt_identity,
)
from recipe.partial_rollout.tools.audit import audit, main
from recipe.partial_rollout.tools.reading.run_log import read_log
from tests.unit.runs import begun, build_group, build_run, ended, large_group, large_run, pr_settings

SIZES = {"arm": "PR", "max_staleness": 1, "epoch_prompts": 4, "total": 8, "offered": 8}
RUN = begun(**SIZES)


def group(uid, *, samples=2, masked=0, **fields):
    epoch, position = map(int, uid.split("/"))
    made = build_group(position, [3] * samples, epoch=epoch)
    return {**made, "order": 4 * epoch + position, "masked": masked, **fields}


def round_of(step, trained, admitted="", filtered="", **fields):
    """Groups of two samples of three tokens; uids are apart by spaces, ``trained`` may have groups."""
    groups = [group(uid) for uid in trained.split()] if isinstance(trained, str) else trained
    gone = [
        {"uid": uid, "order": group(uid)["order"], "birth": 0, "value": 0.0, "lengths": [3, 3]}
        for uid in filtered.split()
    ]
    phase = {"start": 0.0, "end": 3.0, "calls": [EngineCall(0, 1.0, 2.0, 20, step - 1)]}
    known = {"event": "round", "step": step, "phase": phase, "trained": groups}
    return {**known, "admitted": admitted.split(), "filtered": gone, **fields}


def resumed(step, **settings):
    return begun(**{**SIZES, **settings, "resumed": step})


GOOD = [
    RUN,
    round_of(1, "0/0 0/2", "0/0 0/1 0/2"),
    round_of(2, "0/1 0/3", "0/3 1/0"),
    round_of(3, "1/0 1/1", "1/1"),
    round_of(4, "1/2 1/3", "1/2 1/3"),
    ended(4),
]


# Two epochs of four prompts, two steps: 0/1 and 0/2 are filtered, 1/2 and 1/3 not needed.
FILTERING = {**RUN, "total": 4, "offered": 8, "filters": True}
SAMPLED = [
    FILTERING,
    round_of(1, "0/0 0/3", "0/0 0/1 0/2 0/3", "0/1"),
    round_of(2, "1/0 1/1", "1/0 1/1", "0/2"),
    ended(2),
]


@pytest.fixture
def write(tmp_path):
    def build(*lines):
        raw = (line.encode() if isinstance(line, str) else msgspec.json.encode(line) for line in lines)
        (tmp_path / "run.jsonl").write_bytes(b"".join(line + b"\n" for line in raw))
        return tmp_path

    return build


def violations(run_dir):
    return audit(run_dir)[0].violations


def at(step, trained=None, *groups, lines=GOOD, **fields):
    """``lines`` with another round of that step: its groups, or fields of its round."""
    round_ = {**lines[step], **fields} if trained is None else round_of(step, trained, *groups)
    return [*lines[:step], round_, *lines[step + 1 :]]


def sampled(step, *groups):
    return at(step, *groups, lines=SAMPLED)


def with_group(uid, **fields):
    """``GOOD``, the second group of whose last step is this one."""
    return at(4, [group("1/2"), group(uid, **fields)], "1/2 1/3")


def calls(tokens, version):
    return {"phase": {**GOOD[2]["phase"], "calls": [EngineCall(0, 1.0, 2.0, tokens, version)]}}


def filtered_at(birth, bound):
    """``SAMPLED``, the last of whose filtered groups has this ``birth``."""
    gone = [{**each, "birth": birth} for each in SAMPLED[2]["filtered"]]
    return [{**FILTERING, "max_staleness": bound}, *at(2, lines=SAMPLED, filtered=gone)[1:]]


LATE = {"staleness": [2, 2], "off_policy_tokens": 1}
WRONG = {
    "prompt 1/1 was lost: never trained": at(3, "1/0", "1/1"),
    "prompt 0/1 was trained in step 4, and trained in step 2": at(4, "1/2 1/3 0/1", "1/2 1/3"),
    "prompt 1/3 was trained in step 4 and not admitted before": at(4, "1/2 1/3", "1/2"),
    "prompt 0/1 was admitted in step 4, and admitted in step 1": at(4, "1/2 1/3", "1/2 1/3 0/1"),
    "prompts 0/0 and 1/3 have the same dispatch order": with_group("1/3", order=0),
    "step 1 trained 3 groups instead of 2": [RUN, round_of(1, "0/0 0/1 0/2", "0/0 0/1 0/2")],
    "step 2 trained 1 groups instead of 2": [RUN, GOOD[1], round_of(2, "0/1", "0/3 1/0")],
    "step 2 trained 12 tokens of version 1; no engine call of its round decoded any": at(2, **calls(0, 1)),
    **{
        f"prompt 1/3 was trained in step 4 with birth {birth} and staleness {ages}: "
        f"its birth must be from 2 to {3 - max(ages)}":
            with_group("1/3", birth=birth, staleness=ages, off_policy_tokens=max(ages))
        for birth, ages in ((1, [0, 0]), (1, [1, 0]), (3, [0, 1]), (4, [0, 0]))
    },
    "prompt 7/0 was trained in step 4: the training has no such prompt": at(4, "1/2 1/3 7/0", "1/2 1/3"),
    "sample 1/3#0 was trained in step 4 with staleness 2: max_staleness is 1": with_group("1/3", **LATE),
    "prompt 1/3 was trained in step 4 with 1 of 2 samples": with_group("1/3", samples=1),
    "prompt 1/3 in step 4: 100 off-policy tokens of 5 generated ones in 6 are impossible":
        with_group("1/3", tokens=5, off_policy_tokens=100),
    "prompt 1/3 in step 4: 0 off-policy tokens do not agree with staleness [1, 0]": with_group("1/3", staleness=[1, 0]),
    "step 2 has 2 rounds": [*GOOD[:3], round_of(2, ""), *GOOD[3:]],
    "step 2 has 0 rounds": [*GOOD[:2], *GOOD[3:]],
    "the round of step 2 under version 1 has engine calls of version 2": at(2, **calls(20, 2)),
    "3 samples were unaccounted for after the round of step 2": at(2, lost_samples=3),
    "a resumed run changed arm from PR to noPR": [*GOOD[:3], resumed(2, arm="noPR"), *GOOD[3:]],
    "prompt 0/1 was lost: later prompts were admitted, this one was not": [RUN, round_of(1, "0/0 0/2", "0/0 0/2")],
    "5 prompts are admitted and not trained, but at most 4 can be in flight: 1 were lost, the first is perhaps 0/0":
        [RUN, round_of(1, "0/1", "0/0 0/1 0/2 0/3 1/0 1/1")],
    "prompt 0/3 was filtered in step 1, and trained in step 1": sampled(1, "0/0 0/3", "0/0 0/1 0/2 0/3", "0/3 0/1"),
    "prompt 0/1 was filtered in step 2, and filtered in step 1": sampled(2, "1/0 1/1", "1/0 1/1", "0/2 0/1"),
    "prompt 1/2 was filtered in step 2 and not admitted before": sampled(2, "1/0 1/1", "1/0 1/1", "0/2 1/2"),
    "prompt 0/2 was lost: never trained": sampled(2, "1/0 1/1", "1/0 1/1"),
    "prompt 0/2 was filtered in step 2 with birth 2: its birth must be from 0 to 1": filtered_at(2, bound=1),
    "prompt 0/2 was filtered in step 2 with birth 0: its birth must be from 1 to 1": filtered_at(0, bound=0),
    "the training is complete, but trained 4 of 6 prompts": [{**FILTERING, "total": 6}, *SAMPLED[1:]],
}  # fmt: skip


@pytest.mark.parametrize("violation", WRONG)
def test_violation_is_named(write, capsys, violation):
    run_dir = write(*WRONG[violation])
    assert violations(run_dir)[0] == violation and main([str(run_dir)]) == 1
    assert f"violation: {violation}" in capsys.readouterr().out


def test_rows_of_the_data_that_are_alike_are_a_note(write, capsys):
    """The data may hold a row twice; a prompt that is trained twice is found by its uid."""
    run_dir = write(*with_group("1/3", prompt="2"))
    assert violations(run_dir) == [] and main([str(run_dir)]) == 0
    said = "note: 1 trained prompt(s) have index and text of another of their epoch, such as 1/3 of 1/2; the data"
    assert said in capsys.readouterr().out


BEYOND = {**RUN, "total": 4, "offered": 8}
ALL_ADMITTED = [{**BEYOND, "total": 2}, round_of(1, "0/0 0/3", "0/0 0/1 0/2 0/3 1/0"), ended(1)]
ONE_EPOCH = {**FILTERING, "offered": 4}
OVER = ended(1, exhausted=True)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        # A loss is told once.
        (at(3, "1/0", "1/1"), ["prompt 1/1 was lost: never trained", "step 3 trained 1 groups instead of 2"]),
        # Not drained: as much as admission allows may be in flight at the end, and every step must have trained its batch.
        ([BEYOND, *GOOD[1:3], ended(2)], []),
        (
            [BEYOND, GOOD[1], round_of(2, "0/1", "0/3 1/0"), ended(2)],
            ["the training is complete, but trained 3 of 4 prompts", "step 2 trained 1 groups instead of 2"],
        ),
        # One that drains after one that did not: the first process admitted five, the second trains four in all.
        ([*ALL_ADMITTED, resumed(1, total=4, offered=4), round_of(2, "0/1 1/0"), ended(2)], []),
        # The data ends a filtering training with less than a batch in flight.
        ([ONE_EPOCH, SAMPLED[1], OVER], []),
        ([ONE_EPOCH, round_of(1, "0/0 0/3", "0/0 0/1 0/2 0/3"), OVER], ["2 prompts are admitted"]),
        ([FILTERING, SAMPLED[1], OVER], ["5 prompts are admitted and not trained, but at most 1 can be in flight"]),
        # ``trainer.total_training_steps`` is beyond the data.
        ([{**ONE_EPOCH, "total": 40}, SAMPLED[1], OVER], []),
        ([{**RUN, "total": 40}, *GOOD[1:]], []),
        # A run that goes on.
        *((lines, []) for lines in (GOOD[:2], GOOD[:4], [*GOOD[:4], resumed(2)], [*GOOD[:4], resumed(2), GOOD[3]])),
        # Staleness is judged by the bound in force.
        ([*GOOD[:3], resumed(2, max_staleness=2), GOOD[3], *with_group("1/3", **LATE)[4:]], []),
    ],
)
def test_end_of_a_training_is_judged_by_what_it_was_to_train(write, lines, found):
    said = violations(write(*lines))
    assert len(said) == len(found) and all(map(str.startswith, said, found))


def test_whole_training_has_no_violation_and_says_what_became_of_it(write, tmp_path, capsys):
    assert main([str(write(*with_group("1/3", masked=2)))]) == 0
    table = capsys.readouterr().out
    assert "8 of 8" in table and "samples masked                    2" in table
    assert main([str(write(ONE_EPOCH, SAMPLED[1], OVER))]) == 0
    assert "complete: the data could not fill another batch" in capsys.readouterr().out
    assert main([str(build_run(tmp_path / "noPR"))]) == 2
    assert "a run of noPR has nothing to audit" in capsys.readouterr().err


# -- processes that are killed and resumed -----------------------------------------------------------------------------


def test_failed_start_is_no_kill_and_a_resume_undoes_later_steps(write):
    failed = [RUN, resumed(0), GOOD[1]]
    assert audit(write(*failed, resumed(1), resumed(1), *GOOD[2:]))[0].kills == 1
    assert audit(write(*failed, *GOOD[2:]))[0].kills == 0
    result, _ = audit(write(*GOOD, resumed(0), *GOOD[1:]))
    assert result.violations == [] and result.undone == 8 and result.complete


@pytest.mark.parametrize("lost", [GOOD[2:3], GOOD[1:3], GOOD[2:4]])
def test_lines_lost_after_their_checkpoint_accuse_nobody(write, capsys, lost):
    """A process resumes from a step whose checkpoint is whole and whose line never reached the disk."""
    left = [line for line in GOOD[:4] if line not in lost]
    steps = [line["step"] for line in lost]
    run_dir = write(*left[: 4 - len(lost)], resumed(max(steps)), *GOOD[max(steps) + 1 :])
    assert main([str(run_dir)]) == 0, capsys.readouterr().out
    assert f"steps that the log has lost       {', '.join(map(str, steps))}" in capsys.readouterr().out
    # What other steps did twice is still a violation.
    again = round_of(4, "1/2 1/2", "1/2 1/3")
    assert violations(write(*left[: 4 - len(lost)], resumed(max(steps)), *GOOD[max(steps) + 1 : 4], again, ended(4)))


# -- lines that are torn or wrong --------------------------------------------------------------------------------------


def test_line_cut_off_by_a_kill_is_tolerated_at_the_end_of_a_process(write, capsys):
    run_dir = write(*GOOD[:4], '{"event":"rou', resumed(2), *GOOD[3:-1], '{"event":"end')
    assert main([str(run_dir)]) == 0
    assert "2 lines were cut off by a dying process" in capsys.readouterr().out


def test_log_goes_on_wherever_its_last_line_was_cut_off(tmp_path):
    """Whatever a killed process has left of a line, the next one begins on a line of its own, and no reader fails."""
    path = large_run(tmp_path, 1, calls=1, groups=1) / "run.jsonl"
    whole = path.read_bytes()
    begins = whole.index(b'{"event":"round"')
    for cut in range(begins, whole.index(b"\n", begins), 7):
        path.write_bytes(whole[: cut + 1])
        assert [type(event) for event in read_log(tmp_path, [])] == [RunSettings]
        RunLog(tmp_path, pr_settings(1, 8, 8, epoch_prompts=1, total=1), [])
        cut_off = []
        assert len(list(read_log(tmp_path, cut_off))) == 2 and len(cut_off) == 1, cut


def call_of(*fields):
    return [RUN, round_of(1, "", phase={"start": 0.0, "end": 3.0, "calls": [[*fields]]})]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        *[([*GOOD[:2], cut, *GOOD[2:]], "run.jsonl line 3: torn") for cut in ('{"event":"rou', "\x00\x00", "")],
        ([*GOOD[:2], "[]"], "run.jsonl line 3: Expected `object`"),
        ([*GOOD[:2], '{"event":"dropped"}'], "line 3: Invalid value 'dropped' - at `$.event`"),
        ([*GOOD, "{", "{"], "line 7: torn"),
        ([RUN, {"event": "round", "step": 1}], "line 2: Object missing required field `phase`"),
        ([RUN, round_of(0, "")], "line 2: Expected `int` >= 1 - at `$.step`"),
        (with_group("1/3", staleness=[1]), "line 5: group 7 has lists of different lengths"),
        ([RUN, round_of(1, [{**group("0/0"), "uid": "seven"}])], "- at `$.trained[0].uid`"),
        (call_of(0, 1.0, "2", 20, 0), "line 2: Expected `float`, got `str` - at `$.phase.calls[0][2]`"),
        (call_of("a:1", 1.0, 2.0, 20, 0), "line 2: a call has a replica without an index"),
        (GOOD[1:], "the log does not begin with an event 'run'"),
        ([], "has no event"),
    ],
)
def test_anything_else_is_unreadable_in_a_line(write, lines, message, capsys):
    assert main([str(write(*lines))]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_calls_and_any_word_of_a_users_row_are_read_as_they_were_written(tmp_path):
    call = EngineCall(0, 0.0, 10.0, 7, 1, 2, 30, 2.5, "a", True, 1.5)
    word = prompt_identity({"index": "\udc80é"})
    trained = msgspec.structs.replace(large_group(0, 0), prompt=word)
    log = RunLog(tmp_path, pr_settings(2, 8, 1, epoch_prompts=6, total=6), ["r0"])
    phase = RolloutPhase(0.0, 9.0, [msgspec.structs.replace(call, replica="r0")])
    log.round(Round(step=1, phase=phase, trained=[trained]))
    (found,) = (event for event in read_log(tmp_path, []) if isinstance(event, Round))
    assert list(found.phase.calls) == [call] == list(log.last_round.phase.calls)
    assert word.startswith(r"\udc80é-") and found.trained[0].prompt == word
    written = (tmp_path / "run.jsonl").read_text()
    assert '"calls":[[0,0.0,10.0,7,1,2,30,2.5,"a",true,1.5]]' in written
