"""A training over Ray nodes of its own: what dies alone is replaced, a trainer's node ends the run, and nothing is lost."""

import json
import re
import time

import pytest

from recipe.partial_rollout.tools.audit import audit

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

ENGINE, WORKER, REWARD = "VLLM::EngineCore", "ray::PartialRolloutAgentLoopWorker", "ray::RewardLoopWorker"
BALANCER = "ray::GlobalRequestLoadBalancer"
RUN = (
    "data.train_batch_size=4",
    # 400 steps, more than the first run gets to
    "trainer.total_epochs=50",
    # Responses never end by themselves, so that rounds are long enough to be in the middle of one.
    "data.max_response_length=400",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "actor_rollout_ref.rollout.n=4",
    "partial_rollout.max_staleness=4",
    "partial_rollout.reward_in_worker=False",
    "trainer.test_freq=2",
    "data.val_max_samples=4",
    "trainer.resume_mode=auto",
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=2",
)


def test_training_over_two_nodes_outlives_a_worker_an_engine_and_a_node(
    start, start_node, wait_for, tmp_path, monkeypatch
):
    """Two nodes with a trainer, a replica, an agent-loop and a reward worker each; a third without a device or a trainer.

    The third node dies in mid-round, and verl's load balancer, which might have been there, then the engine of the second
    node: the others take over what they held. Then the second node dies: the run ends and names it. A node with two devices
    goes on from its checkpoint.
    """
    first = start_node("first", num_cpus=32, num_gpus=1)
    second = start_node("second", first.address, num_cpus=32, num_gpus=1)
    third = start_node("third", first.address, num_cpus=4)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_ADDRESS", first.address)
    run_dir = tmp_path / "kept"
    ours = (*RUN, f"trainer.default_local_dir={run_dir}")
    run = start(
        *ours,
        "trainer.nnodes=2",
        "trainer.total_training_steps=null",
        "actor_rollout_ref.rollout.agent.num_workers=3",
        "reward.num_workers=3",
    )

    def lines_of(name):
        assert run.process.poll() is None, run.terminal()[-3000:]
        path = run_dir / name
        # The last line may be half written.
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def reached(figure, value):
        """Whether a step's figure has reached ``value``."""
        return any(line["data"].get(figure, 0) >= value for line in lines_of("metrics.jsonl"))

    def validated():
        """Number of validations."""
        return sum(any(key.startswith("val-") for key in line["data"]) for line in lines_of("metrics.jsonl"))

    def in_mid_round():
        """Whether a round has gone on for two seconds; one whose batch was complete beforehand and its update take one."""
        last = lines_of("run.jsonl")[-1]
        return last["event"] == "begin" and time.time() - last["start"] > 2

    wait_for(lambda: reached("training/global_step", 2), "two steps")
    for title, where in ((ENGINE, [1, 1, 0]), (WORKER, [1, 1, 1]), (REWARD, [1, 1, 1])):
        assert [len(node.processes(title)) for node in (first, second, third)] == where

    wait_for(in_mid_round, "the middle of a round", 60)
    third.kill()
    for process in first.processes(BALANCER) + second.processes(BALANCER):
        process.kill()
    validations = validated()
    wait_for(lambda: reached("partial_rollout/failures/workers_restarted_total", 1), "a worker in the dead one's place")
    taken_over = re.search(r"agent_loop_worker_\d died .*_\d\.2 takes its (\d+) samples over", run.terminal())
    assert taken_over and int(taken_over[1]) > 0, run.terminal()[-3000:]
    assert [len(node.processes(WORKER)) for node in (first, second)] == [2, 1]

    wait_for(in_mid_round, "the middle of a round", 60)
    second.processes(ENGINE)[0].kill()
    wait_for(lambda: reached("partial_rollout/failures/replicas_restarted_total", 1), "a replica in its place")
    assert [len(node.processes(ENGINE)) for node in (first, second)] == [1, 1]
    wait_for(lambda: validated() > validations, "a validation without verl's load balancer", 60)
    assert not reached("partial_rollout/failures/masked_total", 1)

    wait_for(in_mid_round, "the middle of a round", 60)
    second.kill()
    assert run.process.wait(60) == 1, run.terminal()[-3000:]
    (error,) = [line for line in run.terminal().splitlines() if "training failed:" in line]
    assert re.search("died|dead|unavailable", error), error
    wait_for(lambda: not first.processes(ENGINE), "the end of the run's engine on the living node", 30)
    result, _ = audit(run_dir)
    assert result.violations == [] and not result.complete
    trained = len(result.trained)
    first.kill()

    monkeypatch.delenv("RAY_ADDRESS")
    last = trained // 4 + 3
    resumed = start(*ours, "trainer.n_gpus_per_node=2", f"trainer.total_training_steps={last}", name="resumed")
    assert resumed.process.wait(300) == 0, resumed.terminal()[-3000:]
    result, _ = audit(run_dir)
    assert result.violations == [] and result.complete and result.kills == 1
    assert len(result.trained) == 4 * last
