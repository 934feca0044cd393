"""The report's page and its Chrome trace, from synthetic runs; where there is a Chromium, in Chromium.

``python -m pytest tests/unit/test_report_page.py -m benchmarks -s`` prints how long 500 steps and 100,000 samples take.
"""

import base64
import gzip
import html
import itertools
import json
import re
import shutil
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.partial_rollout.records.run import load_run
from recipe.partial_rollout.tools.report import command
from recipe.partial_rollout.tools.report.command import main
from recipe.partial_rollout.tools.report.comparison import compare
from recipe.partial_rollout.tools.report.perfetto import chrome_trace
from recipe.partial_rollout.tools.report.segments import in_slots

ZERO = 1_700_000_000.0
ROUND_S, STEP_S = 20.0, 30.0
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="NOT SHOWN: the page in a browser; no chromium here (apt-get install chromium)"
)


def write_run(path, *, arm="PR", steps=3, samples=8, cut=2, replicas=2, complete=True, **settings):
    """A run whose rounds finish ``samples`` samples each; ``cut`` more are interrupted, and finish in the next round.

    A sample ``5#0`` is the first of round 5. An interrupted one has a tool call of 1 s in the round that it finishes in.
    """
    path.mkdir(parents=True)
    n, cut = 4, cut if arm == "PR" else 0
    run = {
        "arm": arm, "experiment": "synthetic", "batch_groups": samples // n, "samples_per_group": n, "replicas": replicas,
        "slots_per_replica": -(-samples // replicas), "max_staleness": 4, "mode": "window", "policy": "bounded",
        "verl": "0.9.1", "vllm": "0", "complete": complete, **settings,
    }  # fmt: skip
    (path / "run.json").write_text(json.dumps(run))
    generator = np.random.default_rng(0)
    trace = [{"event": "probe", "start": 0.0, "end": 1.0, "tokens": 100, "tokens_per_s": 100.0, "concurrency": 4}]
    metrics, carried = [], []
    for step in range(1, steps + 1):
        start = ZERO + STEP_S * (step - 1)
        spans = generator.uniform(1, ROUND_S, samples).tolist()
        calls = []
        for i, name in enumerate(carried):
            calls.append([i % replicas, start, start + 2, 20, step - 1, 5, 50, 0.0, name, False])
            calls.append([i % replicas, start + 3, start + 4, 10, step - 1, 0, 70, 0.0, name, False])
        for i, span in enumerate(spans):
            name = f"{step}#{i}"
            calls.append([i % replicas, start, start + span, int(10 * span), step - 1, 0, 10, 0.0, name, False])
        carried = [f"{step}#{samples + i}" for i in range(cut)]
        for i, name in enumerate(carried):
            calls.append([i % replicas, start + 5, start + ROUND_S, 90, step - 1, 0, 10, 0.0, name, True])
        trained = [
            {
                "group": samples // n * (step - 1) + g, "prompt": str(samples // n * (step - 1) + g), "epoch": 0,
                "lengths": [int(10 * span) for span in spans[n * g : n * g + n]], "staleness": [g % 2] * n,
                "segments": [1] * n, "tokens": int(sum(10 * span for span in spans[n * g : n * g + n])),
                "off_policy_tokens": 0,
            }
            for g in range(samples // n)
        ]  # fmt: skip
        trace.append(
            {
                "event": "round",
                "step": step,
                "version": step - 1,
                "start": start,
                "end": start + ROUND_S,
                "calls": calls,
                "interrupt_s": 0.5 if cut else None,
                "resume_s": 0.01 if cut else None,
                "trained": trained,
                "carried_groups": cut,
                "lost_samples": 0,
            }
        )
        for name, begin, end in (("train", ROUND_S, STEP_S), ("sync", STEP_S - 2, STEP_S - 1)):
            trace.append({"event": "phase", "name": name, "step": step, "start": start + begin, "end": start + end})
        data = {"timing_s/step": STEP_S, "timing_s/gen": ROUND_S, "critic/score/mean": 0.5}
        metrics.append({"step": step, "data": data})
    (path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in trace))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return path


def report(tmp_path, *runs, options=()):
    """The page of a report on ``runs``."""
    assert main([*map(str, runs), "--out", str(tmp_path / "out"), *options]) == 0
    return (tmp_path / "out" / "report.html").read_text()


def data_of(page):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def column(text, kind):
    return np.frombuffer(base64.b64decode(text), dtype=kind)


def test_page_loads_nothing(tmp_path):
    page = report(tmp_path, write_run(tmp_path / "a"), write_run(tmp_path / "b", arm="noPR"))
    for link in ("http:", "https:", "<link", "@import", "url(", "import("):
        assert link not in page, link
    assert re.findall(r'src="(.{5})', page) == ["data:"]


def test_unequal_work_and_unlike_engines_stand_in_bold_above_the_findings(tmp_path):
    other = write_run(tmp_path / "b", arm="noPR", replicas=1)
    page = report(tmp_path, write_run(tmp_path / "a", steps=2), other)
    cautions = re.findall(r'<p class="caution"><b>(.*?)</b></p>', page)
    assert cautions[0].startswith("The work differs: noPR trained 6 groups, PR 4")
    assert "The runs differ in replicas: noPR 1, PR 2." in cautions
    assert page.index("</b></p>") < page.index("Not equal work: per trained token")


def test_timeline_has_every_call_of_the_trace(tmp_path):
    path = write_run(tmp_path / "a", steps=2)
    (run,) = data_of(report(tmp_path, path))
    calls = [call for round_ in load_run(path).rounds for call in round_.phase.calls]
    lanes = [(replica, slot) for replica, slot, count in run["lanes"] for _ in range(count)]
    drawn = zip(
        (replica for replica, _ in lanes),
        column(run["start"], "<u4").tolist(),
        column(run["length"], "<u4").tolist(),
        column(run["tokens"], "<u4").tolist(),
        column(run["version"], "<i4").tolist(),
        [run["samples"][i] for i in column(run["sample"], "<u4").tolist()],
        column(run["interrupted"], "u1").tolist(),
        strict=True,
    )
    drawn = list(drawn)
    noted = [(call.replica, round((call.start - ZERO) * 1e3), call.tokens, call.version) for call in calls]
    assert sorted((d[0], d[1], d[3], d[4]) for d in drawn) == sorted(noted)
    assert sum(d[2] for d in drawn) == pytest.approx(1e3 * sum(call.end - call.start for call in calls), abs=len(calls))
    assert sum(d[6] for d in drawn) == sum(c.interrupted for c in calls) == 4
    assert {d[5] for d in drawn} == {c.sample for c in calls}
    assert [phase[0] for phase in run["phases"]] == ["train", "sync"] * 2


def test_watch_labels_a_run_that_goes_on_and_ends_with_it(tmp_path, monkeypatch, capsys):
    path = write_run(tmp_path / "a", complete=False)
    settings = json.loads((path / "run.json").read_text())
    pages = []

    def wait(seconds):
        pages.append((path / "report" / "report.html").read_text())
        (path / "run.json").write_text(json.dumps({**settings, "complete": True}))

    monkeypatch.setattr(command.time, "sleep", wait)
    assert main([str(path), "--watch", "30"]) == 0
    assert len(pages) == 1 and '<meta http-equiv="refresh" content="30">' in pages[0]
    assert "<b>PR is not complete: 3 steps so far.</b>" in pages[0]
    last = (path / "report" / "report.html").read_text()
    assert "refresh" not in last and "not complete" not in last
    assert "PR is not complete: 3 steps so far" in capsys.readouterr().out


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=30))
def test_slots_are_as_few_as_keep_calls_apart(spans):
    start = np.array([start for start, _ in spans], float)
    end = start + np.array([length for _, length in spans], float)
    slots = in_slots(start, end)
    for slot in set(slots.tolist()):
        mine = sorted(zip(start[slots == slot], end[slots == slot], strict=True))
        assert all(before <= after for (_, before), (after, _) in itertools.pairwise(mine))
    most = max(int(np.sum((start <= t) & (t < end))) for t in range(31))
    assert len(set(slots.tolist())) == most == slots.max(initial=-1) + 1


