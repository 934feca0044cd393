"""Real trainings of langgraph's ReAct agent with a tool: under PR, disturbed, it says and earns what it does under noPR."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from recipe.partial_rollout.tools.audit import audit
from tests.chaos.victim import processes_of_session
from tests.e2e.conftest import GREEDY_LOOP

HERE = Path(__file__).parent
PACKAGES = [
    "langgraph==1.2.22",
    "langgraph-checkpoint==4.3.2",
    "langgraph-prebuilt==1.1.2",
    "langgraph-sdk==0.4.14",
    "langchain-core==1.8.1",
    "langchain-protocol==0.0.20",
    "langsmith==0.14.17",
    "ormsgpack==1.13.1",
    "jsonpatch==1.47",
    "jsonpointer==3.12",
    "tenacity==9.2.1",
    "uuid-utils==1.2.0",
    "requests-toolbelt==1.0.0",
    "zstandard==0.25.0",
]
"""langgraph, and what of its dependencies verl and vLLM do not bring"""
STEPS = 4

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """PYTHONPATH of processes with langgraph: where it is not installed it is in a folder, without dependencies."""
    paths = [str(HERE.parents[1]), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    if find_spec("langgraph") is None:
        paths.append(str(tmp_path_factory.mktemp("site")))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", paths[-1]]
        subprocess.run([*pip, *PACKAGES], check=True, timeout=300)
    return ":".join(paths)


@pytest.fixture(scope="module")
def arms(paths, module_start, wait_for, read_run, tmp_path_factory):
    """noPR, and PR whose worker is killed, whose first reward raises, and which validates every second step."""
    task = tmp_path_factory.mktemp("calculator")
    ready = [sys.executable, "-m", "recipe.partial_rollout.tasks.ready_start", "--task", "calculator"]
    subprocess.run([*ready, "--out", str(task / "task")], check=True, timeout=300)
    loops = task / "loops.yaml"
    loops.write_text("- {name: react, _target_: langgraph_loop.ReactLoop}\n")

    def start(name, *overrides):
        return module_start(
            f"quickstart.dir={task}",
            *GREEDY_LOOP,
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=react",
            f"reward.custom_reward_function.path={HERE / 'langgraph_loop.py'}",
            f"data.train_max_samples={4 * STEPS}",
            "data.max_response_length=320",
            "actor_rollout_ref.rollout.max_model_len=400",
            "trainer.validation_data_dir=${trainer.default_local_dir}/validated",
            *overrides,
            name=name,
        )

    def finish(run):
        assert run.process.wait(540) == 0, run.terminal()[-3000:]
        return read_run(run.directory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", paths)
        nopr = finish(start("noPR", "partial_rollout.enable=False"))
        patch.setenv("REWARD_FAILS", str(task / "failed"))
        run = start("PR", "partial_rollout.overlap=1", "partial_rollout.max_staleness=3")
        wait_for(lambda: (run.directory / "said" / "1.jsonl").exists(), "the second step")
        processes_of_session(run.process.pid, "ray::PartialRolloutAgentLoopWorker")[0].kill()
        return nopr, finish(run)


def lines(run, folder):
    """Prompt, response and score of each sample."""
    files = sorted((run.directory / folder).glob("*.jsonl"))
    said = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return sorted((line["input"], line["output"], line["score"]) for line in said)


def test_rewards_and_transcripts_are_those_under_nopr(arms):
    nopr, disturbed = arms
    assert lines(disturbed, "said") == lines(nopr, "said") and len(lines(nopr, "said")) == 8 * STEPS
    assert "<tool_call>" in str(lines(nopr, "said")) and len({score for *_, score in lines(nopr, "said")}) > 2
    assert set(lines(disturbed, "validated")) == set(lines(nopr, "validated")) != set()


def test_it_was_disturbed_and_lost_nothing(arms):
    _, run = arms
    result, _ = audit(run.directory)
    assert result.violations == result.notes() == [] and result.complete and len(result.trained) == 4 * STEPS
    last = run.steps[STEPS]
    assert last["partial_rollout/failures/workers_restarted_total"] == 1
    assert last["partial_rollout/failures/retried_total"] >= 1 and last["partial_rollout/failures/masked_total"] == 0
    # An agent of `langgraph_loop.STEPS` has at most seven turns.
    assert max(step["partial_rollout/segments_per_sample/max"] for step in run.steps.values()) > 7
