"""Real training on two cores: noPR, and PR on the same 24 prompts with conversations that call a tool."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from recipe.partial_rollout.records.metrics import METRICS, SECTION
from recipe.partial_rollout.tools.report.command import main as report

# Two trainings, one after the other, in a fixture.
pytestmark = pytest.mark.timeout(1200)

# 24 prompts, 4 a step: the data ends with step 6. A learning rate of 0 makes versions differ in name only, so that the
# trainer can recompute what the engine reported, however often a sample was interrupted.
SMALL = (
    "data.train_batch_size=4",
    "data.train_max_samples=24",
    "trainer.total_training_steps=null",
    "data.max_response_length=400",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_model_len=480",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "actor_rollout_ref.actor.optim.lr=0.0",
)


VALIDATED = ("data.val_max_samples=8", "trainer.test_freq=2")
HERE = Path(__file__).parent
TOOLS = (
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    "actor_rollout_ref.rollout.multi_turn.enable=True",
    "actor_rollout_ref.rollout.multi_turn.format=scripted",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
    f"actor_rollout_ref.rollout.multi_turn.function_tool_path={HERE / 'scripted_tool.py'}",
    "partial_rollout.failures.tool_timeout_s=3",
    # On a busy machine a tool takes a third of a second; the one that hangs is to be the only slow one.
    "partial_rollout.tools.release_after_s=1",
)


@pytest.fixture(scope="module")
def tool_calls(tmp_path_factory):
    """A line for each call that was answered."""
    return tmp_path_factory.mktemp("tools") / "calls"


@pytest.fixture(scope="module")
def arms(module_train, tool_calls):
    """In PR a sample has three turns with a tool call between them, and a reward that awaits; prompts are trained in order,
    and the KV cache is for 24 samples of 64 + 400 / 2 tokens out of 32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOL_CALLS", str(tool_calls))
        return {
            "noPR": module_train(*SMALL, *VALIDATED, "partial_rollout.enable=False", name="noPR"),
            "PR": module_train(
                *SMALL,
                *VALIDATED,
                *TOOLS,
                "partial_rollout.max_staleness=3",
                "partial_rollout.scheduling.overtake=0",
                # two updates a batch: verl runs its pass over it, and logs every difference, in every step
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
                "partial_rollout.reward_in_worker=False",
                f"reward.custom_reward_function.path={HERE / 'async_reward.py'}",
                "+actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=200",
                "actor_rollout_ref.actor.use_kl_loss=True",
                name="PR",
            ),
        }


def test_both_arms_log_every_overview_figure_from_the_first_step_on(arms):
    figures = {f"{SECTION}/{name}" for name in METRICS} - {f"{SECTION}/held_out_reward"}
    for arm, run in arms.items():
        for number, step in run.steps.items():
            assert step.keys() >= figures | {"actor/entropy"}, (arm, number)


def trained(run):
    return Counter((group["uid"].split("/")[0], group["prompt"]) for event in run.rounds for group in event["trained"])


def test_both_arms_train_every_prompt_once_and_validate_between_rounds(arms):
    for arm, run in arms.items():
        assert sorted(run.steps) == [1, 2, 3, 4, 5, 6], arm
        assert len(trained(run)) == 24 and set(trained(run).values()) == {1}, arm
        assert run.run["complete"] and run.run["arm"] == arm
        assert [n for n, step in run.steps.items() if any(key.startswith("val-core") for key in step)] == [2, 4, 6]
        assert max(n for event in run.rounds for group in event["trained"] for n in group["lengths"]) <= 400
    assert trained(arms["noPR"]) == trained(arms["PR"])


def test_prompts_are_trained_in_dataset_order_in_both_arms(arms):
    for run in arms.values():
        assert [group["order"] for event in run.rounds for group in event["trained"]] == list(range(24))
    assert not any(event["carried_groups"] for event in arms["noPR"].rounds)
    assert (arms["PR"].run["mode"], arms["PR"].run["policy"]) == ("window", "bounded")


