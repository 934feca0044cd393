"""The report's page; where there is a Chromium, in Chromium."""

import base64
import html
import itertools
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipe.partial_rollout.tools.report.command import main
from recipe.partial_rollout.tools.report.segments import in_slots
from recipe.partial_rollout.tools.run_record import load_run
from tests.unit.runs import ZERO, build_run, interrupted_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def report(tmp_path, *runs):
    """The page of a report on ``runs``."""
    assert main([*map(str, runs), "--out", str(tmp_path / "out")]) == 0
    return (tmp_path / "out" / "report.html").read_text()


def data_of(page):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def column(text, kind):
    return np.frombuffer(base64.b64decode(text), dtype=kind)


def test_page_opens_with_the_result_and_loads_nothing(tmp_path):
    faster = {step: {"timing_s/step": 20.0, "timing_s/gen": 5.0} for step in (1, 2)}
    page = report(tmp_path, build_run(tmp_path / "a"), build_run(tmp_path / "b", arm="PR", metrics=faster))
    first = re.sub("<.*?>", "", page[page.index("</h1>") :]).strip().splitlines()[0]
    assert "PR took 0.50 of noPR&#39;s rollout time" in first
    for link in ("http:", "https:", "<link", "@import", "url(", "import("):
        assert link not in page, link
    assert re.findall(r'src="(.{5})', page) == ["data:"]


def test_timeline_has_every_call_of_the_trace(tmp_path):
    path = interrupted_run(tmp_path / "a", steps=2)
    (run,) = data_of(report(tmp_path, path))
    calls = [call for round_ in load_run(path).rounds for call in round_.phase.calls]
    lanes = np.array([(replica, tools) for replica, _, count, tools in run["lanes"] for _ in range(count)])
    start, length, tokens = (column(run[name], "<u4") for name in ("start", "length", "tokens"))
    version, interrupted = column(run["version"], "<i4"), column(run["interrupted"], "u1")
    sample = np.array(run["samples"])[column(run["sample"], "<u4")]
    # Both samples that the first round interrupted have a tool call from 32 to 33 s.
    tools = lanes[:, 1] == 1
    of_tools = [each[tools].tolist() for each in (start, length, tokens)]
    assert of_tools == [[32_000] * 2, [1_000] * 2, [0] * 2]
    assert sample[tools].tolist() == ["1#8", "1#9"] and not interrupted[tools].any()
    noted = sorted((c.replica, round((c.start - ZERO) * 1e3), c.tokens, c.version, c.sample) for c in calls)
    columns = (lanes[:, 0], start, tokens, version, sample)
    assert sorted(zip(*(each[~tools].tolist() for each in columns), strict=True)) == noted
    assert length[~tools].sum() == pytest.approx(1e3 * sum(call.end - call.start for call in calls), abs=len(calls))
    assert interrupted.sum() == sum(call.interrupted for call in calls) == 4
    assert [phase[0] for phase in run["phases"]] == ["train", "sync"] * 2


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


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
def test_hover_in_chromium_shows_the_segments_of_a_sample(tmp_path):
    hover = """
    const timeline = shown.timelines[0], canvas = timeline.canvas, box = canvas.getBoundingClientRect();
    const call = timeline.interrupted.indexOf(1), lane = timeline.lane[call];
    const x = timeline.x(timeline.start[call] + timeline.length[call] / 2) / timeline.scale;
    const y = timeline.y(lane + 0.5) / timeline.scale;
    canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + x, clientY: box.top + y, bubbles: true }));
    const tip = document.getElementById("tip");
    document.body.dataset.result = JSON.stringify([tip.hidden, tip.textContent]);
    """
    page = tmp_path / "hover.html"
    page.write_text(
        report(tmp_path, interrupted_run(tmp_path / "a")).replace("</body>", f"<script>{hover}</script></body>")
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1400"]
    command = [CHROMIUM, *options, f"--user-data-dir={tmp_path}/profile", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    hidden, text = json.loads(html.unescape(re.search(r'data-result="(.*?)"', done.stdout)[1]))
    assert not hidden
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == "sample 1#8: 3 engine calls, 1 interruption, 120 tokens"
    assert lines[1].endswith("interrupted") and lines[2] == "waits to resume: 10.0 s"
    assert lines[3].startswith("v1: 20 tokens in 2.0 s") and lines[4] == "tools and agent loop: 1.0 s"
