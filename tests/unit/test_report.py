"""The report's figures and sentences over small runs that can be worked out by hand, in turns and separate."""

import json
import os
import subprocess
import sys

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from recipe.partial_rollout.tools.reading.run_log import RunRecordError
from recipe.partial_rollout.tools.report.command import main
from recipe.partial_rollout.tools.report.comparison import compare
from recipe.partial_rollout.tools.report.findings import cautions, findings
from recipe.partial_rollout.tools.report.lanes import Trainer, lanes_of
from recipe.partial_rollout.tools.report.panels import draw_panels
from recipe.partial_rollout.tools.report.summary import Summary
from recipe.partial_rollout.tools.report.table import report_markdown, tables
from recipe.partial_rollout.tools.report.timeline import draw_timeline
from recipe.partial_rollout.tools.run_record import load_run
from tests.unit.runs import begun, build_group, build_round, build_run, default_rounds, halves, separate_run

pytestmark = pytest.mark.filterwarnings("error:constrained_layout not applied")


@pytest.fixture
def run(tmp_path):
    """One with separate placement."""
    return load_run(separate_run(tmp_path / "separate"))


def summary_of(path):
    return compare([load_run(path)]).base.summary


def compared(tmp_path, *, base=None, other=None):
    runs = build_run(tmp_path / "a", **(base or {})), build_run(tmp_path / "b", arm="PR", **(other or {}))
    return compare([*map(load_run, runs)])


def in_turns(path):
    """The rounds of ``separate_run`` as if engines and trainer had taken turns: no call crosses a round."""
    starts = (0, 20, 40)
    rounds = [
        build_round(step, start=start, end=start + 10, calls=[(0, start, start + 10, 200)], trained=halves(step))
        for step, start in enumerate(starts, start=1)
    ]
    phases = [("train", step, start + 10, start + 20) for step, start in enumerate(starts, start=1)]
    return separate_run(path, rounds=rounds, phases=phases, placement="colocated", arm="noPR")


def spans(bars):
    return [(start, start + length) for start, length in bars]


def cells(comparison):
    (table,) = [table for table in tables(comparison) if table.title == "Metrics"]
    return {row[0]: row[1:] for row in table.rows}


# -- figures -----------------------------------------------------------------------------------------------------------


def test_figures_of_a_rollout_are_those_worked_out_by_hand(tmp_path):
    # Full is 4 slots. 10 s: four run for 5 s, one of them goes on to the end: 4*5 + 1*5 of 40 slot seconds.
    calls = [(0, 0, 5, 50), (0, 0, 5, 50), (1, 0, 5, 50), (1, 0, 10, 100)]
    trained = [build_group(0, [10, 10]), build_group(1, [40, 40], staleness=3, off_policy=60, segments=2)]
    rounds = [build_round(1, start=0, end=10, calls=calls, trained=trained, interrupt=0.5)]
    path = build_run(tmp_path / "a", rounds=rounds)
    summary = summary_of(path)
    assert summary.bubble_fraction == pytest.approx(1 - 25 / 40)
    assert (summary.decoded_tokens, summary.rollout_s, summary.step_s) == (250, 10, 20)
    assert summary.interrupt_s.mean == 0.5 and summary_of(build_run(tmp_path / "b")).interrupt_s is None
    assert (summary.staleness.mean, summary.staleness.max) == (1.5, 3)
    assert (summary.segments_per_sample.mean, summary.segments_per_sample.max) == (1.5, 2)
    assert summary.off_policy_token_fraction == pytest.approx(0.6)
    assert load_run(build_run(tmp_path / "c", slots_per_replica=1)).settings.full_concurrency == 2


# -- the table of runs ---------------------------------------------------------------------------------------------------


def validated(*, at):
    """Metrics of a run that validates on two sets at one of its three steps, as verl logs them."""
    scores = {"timing_s/testing": 1260.0, "val-aux/math/reward/mean@8": 9.0}
    for value, key in enumerate(("val-core/math/acc", "val-core/aime/acc"), 1):
        scores |= {f"{key}/mean@8": value / 10, f"{key}/best@8/mean": value / 5, f"{key}/best@8/std": 0.01}
        scores |= {f"{key}/maj@8/mean": value / 8}
    timers = {"timing_s/step": 600.0, "timing_s/gen": 10.0, "partial_rollout/rollout/device_use": 0.6}
    return {step: {**timers, **(scores if step == at else {})} for step in range(4)}