def test_behaviour_log_probs_of_interrupted_samples_are_the_engines_own(arms):
    """Weights are frozen, so recomputing must give what the engine said, within float32."""
    for run in arms.values():
        for step in run.steps.values():
            assert step["training/rollout_probs_diff_max"] < 1e-3
            assert step["training/rollout_probs_diff_mean"] < 1e-5


def test_nothing_is_lost_and_the_last_round_drains(arms):
    steps = arms["PR"].steps
    assert all(step["partial_rollout/lost_samples"] == 0 for step in steps.values())
    assert 1 <= max(step["partial_rollout/staleness/max"] for step in steps.values()) <= 3
    assert any(step["partial_rollout/buffer/carried_groups"] > 0 for step in steps.values())
    assert steps[6]["partial_rollout/inflight/samples"] == 0
    assert steps[6]["partial_rollout/buffer/interrupted_total"] > 0


def test_decoupled_loss_is_on_under_partial_rollout_only(arms):
    assert any(key.startswith("rollout_corr/") for key in arms["PR"].steps[3])
    assert not any("rollout_is_mean" in key for key in arms["noPR"].steps[3])


def test_report_compares_the_arms_at_equal_work(arms, tmp_path):
    assert report([str(arms[arm].directory) for arm in ("noPR", "PR")] + ["--out", str(tmp_path)]) == 0
    made = json.loads((tmp_path / "report.json").read_text())
    runs = made["runs"]
    for arm in ("noPR", "PR"):
        assert runs[arm]["trained_groups"] == 24 and runs[arm]["lost_samples"] == 0
    assert runs["PR"]["staleness"]["max"] <= 3 and runs["noPR"]["staleness"]["max"] == 0
    assert made["against_base"]["PR"]["ratios"]["rollout_s_per_trained_token"] > 0
    assert (tmp_path / "timeline.png").stat().st_size > 10_000


def test_tool_conversation_survives_interruptions(arms, tool_calls):
    """Every sample has three turns with a tool call between them; no interruption repeats a call."""
    run, calls = arms["PR"], tool_calls.read_text().split()
    segments = [s for event in run.rounds for group in event["trained"] for s in group["segments"]]
    # verl counts the prompt, every answer and every tool response; answers are one more than tool responses.
    answers = sum(step["num_turns/mean"] * 16 / 2 for step in run.steps.values())
    assert len(segments) == 96 and sum(segments) > answers
    # 96 trained samples and three validations of 8 have two calls at most; verl leaves out an answer that does not fit.
    assert sum(step["num_turns/mean"] - 2 for step in run.steps.values()) * 16 / 2 <= len(calls) <= 2 * (96 + 3 * 8)
    assert run.steps[6]["partial_rollout/failures/retried_total"] == 1
    # The call that hung came after its sample's first turn, whose tokens are kept.
    assert run.steps[6]["partial_rollout/failures/lost_tokens_total"] == 0
    # The slot of the one that hangs, for its three seconds but the first.
    assert run.steps[6]["partial_rollout/agent/slots_freed_s_total"] > 1.5
    assert max(step["num_turns/max"] for step in run.steps.values()) == 6


def test_asynchronous_reward_and_a_reference_policy_train(arms):
    for step in arms["PR"].steps.values():
        assert math.isfinite(step["actor/pg_loss"]) and step["actor/grad_norm"] > 0
        assert 0 < step["critic/score/mean"] < 1
        assert step["actor/kl_loss"] == pytest.approx(0, abs=1e-5)


def test_slots_follow_the_kv_cache_where_it_is_scarce(arms):
    run = arms["PR"]
    assert run.run["slots_per_replica"] == 24
    # Slots follow what samples held; at the rule's size the engine seldom has to preempt one.
    assert run.steps[1]["partial_rollout/rollout/slots_per_replica"] == 24
    assert sum(step["partial_rollout/rollout/preemptions"] for step in run.steps.values()) < 24
