"""A thinned trace keeps the engine calls of some steps only. It says so; figures and audit stay as they were."""

import json
import runpy
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from recipe.partial_rollout.records.fields import RunRecordError
from recipe.partial_rollout.records.run import load_run
from recipe.partial_rollout.records.trace import Phase, Probe, RoundRecord, RunSettings, RunTrace, iter_trace
from recipe.partial_rollout.tools.audit import audit, main
from recipe.partial_rollout.tools.report.command import main as report
from recipe.partial_rollout.tools.report.comparison import compare
from recipe.partial_rollout.tools.report.segments import segments_of

SEPARATE = runpy.run_path(str(Path(__file__).with_name("separate_run.py")))
LARGE = runpy.run_path(str(Path(__file__).with_name("test_records_memory.py")))


@pytest.fixture
def runs(tmp_path):
    """``runs(placement)``: the directory of a whole run, and of the same run with the calls of steps 1 and 3 only."""

    def build(placement, steps=3):
        whole, thinned = tmp_path / "whole", tmp_path / "thinned"
        if placement == "separate":
            SEPARATE["write_run"](whole)
        else:
            LARGE["write_run"](whole, steps, calls=60, groups=4)
        settings = RunSettings.read(whole)
        trace = RunTrace(thinned, [str(i) for i in range(settings.replicas)], settings, every=2)
        for event in iter_trace(whole / "trace.jsonl"):
            match event:
                case RoundRecord():
                    calls = tuple(replace(call, replica=str(call.replica)) for call in event.phase.calls)
                    trace.round(replace(event, phase=replace(event.phase, calls=calls)))
                case Phase(name, step, start, end):
                    trace.phase(name, step, start, end)
                case Probe(speed, concurrency):
                    trace.probe(0.0, 1.0, int(speed), concurrency)
        for other in ("metrics.jsonl", "ledger.jsonl"):
            if (whole / other).exists():
                (thinned / other).write_text((whole / other).read_text())
        return whole, thinned

    return build


def lines(run):
    return [json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_every_figure_is_that_of_the_whole_trace(runs, placement):
    found = []
    for run in (load_run(path) for path in runs(placement)):
        figures = asdict(compare([run]).base.summary)
        found.append(
            {name: value for name, value in figures.items() if placement == "colocated" or name != "bubble_fraction"}
        )
        found[-1]["per round"] = [phase.decoded_tokens for phase in run.decoding] if placement == "colocated" else None
    assert found[0] == found[1]


def test_slots_of_separate_placement_are_told_in_the_mean(runs):
    whole, thinned = (compare([load_run(path)]).base.summary.bubble_fraction for path in runs("separate"))
    assert thinned == pytest.approx(whole, abs=0.1)


def test_a_thinned_trace_says_so_wherever_it_is_read(runs, tmp_path, capsys):
    whole, thinned = runs("colocated")
    header, *rest = lines(thinned)
    assert header == {"event": "thinned", "every": 2}
    rounds = [line for line in rest if line["event"] == "round"]
    assert ["calls" in line for line in rounds] == [True, False, True], "a reader of whole traces refuses it"
    assert report([str(thinned), "--perfetto", str(tmp_path / "trace.json")]) == 0
    assert "thinned (partial_rollout.dashboard.trace_every=2)" in capsys.readouterr().out
    assert "120 segments, thinned trace" in (thinned / "report" / "report.html").read_text()
    assert len(segments_of(load_run(whole))) == 180 and not load_run(whole).warnings


def test_a_thinned_trace_is_small(tmp_path):
    whole, thinned = (
        LARGE["write_run"](tmp_path / str(every), 10, calls=300, groups=10, every=every) for every in (1, 10)
    )
    sizes = [(run / "trace.jsonl").stat().st_size for run in (whole, thinned)]
    assert sizes[1] < 0.25 * sizes[0]


def test_a_thinned_trace_is_audited_alike(runs, capsys):
    _, thinned = runs("colocated")
    assert main([str(thinned)]) == 0 and "3 rounds compared" in capsys.readouterr().out
    changed = lines(thinned)
    (line,) = (line for line in changed if line["event"] == "round" and line["step"] == 2)
    line["totals"]["latest_version"] = 5
    line["trained"][0]["staleness"][0] = 3
    (thinned / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    late, ages = audit(thinned)[0].violations
    assert (
        "the round of step 2 under version 1 has engine calls of version 5" in late
        and "the ledger has staleness" in ages
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"spans": []}, "'busy_s' and 'spans' should have an entry for each of 8 replicas"),
        ({"calls": "many"}, "'calls' is 'many'; it should be an integer"),
        ({"latest_version": -2}, "'latest_version' is -2; it should be at least -1"),
    ],
)
def test_totals_that_cannot_be_are_named(runs, changed, message):
    _, thinned = runs("colocated")
    found = lines(thinned)
    (line,) = (line for line in found if line["event"] == "round" and line["step"] == 2)
    line["totals"] |= changed
    (thinned / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    with pytest.raises(RunRecordError, match=message):
        load_run(thinned)
