"""The report over small runs whose figures can be worked out by hand. Times are seconds after `ZERO`."""

import json

import pytest

from recipe.partial_rollout.records.fields import RunRecordError
from recipe.partial_rollout.records.run import load_run
from recipe.partial_rollout.tools.report.command import main
from recipe.partial_rollout.tools.report.comparison import compare
from recipe.partial_rollout.tools.report.findings import cautions, findings
from recipe.partial_rollout.tools.report.table import report_markdown, tables
from recipe.partial_rollout.tools.report.timeline import CLOSE_UP_ABOVE, CLOSE_UP_ROUNDS, close_up

pytestmark = pytest.mark.filterwarnings("error:constrained_layout not applied")

ZERO = 1_700_000_000.0


def build_group(index, lengths, *, prompt=None, epoch=0, staleness=0, off_policy=0, segments=1):
    return {
        "group": index,
        "prompt": str(index) if prompt is None else prompt,
        "epoch": epoch,
        "lengths": lengths,
        "staleness": [staleness] * len(lengths),
        "segments": [segments] * len(lengths),
        "tokens": sum(lengths),
        "off_policy_tokens": off_policy,
    }


def build_round(step, *, start, end, calls=(), trained=(), interrupt=None, resume=None, carried=0, lost=0):
    """A call is (replica, start, end, tokens)."""
    return {
        "event": "round",
        "step": step,
        "version": step - 1,
        "start": ZERO + start,
        "end": ZERO + end,
        "calls": [[replica, ZERO + begin, ZERO + stop, tokens, step - 1] for replica, begin, stop, tokens in calls],
        "interrupt_s": interrupt,
        "resume_s": resume,
        "trained": list(trained),
        "carried_groups": carried,
        "lost_samples": lost,
    }


def build_probe(speed):
    return {"event": "probe", "start": 0.0, "end": 1.0, "tokens": speed, "tokens_per_s": speed, "concurrency": 4}


def default_rounds(steps=2):
    """Each round lasts 10 s, runs 4 samples of 100 tokens for 5 s, and trains two groups in dispatch order."""
    return [
        build_round(
            step,
            start=20 * (step - 1),
            end=20 * (step - 1) + 10,
            calls=[(i % 2, 20 * (step - 1), 20 * (step - 1) + 5, 100) for i in range(4)],
            trained=[build_group(2 * step - 2, [100, 100]), build_group(2 * step - 1, [100, 100])],
        )
        for step in range(1, steps + 1)
    ]


def build_run(path, *, arm="noPR", rounds=None, probes=(100,), metrics=None, step_s=20.0, phases=(), **settings):
    """`metrics` is by step and replaces what is logged for it; None leaves the step out."""
    rounds = default_rounds() if rounds is None else rounds
    run = {
        "arm": arm,
        "experiment": "tiny",
        "batch_groups": 2,
        "samples_per_group": 2,
        "replicas": 2,
        "slots_per_replica": 8,
        "max_staleness": 4,
        "mode": "window",
        "policy": "bounded",
        "verl": "0.9.1",
        "vllm": "0.0",
        "complete": True,
    }
    lines = {
        r["step"]: {
            "timing_s/step": step_s,
            "timing_s/gen": r["end"] - r["start"],
            "timing_s/update_actor": 4.0,
            "critic/score/mean": float(r["step"]),
        }
        for r in rounds
    }
    lines = {step: data for step, data in {**lines, **(metrics or {})}.items() if data is not None}
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({**run, **settings}))
    write_lines(path / "metrics.jsonl", [{"step": step, "data": data} for step, data in sorted(lines.items())])
    write_lines(path / "trace.jsonl", [*map(build_probe, probes), *rounds, *phases])
    return path


def write_lines(path, objects):
    path.write_text("".join(json.dumps(o) + "\n" for o in objects))


def summary_of(path):
    return compare([load_run(path)]).base.summary


def compared(tmp_path, *, base=None, other=None):
    first = build_run(tmp_path / "a", **(base or {}))
    second = build_run(tmp_path / "b", arm="PR", **(other or {}))
    return compare([load_run(first), load_run(second)])


