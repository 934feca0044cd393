"""The report of runs with separate placement: their lanes, their figures at equal work, and what compares with what."""

import dataclasses
import itertools
import json
import re
import runpy
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from recipe.partial_rollout.records.calls import EngineCall, RolloutPhase, dealt, union
from recipe.partial_rollout.records.figures import bubble_fraction
from recipe.partial_rollout.records.run import load_run
from recipe.partial_rollout.tools.report.command import main
from recipe.partial_rollout.tools.report.comparison import compare
from recipe.partial_rollout.tools.report.findings import findings, headline
from recipe.partial_rollout.tools.report.lane_strip import strip_of
from recipe.partial_rollout.tools.report.lanes import Trainer, lanes_of, seconds, within, without
from recipe.partial_rollout.tools.report.panels import Over, Shown, _bubble, _speed
from recipe.partial_rollout.tools.report.perfetto import chrome_trace
from recipe.partial_rollout.tools.report.table import tables
from recipe.partial_rollout.tools.report.timeline import _cut, run_end

pytestmark = pytest.mark.filterwarnings("error:constrained_layout not applied")

RUN = runpy.run_path(str(Path(__file__).with_name("separate_run.py")))
ZERO, write_run = RUN["ZERO"], RUN["write_run"]

MOMENTS = st.integers(0, 30)
SPANS = st.lists(st.tuples(MOMENTS, MOMENTS).map(sorted).map(tuple), max_size=8)


@pytest.fixture
def run(tmp_path):
    return load_run(write_run(tmp_path / "separate"))


def write_in_turns(path):
    """The same rounds, as if engines and trainer had taken turns: no call crosses a round."""
    rounds = [RUN["build_round"](step, calls=[]) for step in (1, 2, 3)]
    starts = (0, 20, 40)
    for line, start in zip(rounds, starts, strict=True):
        line |= {"start": ZERO + start, "end": ZERO + start + 10}
        line["calls"] = [[0, ZERO + start, ZERO + start + 10, 200, line["version"]]]
    phases = [("train", step, start + 10, start + 20) for step, start in enumerate(starts, start=1)]
    return write_run(path, rounds=rounds, phases=phases, placement="colocated", arm="noPR")


def after_zero(spans):
    return [(start - ZERO, end - ZERO) for start, end in spans]


def cells(comparison, title="Figures"):
    (table,) = [table for table in tables(comparison) if table.title == title]
    return {row[0]: row[1:] for row in table.rows}


# -- what ran when -----------------------------------------------------------------------------------------------------


def test_round_has_the_part_of_a_call_that_ran_in_its_span(run):
    parts = [
        [(call.replica, call.start - ZERO, call.end - ZERO, call.tokens) for call in phase.calls]
        for phase in run.decoding
    ]
    assert [sorted(part) for part in parts] == [
        [(0, 0, 10, 100), (1, 0, 10, 100)],
        [(0, 10, 22, 120), (1, 12, 21, 90)],
        [(0, 22, 40, 180), (1, 25, 35, 100)],
    ]


@given(st.lists(st.tuples(MOMENTS, MOMENTS.filter(bool), st.integers(0, 99)), max_size=12))
def test_parts_of_calls_add_up_to_the_calls_wherever_these_are_noted(spans):
    calls = [EngineCall(0, float(start), float(start + length), tokens, 0) for start, length, tokens in spans]
    phases = [RolloutPhase(a, a + 20.0, ()) for a in (0.0, 20.0, 40.0)]
    late = [dataclasses.replace(phase, calls=tuple(calls) if at == 2 else ()) for at, phase in enumerate(phases)]
    parts = dealt(late)
    assert sum(phase.decoded_tokens for phase in parts) == sum(call.tokens for call in calls)
    for phase in parts:
        assert all(phase.start <= call.start <= call.end <= phase.end for call in phase.calls)
    ran = sum(call.end - call.start for phase in parts for call in phase.calls)
    assert ran == pytest.approx(sum(call.end - call.start for call in calls))


def test_interruption_and_prefill_belong_to_one_part_of_a_call():
    call = EngineCall(0, 5.0, 25.0, 20, 0, resumed_tokens=7, interrupted=True, queued_s=2.0)
    noted = ((), (call,), ())
    first, second, third = dealt([RolloutPhase(10.0 * at, 10.0 * at + 10, calls) for at, calls in enumerate(noted)])
    (a,), (b,), (c,) = first.calls, second.calls, third.calls
    assert [part.start for part in (a, b, c)] == [7.0, 10.0, 20.0]
    assert [part.interrupted for part in (a, b, c)] == [False, False, True]
    assert [part.resumed_tokens for part in (a, b, c)] == [7, 0, 0]


def test_slots_of_calls_that_ended_later_are_not_empty(run):
    # Of 4 slots one runs for 40 of 42 s, another for 10 + 9 + 10 s.
    assert bubble_fraction(run.decoding, 4) == pytest.approx(1 - (40 + 29) / (4 * 42))
    assert compare([run]).base.summary.bubble_fraction == bubble_fraction(run.decoding, 4)


