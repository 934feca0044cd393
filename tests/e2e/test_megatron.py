"""``main_ppo`` with Megatron-Core at TP2 over gloo: PR that is killed and resumed, and noPR with a critic.

That a restart goes on with weights and moments is shown in ``tests/integration/test_megatron.py``.
"""

import math

import pytest
import torch
from safetensors.torch import load_file

from recipe.partial_rollout.tools.audit import audit
from tests.chaos.victim import kill_session

# Two trainings, one after the other; each starts for a minute and a half.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

SMALL = (
    "engine=megatron",
    # tests/megatron trains float32, by mbridge; the reference follows the actor's bridge.
    "actor_rollout_ref.actor.megatron.vanilla_mbridge=True",
    "critic.megatron.vanilla_mbridge=True",
    "+actor_rollout_ref.actor.megatron.dtype=float32",
    "+actor_rollout_ref.ref.megatron.dtype=float32",
    "+critic.megatron.dtype=float32",
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    "data.train_batch_size=4",
    "data.train_max_samples=24",
    "data.max_response_length=200",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_model_len=280",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "reward.custom_reward_function.path=pkg://recipe.partial_rollout.tasks.trace_task.agent_loop",
    "trainer.save_freq=1",
)


@pytest.fixture(scope="module", autouse=True)
def megatron_on_the_cpu(megatron_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", megatron_path)
        patch.setenv("VERL_USE_EXTERNAL_MODULES", "tests.megatron.plugin")
        yield


def sealed(run_dir, step):
    return (run_dir / f"global_step_{step}" / "partial_rollout" / "manifest.json").exists()


def test_training_that_is_killed_trains_every_prompt_once(start, wait_for, read_run, tmp_path):
    run_dir = tmp_path / "kept"
    bounded = ("partial_rollout.overlap=1.0", "partial_rollout.max_staleness=2", "partial_rollout.resume_kv=recompute")
    life = (f"trainer.default_local_dir={run_dir}", "trainer.resume_mode=auto", "trainer.total_training_steps=null")
    first = start(*SMALL, *bounded, *life, name="first")
    wait_for(lambda: sealed(run_dir, 2) or first.process.poll() is not None, "a checkpoint")
    kill_session(first.process)
    last = max((step for step in range(1, 6) if sealed(run_dir, step)), default=0)
    assert last >= 2, first.terminal()[-3000:]
    second = start(*SMALL, *bounded, *life, name="second")
    assert second.process.wait(400) == 0, second.terminal()[-3000:]

    result, _ = audit(run_dir)
    assert result.violations == [] and result.complete and (result.kills, result.resumes) == (1, 1)
    assert len(result.trained) == 24
    run = read_run(run_dir)
    # The first life may be killed before it logs its last step.
    assert set(run.steps) >= {*range(1, last), *range(last + 1, 7)}
    assert max(n for event in run.rounds for group in event["trained"] for n in group["segments"]) >= 2
    assert 1 <= max(step["partial_rollout/staleness/max"] for step in run.steps.values()) <= 2
    for step in run.steps.values():
        assert math.isfinite(step["actor/pg_loss"]) and step["actor/grad_norm"] > 0

    # Engine and trainer agree: where one version made all tokens, and on the last tokens of samples that were resumed.
    assert abs(run.steps[1]["rollout_corr/k3_kl"]) < 1e-6 and run.steps[1]["training/rollout_probs_diff_max"] < 1e-4
    gap = "partial_rollout/mismatch/kv_gap_mean"
    gaps = {number: step[gap] for number, step in run.steps.items() if gap in step}
    assert max(gaps) > last and max(gaps.values()) < 1e-5, gaps


@pytest.fixture(scope="module")
def untied(task, tmp_path_factory):
    """The task's model with an output layer of its own: mbridge makes no critic of one without."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, made = task / "task" / "model", tmp_path_factory.mktemp("untied")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(source).save_pretrained(made)
    return made


def test_noPR_trains_a_critic_and_samples_from_the_weights_of_each_step(module_train, untied):
    critic = ("critic.megatron.tensor_model_parallel_size=2", "critic.optim.lr=1e-3", f"critic.model.path={untied}")
    run = module_train(
        *SMALL,
        *critic,
        f"actor_rollout_ref.model.path={untied}",
        "algorithm.adv_estimator=gae",
        "partial_rollout.enable=False",
        "trainer.total_training_steps=3",
        name="noPR",
    )
    assert sorted(run.steps) == [1, 2, 3] and run.run["complete"] and run.run["arm"] == "noPR"
    assert [group["order"] for event in run.rounds for group in event["trained"]] == list(range(12))
    for step in run.steps.values():
        assert step["training/rollout_probs_diff_max"] < 1e-4 and step["actor/grad_norm"] > 0
        assert 0 < step["critic/vf_loss"] < math.inf and 0 < step["critic/grad_norm"] < math.inf
    weights = [
        load_file(run.directory / f"global_step_{step}" / "critic" / "model" / "huggingface" / "model.safetensors")
        for step in (1, 3)
    ]
    assert weights[0]["lm_head.weight"].shape == (1, 128)
    assert {name for name, values in weights[0].items() if torch.equal(values, weights[1][name])} == set()