def test_bubble_is_the_share_of_slots_that_stood_empty(tmp_path):
    # Full is 4 slots. 10 s: four run for 5 s, one of them goes on to the end: 4*5 + 1*5 of 40 slot seconds.
    calls = [(0, 0, 5, 50), (0, 0, 5, 50), (1, 0, 5, 50), (1, 0, 10, 100)]
    rounds = [build_round(1, start=0, end=10, calls=calls, trained=[build_group(0, [50, 50])])]
    assert summary_of(build_run(tmp_path / "a", rounds=rounds)).bubble_fraction == pytest.approx(1 - 25 / 40)


def test_full_is_every_slot_where_the_batch_is_larger(tmp_path):
    path = build_run(tmp_path / "a", slots_per_replica=1)
    assert load_run(path).settings.full_concurrency == 2


def test_efficiency_is_decoded_over_what_a_full_engine_decodes(tmp_path):
    summary = summary_of(build_run(tmp_path / "a", probes=[70, 80, 1000]))
    assert (summary.decoded_tokens, summary.rollout_s, summary.train_s) == (800, 20, 20)
    assert summary.decoded_tokens_per_s == 40
    assert summary.efficiency == pytest.approx(40 / 80)


def test_arm_without_a_probe_borrows_the_other_arms(tmp_path):
    comparison = compared(tmp_path, base={"probes": []}, other={"probes": [200]})
    assert comparison.base.summary.efficiency == pytest.approx(40 / 200)
    assert comparison.full_speed == 200


def test_efficiency_of_every_run_is_against_one_probe(tmp_path):
    comparison = compared(tmp_path, base={"probes": [80, 80]}, other={"probes": [200, 120]})
    assert comparison.full_speed == 100
    assert [side.summary.efficiency for side in comparison.sides] == [pytest.approx(40 / 100)] * 2


def test_no_probe_at_all_leaves_efficiency_unknown_and_says_so(tmp_path):
    comparison = compared(tmp_path, base={"probes": []}, other={"probes": []})
    assert comparison.base.summary.efficiency is None
    assert "no run has a probe" in " ".join(comparison.warnings)


def test_probe_slower_than_the_run_itself_is_warned_of(tmp_path):
    comparison = compared(tmp_path, base={"probes": [10]}, other={"probes": [20]})
    assert any("noPR decoded faster" in warning for warning in comparison.warnings)
    assert any("not alike" in line for line in comparison.unlike)


def test_length_bias_is_as_both_arms_log_it_after_the_first_step_the_fifth_and_the_last(tmp_path):
    def logged(bias):
        return {"timing_s/step": 20.0, "timing_s/gen": 10.0, "0_overview/length_bias": bias}

    biases = {step: logged(step / 10) for step in range(1, 7)}
    long = summary_of(build_run(tmp_path / "a", rounds=default_rounds(steps=6), metrics=biases))
    assert long.length_bias == {"step_1": 0.1, "steps_1_to_5": 0.5, "run": 0.6}
    short = summary_of(build_run(tmp_path / "b", metrics={2: logged(0.9)}))
    assert short.length_bias == {"step_1": None, "steps_1_to_5": None, "run": 0.9}


def test_staleness_segments_and_off_policy_share(tmp_path):
    trained = [build_group(0, [10, 10]), build_group(1, [40, 40], staleness=3, off_policy=60, segments=2)]
    summary = summary_of(build_run(tmp_path / "a", rounds=[build_round(1, start=0, end=10, trained=trained)]))
    assert (summary.staleness.mean, summary.staleness.max) == (1.5, 3)
    assert (summary.segments_per_sample.mean, summary.segments_per_sample.max) == (1.5, 2)
    assert summary.off_policy_token_fraction == pytest.approx(0.6)


def test_interrupt_is_unknown_where_no_round_was_interrupted(tmp_path):
    rounds = default_rounds(steps=3)
    assert summary_of(build_run(tmp_path / "a", rounds=rounds)).interrupt_s is None
    for r, value in zip(rounds, (0.1, None, 0.5), strict=True):
        r["interrupt_s"] = value
    wait = summary_of(build_run(tmp_path / "b", rounds=rounds)).interrupt_s
    assert (wait.median, wait.max) == (pytest.approx(0.3), 0.5)