@given(SPANS, SPANS, MOMENTS, MOMENTS)
def test_spans_are_sets_of_moments(some, others, start, end):
    def moments(spans):
        return {t for a, b in spans for t in range(a, b)}

    assert moments(union(some)) == moments(some)
    assert moments(without(some, others)) == moments(some) - moments(others)
    assert moments(within(some, start, end)) == moments(some) & set(range(start, end))
    for found in (union(some), without(some, others), within(some, start, end)):
        assert all(a < b for a, b in found) and seconds(found) == len(moments(found))


# -- lanes -------------------------------------------------------------------------------------------------------------


def test_each_lane_is_in_one_state_at_a_time(run):
    lanes = lanes_of(run)
    states = [(state, span) for state, spans in lanes.trainer.items() for span in spans]
    assert seconds(union(span for _, span in states)) == pytest.approx(seconds(span for _, span in states))
    assert after_zero(lanes.trainer[Trainer.TRAIN]) == [(10, 16), (19, 20), (22, 28), (31, 32), (42, 50)]
    assert after_zero(lanes.trainer[Trainer.STAGE]) == [(16, 18), (28, 30)]
    assert after_zero(lanes.held) == after_zero(lanes.trainer[Trainer.LOAD]) == [(18, 19), (30, 31)]
    assert after_zero(lanes.decoding[1]) == [(0, 10), (12, 18), (19, 21), (25, 30), (31, 35)]


def test_engines_that_are_stopped_for_a_checkpoint_are_held(tmp_path):
    run = load_run(write_run(tmp_path / "a", phases=[*RUN["PHASES"], ("flush", 2, 31, 32)]))
    assert after_zero(lanes_of(run).held) == [(18, 19), (30, 32)]
    assert compare([run]).base.summary.hold_s.max == pytest.approx(1)


def test_loading_the_first_weights_is_no_hold(tmp_path):
    run = load_run(write_run(tmp_path / "a", phases=[("hold", 0, -60, -1), *RUN["PHASES"]]))
    assert compare([run]).base.summary.hold_s.max == pytest.approx(1)


def test_engine_that_validates_is_not_idle(tmp_path):
    # Replica 1 had no call from 21 to 25, replica 0 one.
    run = load_run(write_run(tmp_path / "a", phases=[*RUN["PHASES"], ("validate", 2, 21, 25)]))
    lanes = lanes_of(run)
    assert after_zero(lanes.idle(ZERO + 20, ZERO + 26)[1]) == []
    assert after_zero(lanes.trainer[Trainer.VALIDATE]) == [(21, 25)]


def test_shares_are_of_the_time_from_the_first_batch_to_the_last(run):
    # 32 s: waits of 2 and 10 s, holds of 2 s; replica 0 idle for 2 s, replica 1 for 13.
    shares = compare([run]).base.summary.lanes
    assert (shares.trainer_waits, shares.held) == (pytest.approx(12 / 32), pytest.approx(2 / 32))
    assert shares.engines_idle == pytest.approx(7.5 / 32)


def test_trainer_of_a_run_in_turns_waits_while_engines_decode(tmp_path):
    shares = compare([load_run(write_in_turns(tmp_path / "a"))]).base.summary.lanes
    # Of 40 s, replica 0 decodes for 20 and replica 1 never.
    assert (shares.trainer_waits, shares.held) == (pytest.approx(0.5), None)
    assert shares.engines_idle == pytest.approx((0.5 + 1) / 2)


# -- figures and sentences ---------------------------------------------------------------------------------------------


def test_wall_time_is_from_the_first_batch_to_the_last_over_the_tokens_after_the_first(run):
    wall = compare([run]).base.summary.wall
    assert (wall.seconds, wall.tokens) == (pytest.approx(32), 400)
    assert cells(compare([run]))["wall time per 1,000 trained tokens"] == ["80.0 s"]


def test_rows_that_do_not_apply_show_a_dash(run):
    rows = cells(compare([run]))
    for label in ("rollout per 1,000 trained tokens", "interrupt, median / max", "resume, median / max"):
        assert rows[label] == ["-"], label
    assert rows["a hold, mean / max"] == ["1.0 s / 1.0 s"]
    assert rows["decoded tokens/s in rollout"] == [f"{690 / 42:.0f}"]


def test_separate_is_compared_by_wall_time_and_never_by_rollout(tmp_path, run):
    comparison = compare([load_run(write_in_turns(tmp_path / "noPR")), run])
    (contrast,) = comparison.others
    assert contrast.ratios["wall_s_per_trained_token"] == pytest.approx(32 / 40)
    for name in ("rollout_s", "rollout_s_per_trained_token", "decoded_tokens_per_s", "efficiency"):
        assert contrast.ratios[name] is None, name
    first, second, *_ = findings(comparison)
    assert first == "The same 6 groups: per trained token, PR took 0.80 of noPR's wall time, first batch to last."
    assert second == (
        "From the first batch to the last, the trainer waited 37.5% of the time under PR and 50.0% under noPR, an engine "
        "stood idle 23.4% and 75.0%; PR held its engines 6.2% of it, 1.0 s for each update of the weights."
    )
    assert not any("rollout" in line for line in findings(comparison))


