"""SwanLab's local page, opened by ``run_scripts/dashboard.sh`` in headless Chromium.

Two variables serve the documentation: ``BOARD=DIR`` opens the board of a real pair of runs instead of a made-up one, and
``SCREENSHOT=FILE`` keeps the picture.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from recipe.partial_rollout.records.figures import FIGURES, SECTION
from recipe.partial_rollout.training.step_log import PICTURES

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OVERVIEW = sorted(f"{SECTION}/{figure}" for figure in FIGURES)
if "BOARD" in os.environ:
    OVERVIEW.remove(f"{SECTION}/held_out_reward")  # the quick start does not validate


def log_run(arm, directory, first, last):
    """Log the steps of a made-up run in a process of its own."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("board_run.py"))]
    branch = {"noPR": "0123456789abcdef", "PR": "fedcba9876543210"}[arm]
    command += [arm, str(directory / arm), str(first), str(last), branch]
    env = {**os.environ, "PYTHONPATH": str(ROOT)} | {"SWANLAB_ROOT": str(directory / "account")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """Runs of both arms on one board; PR was stopped after step 14 and resumed from a checkpoint of step 12."""
    if given := os.environ.get("BOARD"):
        return Path(given)
    directory = tmp_path_factory.mktemp("runs")
    log_run("noPR", directory, 1, 24)
    log_run("PR", directory, 1, 14)
    log_run("PR", directory, 13, 24)
    return directory / "swanlog"


@pytest.fixture(scope="module")
def page(board):
    """The address of the charts, as ``dashboard.sh`` prints it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["bash", str(ROOT / "run_scripts" / "dashboard.sh"), str(board), str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        found = re.search(r"http://\S+/charts", server.stdout.readline())
        assert found, "dashboard.sh prints the address first"
        for _ in range(120):
            try:
                urllib.request.urlopen(found[0], timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, server.stdout.read()
                time.sleep(0.5)
        yield found[0]
    finally:
        server.terminate()
        server.wait(20)


def answer(page, path):
    with urllib.request.urlopen(page.replace("/charts", f"/api/v1/{path}"), timeout=30) as response:
        return json.load(response)["data"]


def shown(page, run, key):
    """Rows of a chart."""
    return answer(page, f"experiment/{run['id']}/tag/{key.replace('/', '%2F')}")["list"]


def test_the_board_opens_on_the_figures_with_both_arms_in_each_from_the_first_step_on(page):
    data = answer(page, "project/charts")
    charts = {chart["id"]: chart for chart in data["charts"]}
    first, *others = data["namespaces"]
    assert first["name"] == SECTION
    assert sorted(charts[id_]["name"] for id_ in first["charts"]) == OVERVIEW
    assert all(sorted(charts[id_]["source"]) == ["PR", "noPR"] for id_ in first["charts"])
    assert {"actor", "critic", "timing_s", "partial_rollout"} <= {section["name"] for section in others}
    for section in others:
        assert all(charts[id_]["name"].startswith(f"{section['name']}/") for id_ in section["charts"]), section["name"]
    for run in answer(page, "project")["experiments"]:
        for key in OVERVIEW:
            first = 0 if key == f"{SECTION}/held_out_reward" else 1  # verl validates before the first step
            assert shown(page, run, key)[0]["index"] == first, (run["name"], key)


@pytest.mark.skipif("BOARD" in os.environ, reason="a given board need not have a resumed run, and may be older")
def test_a_resumed_run_is_one_run_with_pictures_every_few_steps(page):
    runs = {run["name"]: run for run in answer(page, "project")["experiments"]}
    assert set(runs) == {"PR", "noPR"}
    # Its repeated steps count once.
    assert [row["index"] for row in shown(page, runs["PR"], f"{SECTION}/step_s")] == list(range(1, 25))
    assert answer(page, "project/summaries")["summaries"]["PR"]["partial_rollout/staleness/max"] == 3
    charts = answer(page, "project/charts")["charts"]
    pictures = {chart["name"]: chart["type"] for chart in charts if chart["name"].startswith(PICTURES)}
    # The local board compares no texts; the page of a run has its sample.
    assert pictures == dict.fromkeys((f"{PICTURES}/timeline", f"{PICTURES}/lengths"), "image")
    assert [row["index"] for row in shown(page, runs["noPR"], f"{PICTURES}/sample")] == [1]
    assert [row["index"] for row in shown(page, runs["noPR"], f"{PICTURES}/timeline")] == [1, 11, 21]


def test_the_page_in_chromium_shows_that_section_first(page, tmp_path):
    if CHROMIUM is None:
        pytest.skip("NO CHROMIUM: the page was not looked at. apt-get install -y chromium")
    picture = tmp_path / "page.png"
    options = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars"
    command = [CHROMIUM, *options.split(), f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1420"]
    command += ["--virtual-time-budget=30000"]
    shot = subprocess.run([*command, f"--screenshot={picture}", page], capture_output=True, timeout=180)
    assert shot.returncode == 0 and picture.stat().st_size > 20_000, shot.stderr[-1000:]
    seen = subprocess.run([*command, "--dump-dom", page], capture_output=True, text=True, timeout=180).stdout
    titles = re.findall(r">\s*([\w./@]+/[\w./@]+)\s*<", seen)
    assert sorted(titles[: len(OVERVIEW)]) == OVERVIEW
    assert re.search(rf">\s*{SECTION}\s*<", seen)
    if keep := os.environ.get("SCREENSHOT"):
        shutil.copy(picture, keep)