def test_published_table_of_runs_has_a_line_a_run(tmp_path, capsys):
    rounds = default_rounds(steps=3)
    runs = [
        build_run(tmp_path / "a", rounds=rounds, metrics=validated(at=3), trainer="fsdp2"),
        build_run(tmp_path / "b|2", rounds=rounds, metrics=validated(at=2), arm="PR", complete=False),
        build_run(tmp_path / "c", rounds=rounds, arm="PR", mode="april", placement="separate"),
    ]
    lines, by_source, *_ = tables(compare(list(map(load_run, runs))))
    first, second, third = (dict(zip(lines.header, row, strict=True)) for row in lines.rows)
    assert first == {
        "run": "a", "mode": "noPR", "trainer, engine": "fsdp2, vLLM 0.0, in turn", "steps": "3", "time, h:mm": "0:51",
        "mean@k": "0.150 @8", "best@k": "0.300 @8", "maj@k": "0.188 @8", "at step": "3", "empty slots": "50.0%",
        "devices busy": "60.0%", "staleness, mean / p95 / max": "0.00 / 0 / 0",
    }  # fmt: skip
    assert (second["mode"], second["steps"], second["at step"]) == ("PR, window", "3 so far", "2")
    assert (third["mode"], third["trainer, engine"]) == ("PR, april", "-, vLLM 0.0, separate")
    assert third["mean@k"] == third["at step"] == third["devices busy"] == "-"
    assert ["aime/acc, mean@8", "0.200", "0.200", "-"] in by_source.rows
    # In every form that is saved.
    assert main([*map(str, runs), "--out", str(tmp_path / "out")]) == 0
    assert "0.150 @8" in capsys.readouterr().out
    text = (tmp_path / "out/report.md").read_text()
    assert "| a | noPR | fsdp2, vLLM 0.0, in turn | 3 | 0:51 | 0.150 @8 |" in text
    assert r"| b\|2 | PR, window |" in text
    assert "<td>0.150 @8</td>" in (tmp_path / "out/report.html").read_text()
    assert json.loads((tmp_path / "out/report.json").read_text())["runs"]["a"]["total_s"] == 3060


# -- comparisons -------------------------------------------------------------------------------------------------------


def test_any_number_of_runs_is_compared_with_the_first_one_of_nopr(tmp_path, capsys):
    arms = {"pr_1": {"arm": "PR", "step_s": 15.0}, "plain": {}, "pr_2": {"arm": "PR"}}
    runs = [str(build_run(tmp_path / name / "seed_1", **settings)) for name, settings in arms.items()]
    assert main([*runs, "--out", str(tmp_path / "out")]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    step_s = {name: run["step_s"] for name, run in report["runs"].items()}
    assert step_s == {"plain/seed_1": 40, "pr_1/seed_1": 30, "pr_2/seed_1": 40}
    against = report["against_base"]["pr_1/seed_1"]
    assert against["ratios"]["step_s"] == pytest.approx(0.75) and against["differences"] == []
    assert "0.75 of its step time" in capsys.readouterr().out


@pytest.mark.parametrize(
    "draws",
    ["tools.report import panels as _", "training.step_log import _empty; _empty()"],
    ids=["report", "training"],
)
def test_users_choice_of_matplotlibs_backend_spoils_no_picture(draws):
    """matplotlib cannot be imported with one that it does not know."""
    code = f"from recipe.partial_rollout.{draws}"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "MPLBACKEND": "mine"}, timeout=200)


def test_runs_that_have_only_cold_steps_say_so_and_leave_out_none(tmp_path):
    comparison = compared(tmp_path, base={"rounds": default_rounds(1)}, other={"rounds": default_rounds(1)})
    assert findings(comparison)[0] == (
        "The same 2 groups: per trained token, PR took 1.00 of noPR's rollout time and 1.00 of its step time."
    )
    assert cautions(comparison) == [
        f"{name} has only first steps after a start, whose engines are cold: its times say little"
        for name in ("noPR", "PR")
    ]


