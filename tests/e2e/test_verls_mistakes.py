"""Mistakes in verl's keys that no check catches end a run by name, within minutes: verl, vLLM or Ray names them.

One that trains on, hangs, or ends without its name needs a rule in ``preflight`` again.
"""

import subprocess

import pandas as pd
import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

WITHIN_S = 180.0
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
MICRO, LORA = "micro_batch_size_per_gpu", f"{MODEL}.lora_rank=8 actor_rollout_ref.rollout.load_format=safetensors"
FIXED = f"{ACTOR}.use_dynamic_bsz=False {ROLLOUT}.log_prob_use_dynamic_bsz=False"
MISTAKES = {
    # the engine
    "+ray_kwargs.ray_init.num_cpu=4": "num_cpu",
    f"+{ROLLOUT}.engine_kwargs.vllm.max_model_length=9": "max_model_length",
    f"{ROLLOUT}.load_format=safetensor": "safetensor",
    f"{ROLLOUT}.max_model_len=9999": "9999",
    f"{ROLLOUT}.dtype=half8": "half8",
    f"{ROLLOUT}.agent.default_agent_loop=mine {ROLLOUT}.agent.agent_loop_config_path={{rows}}/loops.yaml": "Counter",
    f"{ROLLOUT}.gpu_memory_utilization=1.5": "gpu_memory_utilization",
    # the trainer's model
    f"{ACTOR}.fsdp_config.dtype=fp9": "fp9",
    f"{MODEL}.override_config.attn_implementation=flash": "flash",
    f"{MODEL}.lora_adapter_path=/nowhere {LORA}": "/nowhere",
    f"{LORA} {MODEL}.target_modules=[q_prj]": "q_prj",
    f"{ACTOR}.optim.optimizer=Adamm": "Adamm",
    f"{ACTOR}.optim.weight_decay=-1.0": "weight_decay",
    f"+{ACTOR}.optim.override_optimizer_config.epz=1": "epz",
    # the algorithm
    f"{ACTOR}.loss_agg_mode=token-means": "token-means",
    f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=kl9": "NotImplementedError",
    "algorithm.adv_estimator=optimal_token_baseline": "sum_pi_squared",
    # rewards
    "algorithm=dapo reward.reward_kwargs.overlong_buffer_cfg.len=2000": "overlong_buffer",
    # how a batch is divided
    f"{FIXED} {ACTOR}.ppo_{MICRO}=3 {ROLLOUT}.log_prob_{MICRO}=4": "micro",
    # places and trackers
    "trainer.logger=[console,wandbb]": "wandbb",
    "trainer.logger=[swanlab] trainer.project_name=my/project": "project",
    "trainer.rollout_data_dir=/proc/run": "/proc/run",
    "global_profiler.tool=nsight global_profiler.steps=[1]": "nsight",
    "data.custom_cls.name=Own data.custom_cls.path=pkg://math": "Own",
    # rows
    "data.train_files={rows}/null.parquet": "reward_model",
    "data.train_files={rows}/taken.parquet": "output",
    "data.prompt_key=promt data.filter_overlong_prompts=False": "promt",
}
"""overrides, and a word of the error"""
SMALL = (
    "data.train_batch_size=4",
    f"{ACTOR}.ppo_mini_batch_size=4",
    f"{ROLLOUT}.n=2",
    "data.max_response_length=64",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=False",
    "trainer.save_freq=-1",
    "partial_rollout.drain=True",
)


@pytest.fixture
def rows(tmp_path):
    """A folder with data files on whose rows verl breaks, and an agent loop that is none."""
    prompt = [{"role": "user", "content": "1+1"}]
    row = {"prompt": prompt, "data_source": "clock10", "reward_model": {"style": "rule", "ground_truth": "2"}}
    pd.DataFrame([row, {**row, "reward_model": None}] * 8).to_parquet(tmp_path / "null.parquet")
    pd.DataFrame([{**row, "output": "1"}] * 16).to_parquet(tmp_path / "taken.parquet")
    # A class without the method that verl calls.
    (tmp_path / "loops.yaml").write_text("[{name: mine, _target_: collections.Counter}]")
    return tmp_path


@pytest.mark.parametrize("overrides", MISTAKES)
def test_mistake_that_no_check_catches_ends_the_run_by_name(start, rows, overrides):
    run = start(*SMALL, *(each.replace("{rows}", str(rows)) for each in overrides.split()))
    try:
        code = run.process.wait(WITHIN_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"still running after {WITHIN_S:g} s: {run.terminal()[-2000:]}")
    terminal = run.terminal()
    assert code in (1, 2), terminal[-2000:]
    (error,) = [line for line in terminal.splitlines() if line.startswith(("config error:", "training failed:"))]
    assert MISTAKES[overrides] in error, error