def test_all_runs_are_compared_by_wall_time_where_one_is_separate(tmp_path, run):
    in_turns = [load_run(write_in_turns(tmp_path / name)) for name in ("noPR", "other")]
    lines = headline(compare([*in_turns, run])).splitlines()
    assert len(lines) == 2 and all(line.endswith("wall time, first batch to last") for line in lines)


def test_runs_in_turns_have_no_rows_of_separate_placement(tmp_path):
    rows = cells(compare([load_run(write_in_turns(tmp_path / "a"))]))
    assert not {"engines held", "a hold, mean / max"} & rows.keys()
    assert rows["wall time per 1,000 trained tokens"] == ["100 s"]


def test_waits_of_the_trainer_are_no_disagreeing_clock(run):
    assert run.warnings == []


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_strip_has_a_lane_for_each_side_and_none_where_they_take_turns(tmp_path, run):
    strip = strip_of(run, run.rounds[0].phase.start, run_end(run))
    axes = Figure().subplots()
    strip.draw(axes, "#0072B2", 50)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["engines", "trainer"]
    colocated = load_run(write_in_turns(tmp_path / "b"))
    assert strip_of(colocated, ZERO, run_end(colocated)) is None


def test_close_up_keeps_what_ran_in_its_rounds_and_ended_later(run):
    side = _cut(compare([run]).base, slice(0, 2), None)
    calls = [call for round_ in side.run.rounds for call in round_.phase.calls]
    assert sum(call.tokens for call in calls) == 100 + 100 + 120 + 90
    assert run_end(side.run) - ZERO == 22
    assert sum(call.end - call.start for phase in side.run.decoding for call in phase.calls) == pytest.approx(41)


def test_panels_of_both_placements_are_over_whole_steps(tmp_path, run):
    # In turns: 200 tokens in a rollout of 10 s, by one of two replicas; timers of the steps say 20, 12 and 18 s.
    in_turns = load_run(write_in_turns(tmp_path / "noPR"))

    def shown(run, over):
        return Shown(run.settings, run.steps[0], run.decoding[0], over)

    assert _speed(shown(in_turns, Over.ROLLOUT)) == pytest.approx(200 / 10)
    assert _speed(shown(in_turns, Over.STEP)) == pytest.approx(200 / 20)
    assert _bubble(shown(in_turns, Over.ROLLOUT)) == pytest.approx(3 / 4)
    assert _bubble(shown(in_turns, Over.STEP)) == pytest.approx(7 / 8)
    assert _speed(shown(run, Over.STEP)) == pytest.approx(200 / 10)
    assert _bubble(shown(run, Over.STEP)) == pytest.approx(2 / 4)


def test_report_of_both_placements_is_written(tmp_path):
    runs = [write_in_turns(tmp_path / "noPR"), write_run(tmp_path / "PR")]
    assert main([*map(str, runs), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "| engines held | - | 6.2% |  |" in (tmp_path / "out" / "report.md").read_text()


# -- page and Chrome trace ---------------------------------------------------------------------------------------------


def test_page_draws_what_lies_in_a_phase_over_it(tmp_path):
    write_run(tmp_path / "PR")
    assert main([str(tmp_path / "PR"), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    (run,) = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])
    assert [name for name, step, *_ in run["phases"] if step == 2] == ["wait", "train", "sync", "stage", "hold"]
    assert "all engines held" in page


def test_chrome_trace_has_a_thread_that_says_when_an_engine_is_held(run):
    events = chrome_trace(compare([run]))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    tracks = defaultdict(list)
    for event in slices:
        tracks[event["pid"], event["tid"]].append(
            (event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        )
    assert set(tracks) <= set(names)
    driver = {names[at]: spans for at, spans in tracks.items() if at[0] == 1}
    assert driver["engines held"] == [("hold 1", 18, 19), ("hold 2", 30, 31)]
    assert driver["staging weights"] == [("stage 1", 16, 18), ("stage 2", 28, 30)]
    assert [name for name, *_ in driver["trainer"]] == ["wait 1", "train 1", "wait 2", "train 2", "wait 3", "train 3"]
    (engine,) = [spans for (pid, _), spans in tracks.items() if pid == 3 and names[pid, _] == "engine"]
    assert engine[1:4] == [("decoding", 12, 18), ("held", 18, 19), ("decoding", 19, 21)]
    for spans in tracks.values():
        assert all(before[2] <= after[1] for before, after in itertools.pairwise(spans))


def test_counter_of_running_samples_counts_calls_that_end_later(run):
    events = chrome_trace(compare([run]))["traceEvents"]
    of_long = [event for event in events if event["ph"] == "C" and event["pid"] == 2]
    assert [event["args"]["running"] for event in of_long if event["ts"] in (0, 39_000_000)] == [1]
    assert of_long[-1]["ts"] == 40_000_000 and of_long[-1]["args"]["running"] == 0