@pytest.mark.parametrize("steps", [2, 12])
def test_headline_leaves_out_the_step_whose_engines_start_cold(tmp_path, steps):
    """noPR's first round took 32 s in a fresh quick start, and PR's 4 s."""
    base, other = default_rounds(steps), default_rounds(steps)
    base[0]["phase"]["end"] += 500
    for round_ in other:
        round_["phase"]["end"] -= 5
    comparison = compared(tmp_path, base={"rounds": base}, other={"rounds": other})
    assert findings(comparison)[0] == (
        f"The same {2 * steps} groups: per trained token, PR took 0.50 of noPR's rollout time and 1.00 of its step time, "
        "without the first step after each start, whose engines are cold."
    )


@pytest.mark.parametrize("draw", [draw_timeline, draw_panels])
def test_title_of_a_picture_fits_its_width(tmp_path, monkeypatch, draw):
    drawn = []

    def savefig(figure, path):
        figure.draw_without_rendering()
        title = figure.findobj(lambda artist: isinstance(artist, Text) and artist.get_text().startswith("word"))[0]
        drawn.append((title.get_window_extent().width, figure.bbox.width))

    monkeypatch.setattr(Figure, "savefig", savefig)
    draw(compared(tmp_path), "word " * 50, tmp_path / "picture.png")
    ((title, picture),) = drawn
    assert title <= picture


def test_unequal_work_is_flagged_in_words(tmp_path):
    rounds = default_rounds()
    rounds[1]["trained"] = [build_group(0, [100, 100])]
    comparison = compared(tmp_path, other={"rounds": rounds})
    (contrast,) = comparison.others
    assert contrast.ratios["rollout_s"] == pytest.approx(1), "PR trains half of the tokens after its first step"
    for name in ("rollout_s_per_trained_token", "step_s_per_trained_token"):
        assert contrast.ratios[name] == pytest.approx(2), name
    assert findings(comparison)[0].startswith("Not equal work: per trained token, PR took ")
    assert cautions(comparison)[0] == (
        "The work differs: noPR trained 2 prompts that PR did not, or trained less often, e.g. '2' of epoch 0; "
        "PR trained 1 prompts that noPR did not, or trained less often, e.g. '0' of epoch 0"
    )
    assert "**The work differs: " in report_markdown(comparison).splitlines()[2]


def test_unlike_settings_unfinished_runs_drift_and_losses_are_warned_of(tmp_path):
    kl = [0.0002] * 8 + [0.0085, 0.0001, 0.0157]
    timers = {"timing_s/step": 20.0, "timing_s/gen": 10.0}
    drifts = {step: {**timers, "rollout_corr/k3_kl": value} for step, value in enumerate(kl, 1)}
    rounds = default_rounds(steps=len(kl))
    base = {"rounds": default_rounds(steps=len(kl))}
    rounds[0]["lost_samples"] = 3
    comparison = compared(
        tmp_path, base=base, other={"rounds": rounds, "metrics": drifts, "replicas": 4, "complete": False}
    )
    lost, drifted = comparison.warnings
    assert lost == "PR lost 3 samples; a sound run loses none"
    assert drifted.startswith("PR drifted") and "at step 9, 11:" in drifted
    assert cautions(comparison) == [
        "PR is not complete: 11 steps so far",
        "The runs differ in replicas: noPR 2, PR 4",
    ]


# -- records that are damaged, cut off or of a run that was resumed ------------------------------------------------------


def test_resumed_run_counts_the_last_attempt_at_a_step_and_starts_cold(tmp_path):
    first, again = default_rounds(steps=3), default_rounds(steps=4)[1:]
    for cold in (first[0], again[0]):
        cold["phase"]["end"] += 500
    again[1]["trained"] = [build_group(9, [200, 200])]
    run = load_run(build_run(tmp_path / "a", rounds=[*first, begun(resumed=1), *again]))
    assert [group.lengths for group in run.trained_groups][4:6] == [[200, 200], [100, 100]]
    assert any("2 steps (2 to 3) trained again" in warning for warning in run.warnings)
    assert Summary(run).rollout_s_per_trained_token == pytest.approx(10 / 400)