# -- Chrome trace ------------------------------------------------------------------------------------------------------


@pytest.fixture
def events(tmp_path):
    runs = [write_run(tmp_path / "a", steps=4), write_run(tmp_path / "b", arm="noPR")]
    return chrome_trace(compare([load_run(path) for path in runs]))["traceEvents"]


def of_phase(events, phase):
    return [event for event in events if event["ph"] == phase]


def test_chrome_trace_has_what_the_format_asks_of_each_phase(tmp_path, events):
    schema = json.loads((Path(__file__).parent / "chrome_trace_schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate({"traceEvents": events})
    assert {event["ph"] for event in events} == {"X", "i", "C", "M", "s", "f"}
    assert not validator.is_valid({"traceEvents": [{**of_phase(events, "X")[0], "dur": -1}]})
    assert not validator.is_valid({"traceEvents": [{"ph": "i", "name": "x", "pid": 1, "tid": 1, "ts": 0}]})


def test_time_never_runs_back_on_a_track_and_slices_of_a_slot_do_not_overlap(events):
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        times = [event["ts"] for event in track]
        assert times == sorted(times)
        slices = of_phase(track, "X")
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(slices))


def test_arrow_leads_from_an_interrupted_segment_to_its_resumption(events):
    slices = of_phase(events, "X")

    def under(event):
        """The slice that an end of an arrow lies in."""
        return next(
            s for s in slices
            if (s["pid"], s["tid"]) == (event["pid"], event["tid"]) and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
            and s["cat"] == "segment" and not (event["ph"] == "f" and s["ts"] + s["dur"] == event["ts"])
        )  # fmt: skip

    starts, ends = ({event["id"]: event for event in of_phase(events, phase)} for phase in "sf")
    # Three of the four rounds are followed by one that resumes the two samples that it interrupted.
    assert starts.keys() == ends.keys() and len(starts) == 6
    for flow, start in starts.items():
        cut, resumed = under(start), under(ends[flow])
        assert cut["name"] == resumed["name"]
        assert resumed["args"]["version"] == cut["args"]["version"] + 1
    assert len([event for event in of_phase(events, "i") if event["name"] == "interrupted"]) == 8


def test_perfetto_option_writes_the_trace_packed_if_the_name_says_so(tmp_path):
    path = write_run(tmp_path / "a")
    for name, read in (("t.json", Path.read_bytes), ("t.json.gz", lambda file: gzip.decompress(file.read_bytes()))):
        report(tmp_path, path, options=["--perfetto", str(tmp_path / name)])
        assert len(json.loads(read(tmp_path / name))["traceEvents"]) > 20


# -- in a browser ------------------------------------------------------------------------------------------------------


def in_chromium(page, script, *, picture=None):
    """What ``script`` returns at the end of the page in headless Chromium; also takes a ``picture``, if given."""
    copy = page.with_name("in_chromium.html")
    call = f"document.body.dataset.result = JSON.stringify((() => {{ {script} }})());"
    caught = f"try {{ {call} }} catch (error) {{ document.body.dataset.result = JSON.stringify(String(error.stack)); }}"
    copy.write_text(page.read_text().replace("</body>", f"<script>{caught}</script></body>"))
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1400,1400",
        f"--user-data-dir={page.parent}/profile",
    ]
    done = subprocess.run([*command, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=300)
    if picture is not None:
        subprocess.run(
            [*command, f"--screenshot={picture}", copy.as_uri()], capture_output=True, timeout=300, check=True
        )
    return json.loads(html.unescape(re.search(r'data-result="(.*?)"', done.stdout)[1]))


HOVER = """
const timeline = shown.timelines[0], canvas = timeline.canvas, box = canvas.getBoundingClientRect();
const call = timeline.interrupted.indexOf(1), lane = timeline.lane[call];
const x = timeline.x(timeline.start[call] + timeline.length[call] / 2) / timeline.scale;
const y = timeline.y(lane + 0.5) / timeline.scale;
canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + x, clientY: box.top + y, bubbles: true }));
const tip = document.getElementById("tip");
"""


@needs_chromium
def test_hover_in_chromium_shows_a_sample_with_its_segments_and_interruptions(tmp_path):
    report(tmp_path, write_run(tmp_path / "a"))
    shown = in_chromium(tmp_path / "out" / "report.html", HOVER + "return [tip.hidden, tip.textContent];")
    hidden, text = shown
    assert not hidden
    lines = text.splitlines()
    assert lines[0] == "sample 1#8: 3 segments, 1 interruption, 120 tokens"
    assert lines[1].startswith("\u25b6 v0: 90 tokens in 15.0 s, replica 0") and lines[1].endswith("interrupted")
    assert lines[2].strip() == "waits to resume: 10.0 s"
    assert lines[3].strip().startswith("v1: 20 tokens in 2.0 s")
    assert lines[4].strip() == "tools and agent loop: 1.0 s"


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """The page of a run of 500 steps and 100,000 samples, and the seconds that its report took: CPU's, and all."""
    root = tmp_path_factory.mktemp("large")
    path = write_run(root / "run", steps=500, samples=200, cut=50, replicas=4)
    started, cpu = time.monotonic(), time.process_time()
    page = report(root, path)
    return root / "out" / "report.html", page, time.process_time() - cpu, time.monotonic() - started


@pytest.mark.benchmarks
def test_report_of_500_steps_and_100000_samples_is_made_in_30_s(large):
    file, page, cpu_s, wall_s = large
    print(
        f"\n500 steps, 100,000 samples: {cpu_s:.1f} s of CPU, {wall_s:.1f} s in all, {file.stat().st_size / 2**20:.1f} MiB"
    )
    (run,) = data_of(page)
    calls = sum(count for _, _, count in run["lanes"])
    assert calls == len(column(run["start"], "<u4")) == 500 * 250 + 499 * 100 and len(run["rounds"]) == 500
    assert len(run["samples"]) == 100_000 + 500 * 50
    assert "trained groups<small>" in page and "<td>25,000</td>" in page
    # Of CPU: other work on the machine is not the report's.
    assert cpu_s < 30


@needs_chromium
@pytest.mark.benchmarks
def test_page_of_100000_segments_is_smooth_in_chromium(large):
    script = """
    const timeline = shown.timelines[0], frames = [];
    for (let i = 0; i < 20; i++) {
      const started = performance.now();
      timeline.draw();
      frames.push(performance.now() - started);
      shown.show(shown.from + 1e3, shown.to - 1e3);
    }
    const started = performance.now();
    timeline.describe(timeline.interrupted.indexOf(1));
    return { segments: timeline.start.length, frame: frames.sort((a, b) => a - b)[10], hover: performance.now() - started };
    """
    shown = in_chromium(large[0], script)
    print(
        f"\n{shown['segments']:,} segments: {shown['frame']:.0f} ms a frame, {shown['hover']:.0f} ms to find a sample's"
    )
    assert shown["segments"] > 100_000
    # Far above what either takes on an idle machine: other work beside the test is not the page's.
    assert shown["frame"] < 500 and shown["hover"] < 100
