"""SwanLab's local board, served by ``run_scripts/dashboard.sh``: what its page asks the server for."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from recipe.partial_rollout.records.metrics import METRICS, SECTION
from recipe.partial_rollout.training.step_log import PICTURES

ROOT = Path(__file__).resolve().parents[2]
OVERVIEW = sorted(f"{SECTION}/{figure}" for figure in METRICS)


def log_run(arm, directory, first, last):
    """Log the steps of a made-up run in a process of its own."""
    program = Path(__file__).with_name("board_run.py")
    command = [sys.executable, "-W", "ignore", program, arm, directory / arm, first, last, f"{arm:0<16}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SWANLAB_ROOT": str(directory / "account")}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """Runs of both arms on one board; PR was stopped after step 14 and resumed from a checkpoint of step 12."""
    directory = tmp_path_factory.mktemp("runs")
    for arm, first, last in (("noPR", 1, 24), ("PR", 1, 14), ("PR", 13, 24)):
        log_run(arm, directory, first, last)
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


def steps(page, run, key):
    """Steps that a chart shows."""
    rows = answer(page, f"experiment/{run['id']}/tag/{key.replace('/', '%2F')}")["list"]
    return [row["index"] for row in rows]


def test_the_board_opens_on_the_figures_with_both_arms_in_each(page):
    data = answer(page, "project/charts")
    charts = {chart["id"]: chart for chart in data["charts"]}
    first, *others = data["namespaces"]
    assert first["name"] == SECTION
    assert sorted(charts[id_]["name"] for id_ in first["charts"]) == OVERVIEW
    assert all(sorted(charts[id_]["source"]) == ["PR", "noPR"] for id_ in first["charts"])
    assert {"actor", "critic", "timing_s", "partial_rollout"} <= {section["name"] for section in others}
    for run in answer(page, "project")["experiments"]:
        for key in OVERVIEW:
            # verl validates before the first step.
            assert steps(page, run, key)[0] == (key != f"{SECTION}/held_out_reward"), (run["name"], key)


def test_a_resumed_run_is_one_run_with_pictures_every_few_steps(page):
    runs = {run["name"]: run for run in answer(page, "project")["experiments"]}
    assert set(runs) == {"PR", "noPR"}
    # Its repeated steps count once.
    assert steps(page, runs["PR"], f"{SECTION}/step_s") == list(range(1, 25))
    charts = answer(page, "project/charts")["charts"]
    pictures = {chart["name"]: chart["type"] for chart in charts if chart["name"].startswith(PICTURES)}
    # The local board compares no texts; the page of a run has its sample.
    assert pictures == dict.fromkeys((f"{PICTURES}/timeline", f"{PICTURES}/lengths"), "image")
    assert steps(page, runs["noPR"], f"{PICTURES}/sample") == [1]
    assert steps(page, runs["noPR"], f"{PICTURES}/timeline") == [1, 11, 21]