def test_round_without_timers_is_left_out_with_a_warning(tmp_path):
    run = load_run(build_run(tmp_path / "a", rounds=default_rounds(steps=4), metrics={3: None, 4: None}))
    assert [step.number for step in run.steps] == [1, 2]
    assert any("2 steps (3 to 4) with a round but no timers" in warning for warning in run.warnings)
    with pytest.raises(RunRecordError, match="no step has both a round"):
        load_run(build_run(tmp_path / "b", metrics={1: None, 2: {"val-core/acc": 0.5}}))


@pytest.mark.parametrize("name", ["run.jsonl", "metrics.jsonl"])
def test_missing_file_is_one_clear_line_and_status_2(tmp_path, name, capsys):
    run = build_run(tmp_path / "a")
    (run / name).unlink()
    assert main([str(run)]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {run / name}: cannot be read (No such file or directory)")
    assert "give the directory of a run" in error


# -- separate placement: what ran when ---------------------------------------------------------------------------------


def test_each_lane_is_in_one_state_at_a_time(run):
    lanes = lanes_of(run)
    assert sum(state.astype(int) for state in lanes.trainer.values()).max() == 1
    trainer = {state: spans(lanes.bars(at)) for state, at in lanes.trainer.items()}
    assert trainer[Trainer.TRAIN] == [(10, 16), (19, 20), (22, 28), (31, 32), (42, 50)]
    assert trainer[Trainer.STAGE] == [(16, 18), (28, 30)]
    assert spans(lanes.bars(lanes.held)) == trainer[Trainer.LOAD] == [(18, 19), (30, 31)]
    assert spans(lanes.bars(lanes.decoding[1])) == [(0, 10), (12, 18), (19, 21), (25, 30), (31, 35)]


# -- separate placement: figures, sentences and pictures -----------------------------------------------------------------


def test_shares_are_of_the_time_from_the_first_batch_to_the_last(tmp_path, run):
    # 32 s: waits of 2 and 10 s, holds of 2 s; replica 0 idle for 2 s, replica 1 for 13.
    summary = compare([run]).base.summary
    assert (summary.trainer_waits, summary.engines_held) == (pytest.approx(12 / 32), pytest.approx(2 / 32))
    assert summary.engines_idle == pytest.approx(7.5 / 32)
    assert summary.wall_s_per_trained_token == pytest.approx(32 / 400)
    # Slots of calls that ended later are not empty: of 4 slots one runs for 40 of 42 s, another for 10 + 9 + 10 s.
    assert summary.bubble_fraction == pytest.approx(1 - (40 + 29) / (4 * 42))
    # In turns, of 40 s, replica 0 decodes for 20 and replica 1 never.
    turns = summary_of(in_turns(tmp_path / "a"))
    assert (turns.trainer_waits, turns.engines_held) == (pytest.approx(0.5), None)
    assert turns.engines_idle == pytest.approx((0.5 + 1) / 2)


def test_separate_is_compared_by_wall_time_and_never_by_rollout(tmp_path, run):
    colocated = load_run(in_turns(tmp_path / "noPR"))
    comparison = compare([colocated, run])
    (contrast,) = comparison.others
    assert contrast.ratios["wall_s_per_trained_token"] == pytest.approx(32 / 40)
    for name in ("rollout_s", "rollout_s_per_trained_token", "decoded_tokens_per_s"):
        assert contrast.ratios[name] is None, name
    said = findings(comparison)
    assert "PR took 0.80 of noPR's wall time" in said[0]
    assert not any("rollout" in line for line in said)
    assert cells(comparison)["trainer waits for batches"] == ["50.0%", "37.5%", ""]
    rows = cells(compare([run]))
    assert not {"rollout per 1,000 trained tokens", "interrupt, mean / p95 / max"} & rows.keys()
    assert rows["wall time per 1,000 trained tokens"] == ["80.0 s"]
    assert rows["a hold, mean / p95 / max"] == ["1.0 s / 1.0 s / 1.0 s"]
    assert not {"engines held", "a hold, mean / p95 / max"} & cells(compare([colocated])).keys()