def test_gpu_utilisation_is_weighted_by_the_time_of_the_steps(tmp_path):
    def logged(step_s, share):
        return {"timing_s/step": step_s, "timing_s/gen": 10.0, "partial_rollout/gpu/utilisation": share}

    path = build_run(tmp_path / "a", metrics={1: logged(10.0, 1.0), 2: logged(30.0, 0.2)})
    assert summary_of(path).gpu_utilisation == pytest.approx(0.4)
    without = compare([load_run(build_run(tmp_path / "b"))])
    assert without.base.summary.gpu_utilisation is None
    assert "GPU utilisation" not in report_markdown(without, ["x.png"])


def test_phase_that_no_timer_covers_is_other_and_validation_is_outside_the_step(tmp_path):
    data = {"timing_s/step": 20.0, "timing_s/gen": 10.0, "timing_s/update_actor": 4.0, "timing_s/testing": 7.0}
    summary = summary_of(build_run(tmp_path / "a", rounds=default_rounds(steps=1), metrics={1: data}))
    assert summary.phases_s["other"] == pytest.approx(6)
    assert summary.phases_s["testing"] == 7
    assert summary.step_s == 20


def test_ratios_are_per_trained_token(tmp_path):
    # PR trains half of the tokens in a quarter of the rollout time.
    rounds = [build_round(1, start=0, end=5, calls=[(0, 0, 5, 400)], trained=default_rounds()[0]["trained"])]
    comparison = compared(tmp_path, other={"rounds": rounds})
    (contrast,) = comparison.others
    assert contrast.ratios["rollout_s"] == pytest.approx(0.25)
    assert contrast.ratios["rollout_s_per_trained_token"] == pytest.approx(0.5)
    assert contrast.ratios["step_s_per_trained_token"] == pytest.approx(1)


