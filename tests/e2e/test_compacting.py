"""A loop that compacts its context trains all its rows in both arms, however PR's run is disturbed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.partial_rollout.tools.audit import audit
from tests.chaos.victim import processes_of_session
from tests.e2e.conftest import GREEDY_LOOP

pytest.importorskip("transfer_queue")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

HERE = Path(__file__).parent
STEPS = 3


@pytest.fixture(scope="module")
def arms(module_start, wait_for, read_run, tmp_path_factory):
    """noPR, and PR: interrupted at every token, its worker is killed, and its first reward raises."""
    task = tmp_path_factory.mktemp("calculator")
    ready = [sys.executable, "-m", "recipe.partial_rollout.tasks.ready_start", "--task", "calculator"]
    subprocess.run([*ready, "--out", str(task / "task")], check=True, timeout=300)
    loops = task / "loops.yaml"
    loops.write_text("- {name: compacting, _target_: greedy_loop.GreedyLoop, budget: 60}\n")

    def start(name, *overrides):
        return module_start(
            f"quickstart.dir={task}",
            *GREEDY_LOOP,
            "trainer.use_v1=True",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=compacting",
            f"reward.custom_reward_function.path={HERE / 'greedy_loop.py'}",
            f"data.train_max_samples={4 * STEPS}",
            "data.max_response_length=100",
            "actor_rollout_ref.rollout.max_model_len=164",
            *overrides,
            name=name,
        )

    def finish(run):
        assert run.process.wait(540) == 0, run.terminal()[-3000:]
        return read_run(run.directory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ":".join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]))
        nopr = finish(start("noPR", "partial_rollout.enable=False"))
        patch.setenv("INTERRUPT_EVERY_TOKEN", "1")
        patch.setenv("REWARD_FAILS", str(task / "failed"))
        run = start("PR", "partial_rollout.overlap=1", "partial_rollout.max_staleness=3")
        wait_for(lambda: (run.directory / "said" / "1.jsonl").exists(), "the second step")
        processes_of_session(run.process.pid, "ray::PartialRolloutAgentLoopWorker")[0].kill()
        return nopr, finish(run)


def lines(run):
    """Prompt, response and score of each row."""
    files = sorted((run.directory / "said").glob("*.jsonl"))
    said = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return sorted((line["input"], line["output"], line["score"]) for line in said if line["input"])


def test_rows_and_rewards_are_those_under_nopr(arms):
    nopr, disturbed = arms
    assert lines(disturbed) == lines(nopr) and len(lines(nopr)) > 8 * STEPS


def test_audit_counts_samples_and_rows(arms):
    nopr, run = arms
    result, cut_off = audit(run.directory)
    assert cut_off == 0 and result.violations == [] and result.complete and len(result.trained) == 4 * STEPS
    rows = 8 * STEPS + sum(group.get("more_rows", 0) for round_ in run.rounds for group in round_["trained"])
    assert rows == len(lines(run)) and re.search(rf"^rows trained +{rows}$", result.table(), re.MULTILINE)
    for each in (nopr, run):
        assert sum(step["partial_rollout/trained/rows"] for step in each.steps.values()) == rows


def test_it_was_disturbed_and_lost_nothing(arms):
    _, run = arms
    last = run.steps[STEPS]
    assert last["partial_rollout/failures/workers_restarted_total"] == 1
    assert last["partial_rollout/failures/retried_total"] >= 1 and last["partial_rollout/failures/masked_total"] == 0
    assert max(step["partial_rollout/segments_per_sample/max"] for step in run.steps.values()) > 60