@pytest.mark.parametrize("reverse", [False, True])
def test_order_of_arguments_does_not_matter_when_arms_differ(tmp_path, reverse, capsys):
    runs = [build_run(tmp_path / "a"), build_run(tmp_path / "b", arm="PR", step_s=15.0)]
    assert main([*map(str, reversed(runs) if reverse else runs), "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["runs"]["noPR"]["step_s"], report["runs"]["PR"]["step_s"]) == (40, 30)
    assert report["against_base"]["PR"]["ratios"]["step_s"] == pytest.approx(0.75)
    assert report["against_base"]["PR"]["equal_work"]["equal"]
    assert "0.75 of its step time" in capsys.readouterr().out


def test_runs_of_one_arm_are_called_by_what_differs_in_their_directories(tmp_path):
    runs = [load_run(build_run(tmp_path / name / "seed_1", arm="PR")) for name in ("bounded", "seed", "april")]
    assert [side.name for side in compare(runs).sides] == ["bounded", "seed", "april"]


def test_any_number_of_runs_is_compared_with_the_first_one_of_nopr(tmp_path):
    arms = {"pr_1": "PR", "plain": "noPR", "pr_2": "PR"}
    runs = [load_run(build_run(tmp_path / name, arm=arm)) for name, arm in arms.items()]
    comparison = compare(runs)
    assert [side.name for side in comparison.sides] == ["plain", "pr_1", "pr_2"]
    figures = next(table for table in tables(comparison) if table.title == "Figures")
    assert figures.header == ["", "plain", "pr_1", "pr_1 / plain", "pr_2", "pr_2 / plain"]


def test_one_run_alone_is_reported(tmp_path, capsys):
    assert main([str(build_run(tmp_path / "a", arm="PR"))]) == 0
    assert "PR trained 4 groups in 2 steps of 20.0 s, 50.0% of it rollout." in capsys.readouterr().out


def test_long_runs_get_a_close_up_of_the_middle(tmp_path):
    rounds = default_rounds(steps=CLOSE_UP_ABOVE + 2)
    close = close_up(compared(tmp_path, base={"rounds": rounds}, other={"rounds": rounds}))
    assert [len(side.run.rounds) for side in close.sides] == [CLOSE_UP_ROUNDS, CLOSE_UP_ROUNDS]
    assert close.base.run.rounds[0].step == 12
    short = {"rounds": default_rounds(steps=3)}
    assert close_up(compared(tmp_path / "short", base=short, other=short)) is None


def test_unequal_work_is_flagged_in_words(tmp_path):
    rounds = default_rounds()
    rounds[1]["trained"] = [build_group(0, [100, 100])]
    comparison = compared(tmp_path, other={"rounds": rounds})
    work = comparison.others[0].equal_work
    assert not work.equal and not work.trained_groups_equal and not work.same_prompts
    assert work.each_prompt_once == {"noPR": True, "PR": False}
    assert findings(comparison)[0].startswith("Not equal work: per trained token, PR took ")
    assert "PR trained 1 prompts more than once in an epoch, e.g. '0' of epoch 0 2 times" in cautions(comparison)[0]
    assert "**The work differs: " in report_markdown(comparison, ["timeline.png"]).splitlines()[2]


def test_one_prompt_in_two_epochs_is_no_repetition(tmp_path):
    rounds = default_rounds()
    for r in rounds:
        r["trained"] = [build_group(r["step"], [100, 100], prompt="same", epoch=r["step"])]
    comparison = compared(tmp_path, base={"rounds": rounds}, other={"rounds": rounds})
    assert comparison.others[0].equal_work.equal


def test_order_of_training_does_not_matter_to_equal_work(tmp_path):
    rounds = default_rounds()
    rounds[0]["trained"], rounds[1]["trained"] = rounds[1]["trained"], rounds[0]["trained"]
    assert compared(tmp_path, other={"rounds": rounds}).others[0].equal_work.equal


def test_different_settings_an_unfinished_run_and_lost_samples_are_warned_of(tmp_path):
    rounds = default_rounds()
    rounds[0]["lost_samples"] = 3
    comparison = compared(tmp_path, other={"rounds": rounds, "replicas": 4, "complete": False})
    assert "PR lost 3 samples; a sound run loses none" in comparison.warnings
    assert cautions(comparison) == [
        "PR is not complete: 2 steps so far",
        "The runs differ in replicas: noPR 2, PR 4",
    ]


@pytest.mark.parametrize("name", ["trace.jsonl", "metrics.jsonl"])
def test_torn_last_line_is_left_out_with_a_warning(tmp_path, name):
    path = build_run(tmp_path / "a") / name
    with path.open("a") as file:
        file.write('{"event": "rou')
    warnings = load_run(path.parent).warnings
    assert len(warnings) == 1 and "torn" in warnings[0] and name in warnings[0]


def test_torn_line_elsewhere_is_an_error_that_names_it(tmp_path):
    path = build_run(tmp_path / "a") / "trace.jsonl"
    path.write_text('{"event": "rou\n' + path.read_text())
    with pytest.raises(RunRecordError, match=r"trace\.jsonl line 1: not a JSON object"):
        load_run(path.parent)


def test_torn_line_of_a_killed_run_is_left_out_where_it_resumes(tmp_path):
    path = build_run(tmp_path / "a") / "trace.jsonl"
    first, rest = path.read_text().split("\n", 1)
    path.write_text(f'{first}\n{{"event": "rou\n{{"event": "resumed", "step": 0}}\n{rest}')
    run = load_run(path.parent)
    assert [step.number for step in run.steps] == [1, 2]
    assert len(run.warnings) == 1 and "line 2: torn" in run.warnings[0]


def test_validation_only_lines_and_null_values_are_tolerated(tmp_path):
    path = build_run(tmp_path / "a", metrics={0: {"val-core/acc": 0.5, "val-aux/x": None}})
    assert [step.number for step in load_run(path).steps] == [1, 2]


def test_unknown_events_are_skipped(tmp_path):
    path = build_run(tmp_path / "a", phases=[{"event": "note", "text": "hello"}])
    assert load_run(path).warnings == []


def test_round_without_timers_is_left_out_with_a_warning(tmp_path):
    run = load_run(build_run(tmp_path / "a", rounds=default_rounds(steps=4), metrics={3: None, 4: None}))
    assert [step.number for step in run.steps] == [1, 2]
    assert any("steps 3-4 have a round but no timers" in warning for warning in run.warnings)


def test_resumed_run_counts_the_last_attempt_at_a_step(tmp_path):
    first, again = default_rounds(steps=3), default_rounds(steps=3)[1:]
    for r in again:
        r["trained"] = [build_group(9, [7, 7])]
    run = load_run(build_run(tmp_path / "a", rounds=[*first, *again]))
    assert [step.lengths for step in run.steps] == [[100] * 4, [7, 7], [7, 7]]
    assert any("steps 2-3 were begun again" in warning for warning in run.warnings)


def test_disagreeing_clocks_are_warned_of(tmp_path):
    data = {"timing_s/step": 20.0, "timing_s/gen": 5.0}
    run = load_run(build_run(tmp_path / "a", rounds=default_rounds(steps=1), metrics={1: data}))
    assert "timing_s/gen adds up to 5.0 s but the rounds of trace.jsonl to 10.0 s" in run.warnings[0]


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "trace.jsonl"])
def test_missing_file_is_one_clear_line_and_status_2(tmp_path, name, capsys):
    runs = [build_run(tmp_path / "a"), build_run(tmp_path / "b", arm="PR")]
    (runs[1] / name).unlink()
    assert main(list(map(str, runs))) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {runs[1] / name}: cannot be read (No such file or directory)")
    assert "give the directory of a run" in error and error.count("\n") == 1


def test_missing_directory_is_status_2(tmp_path, capsys):
    assert main([str(tmp_path / "no"), str(tmp_path / "no")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_table_of_runs_shows_how_far_a_group_may_overtake(tmp_path):
    limited = build_run(tmp_path / "a", arm="PR", overtake=1.5)
    before_the_field = build_run(tmp_path / "b", arm="PR")
    (runs,) = [
        table for table in tables(compare([load_run(limited), load_run(before_the_field)])) if table.title == "Runs"
    ]
    (row,) = [row for row in runs.rows if row[0] == "overtake"]
    assert row[1:] == ["1.5", "None"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"arm": "both"}, "'arm' is 'both'; it should be one of noPR, PR"),
        ({"replicas": 0}, "'replicas' is 0; it should be at least 1"),
        ({"batch_groups": "2"}, "'batch_groups' is '2'; it should be an integer"),
        ({"complete": 1}, "'complete' is 1; it should be true or false"),
    ],
)
def test_bad_setting_names_key_value_and_range(tmp_path, settings, message):
    with pytest.raises(RunRecordError) as error:
        load_run(build_run(tmp_path / "a", **settings))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"calls": [[0, 1.0]]},
            "a call should be [replica, start, end, tokens, version, resumed tokens, context tokens, queued seconds, "
            "sample, interrupted]",
        ),
        ({"calls": [[7, 1.0, 2.0, 3, 0]]}, "a call names replica 7, but run.json says 2 replicas"),
        ({"end": ZERO - 1}, "before it starts"),
        ({"trained": ["x"]}, "'trained' should hold one object a group"),
        ({"trained": [{**build_group(0, [1, 1]), "segments": [1]}]}, "group 0 has lists of different lengths"),
    ],
)
def test_bad_round_names_its_line(tmp_path, change, message):
    rounds = default_rounds(steps=1)
    rounds[0].update(change)
    with pytest.raises(RunRecordError) as error:
        load_run(build_run(tmp_path / "a", rounds=rounds))
    assert "trace.jsonl line 2" in str(error.value) and message in str(error.value)


def test_run_without_a_finished_step_is_an_error(tmp_path):
    with pytest.raises(RunRecordError, match="no step has both a round"):
        load_run(build_run(tmp_path / "a", metrics={1: None, 2: {"val-core/acc": 0.5}}))
