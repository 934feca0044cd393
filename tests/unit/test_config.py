"""A user's mistake ends before Ray starts, in one line: key, value, what is allowed."""

import contextlib
from inspect import getsource
from typing import get_args

import msgspec
import pytest
import ray
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from msgspec import inspect
from msgspec.inspect import type_info
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.config.keys import ConfigError, allowed, leaves
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.preflight import check_settings
from recipe.partial_rollout.preflight.learning_rules import DUAL_CLIPS, LEARNING, NOT_UNDER_V1, TRAINING
from recipe.partial_rollout.preflight.rule import broken, full
from recipe.partial_rollout.preflight.rules import _ENGINES, _PARTIAL_ROLLOUT
from recipe.partial_rollout.preflight.verl_keys import VALUES, _declared, check_verl_keys, of_hydra
from recipe.partial_rollout.training.loss import DIVERGENCE_LOSSES
from tests.unit.shared import check_config

P, ACTOR, ROLLOUT = "partial_rollout", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION, LOSS = "algorithm.rollout_correction", f"{ACTOR}.policy_loss.loss_mode"
FILTER = "algorithm.filter_groups"
FILTERS = f"{FILTER}.enable=True"
SEPARATE, TP = f"{P}.placement=separate", f"{ROLLOUT}.tensor_model_parallel_size"
SPLIT = f"{SEPARATE} {ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node"
MODEL_RM = f"{P}.reward_in_worker=False reward.reward_model"
V1, JOINS = "trainer.use_v1=True", "+ray_kwargs.ray_init.address=auto"
MODEL, MANAGER, GDPO = "actor_rollout_ref.model", "reward.reward_manager", "algorithm.adv_estimator=gdpo"
BACKEND, VLLM = f"{ROLLOUT}.checkpoint_engine.backend", f"{ROLLOUT}.engine_kwargs.vllm"
RS = f"{CORRECTION}.rollout_rs"


def test_quickstart_config_passes_with_whatever_only_verl_reads(configure):
    free = check_config(configure("actor_rollout_ref.rollout.max_num_seqs=32"))
    assert (free.enable, free.batch_samples, free.slots_per_replica, free.slots_given) == (True, 8, 32, False)
    given = check_config(configure("partial_rollout.slots_per_replica=48"))
    assert (given.slots_per_replica, given.slots_given) == (48, True)
    thresholds = [f"{CORRECTION}.rollout_is_threshold={given}" for given in ("5.0", "'1e-9_2.0'")]
    nopr = f"{P}.enable=False"
    alone = f"algorithm=reinforce_plus_plus {ROLLOUT}.n=1"
    undeclared = "+data.cache_dir=/tmp +data.filter_prompts=False +data.difficulty=3 +mine.x=1"
    handed_on = f"+{ROLLOUT}.custom.x=1 +{VLLM}.kv-cache-dtype=auto +{ROLLOUT}.{SHARE}=.5"
    rejects = f"{RS}='token_k1,seq_mean_k3' {RS}_threshold='0.5_2.0,0.1'"
    same = f"+{MODEL}.override_config.rms_norm_eps=.5 +{VLLM}.hf_overrides.rms_norm_eps=.5"
    trainers = f"+{MODEL}.override_config.attention_dropout=0. +{MODEL}.override_config.max_position_embeddings=9999"
    contents = f"{ACTOR}.checkpoint.load_contents=null trainer.logger=tracking trainer.critic_warmup=1"
    known = *thresholds, alone, undeclared, handed_on, rejects, same, trainers, contents
    for overrides in (*known, f"{nopr} {ROLLOUT}.name=sglang"):
        check_settings(configure(*overrides.split()))
    for arm in (f"{P}.correction=none", f"{P}.correction=decoupled", nopr):
        check_config(configure(arm, "algorithm=gspo", f"{ACTOR}.clip_ratio_c=null"))


SHARE = "standalone_gpu_memory_utilization"
"""a field of verl's dataclass that its file of defaults lacks, and that is spelt like another"""
BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"
SMOLLM2 = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 1,
    "num_attention_heads": 9,
}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "overrides", "megabytes"),
    [
        (SMOLLM2, (), 108),
        (SMOLLM2, ("actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",), 64),
        ({"model_type": "gemma3", "vocab_size": 10, "text_config": {**SMOLLM2, "model_type": "gemma3_text"}}, (), 108),
        ({"vocab_size": 10}, (), 64),
        (SMOLLM2, (f"{BUCKET}=300",), 300),
    ],
)
def test_bucket_of_the_weight_sync_holds_the_largest_tensor(configure, sizes, overrides, megabytes):
    config = configure(*overrides, model=sizes)
    check_config(config)
    assert OmegaConf.select(config, BUCKET) == megabytes


MISTAKES = {
    "trainer.n_gpus_per_node=3": "data.train_batch_size=4: times actor_rollout_ref.rollout.n=2 it must be",
    f"{ACTOR}.ppo_mini_batch_size=3": "a divisor of data.train_batch_size=4",
    "data.gen_batch_size=7": "must equal data.train_batch_size=4, or be null",
    f"{ROLLOUT}.max_model_len=500": "response_length=1536: with prompt_length=64 it must fit",
    f"{ROLLOUT}.calculate_log_probs=False": "True if partial_rollout.enable=True: samples span",
    f"{P}.overlap=-0.5": "partial_rollout.overlap=-0.5: at least 0; or, with partial_rollout.mode=april",
    f"{P}.overlap=-0.9 {P}.mode=april": "data.train_batch_size is at least 1",
    **{f"{V1} algorithm.adv_estimator={name}": "any other if trainer.use_v1=True: verl's v1" for name in NOT_UNDER_V1},
    f"{ACTOR}.loss_scale_factor=null {V1} {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm": (
        f"=1536 if {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm and {V1}: with null"
    ),
    f"{P}.overlap=9": "partial_rollout.overlap=9: at most partial_rollout.max_staleness=8: more groups",
    f"{P}.mode=ssim {P}.overlap=0 {P}.max_staleness=0": "max_staleness=0: at least 1 in mode ssim",
    f"{P}.failures.tool_timeout_s=1300": "at most partial_rollout.failures.sample_timeout_s=1200",
    f"{P}.tools.release_after_s=inf": "below partial_rollout.deadlines.stall_s=60",
    "actor_rollout_ref.model.path=/nowhere/model": "a local model directory",
    "data.train_files=/nowhere/a.parquet": "an existing parquet file",
    f"data.train_files={__file__}/": "an existing parquet file",
    "data.val_files='/nowhere/a[1].parquet'": "paths without * ? [ ], which the reader of data files",
    "data.seed=null data.val_max_samples=8": "data.seed=None: an integer of at least 0, if data.shuffle and max",
    f"{V1} trainer.v1.sampler.max_off_policy_threshold=4": "8 if trainer.use_v1=True: partial_rollout.max_",
    "skip.rollout.enable=True": "False if partial_rollout.enable=True: the recipe makes",
    "algorithm.adv_estimator=gae critic.enable=False": "critic.enable=False: one of True, null if",
    f"{ROLLOUT}.enable_rollout_routing_replay=True": "False if partial_rollout.enable=True: the engine",
    f"engine=megatron {ACTOR}.megatron.router_replay.mode=R3": "R3: one of R2, disabled, null if partial_",
    f"{ACTOR}.checkpoint.async_save=True": "False: a checkpoint counts as complete once",
    "algorithm.rollout_correction=null": "algorithm.rollout_correction=None: a section of keys",
    f"{CORRECTION}.rollout_is=row": "one of geometric, null, sequence, token",
    "actor_rollout_ref.rollout.top_p=0.7": "rollout.top_p=0.7: one of 1.0",
    f"{MODEL}.lora_rank=8": "rollout.load_format=dummy: safetensors, or auto, with LoRA adapters",
    "actor_rollout_ref.rollout.top_k=20": "rollout.top_k=20: one of -1, 0",
    "actor_rollout_ref.rollout.temperature=0.001": "rollout.temperature=0.001: at least 0.01",
    f"{CORRECTION}.rollout_is_threshold='2.0_5.0'": "rollout_is_threshold=2.0_5.0: at least 1, or lower_upper as text",
    f"{LOSS}=bypass_mode": "this one ignores them",
    f"{LOSS}=dro": "a loss that takes rollout_is_weights (ValueError: policy_loss.dro_beta must be",
    f"{ACTOR}.clip_ratio_c=1.0": "a number above 1; or null (no dual clip)",
    f"algorithm=gspo {CORRECTION}.rollout_is=token": "one of geometric, null, sequence if",
    f"{P}.correction=none {CORRECTION}.rollout_is=token": "null if partial_rollout.correction=none",
    f"{P}.correction=none {ACTOR}.clip_ratio_c=null": "clip_ratio_c=None: a number above 1",
    f"+{VLLM}.speculative_config.method=ngram": "null if trainer.device=cpu: vLLM's draft proposers",
    f"{P}.enable=False {P}.placement=separate": "colocated if partial_rollout.enable=False",
    f"{P}.resume_kv=keep {ROLLOUT}.free_cache_engine=True": f"engine=True: must be False if {P}.resume_kv=keep and",
    "actor_rollout_ref.model.path=nobody/no-model": "`hf download nobody/no-model --local-dir DIR`",
    f"algorithm=grpo_passk {ROLLOUT}.n=1": "at least 2 if algorithm.adv_estimator=grpo_passk, whose",
    f"{FILTERS} {P}.enable=False": f"{FILTERS}: must be False if partial_rollout.enable=False: verl's v0 trainer",
    f"{FILTERS} {FILTER}.max_num_gen_batches=1": "0 for no limit, or at least 2",
    f"{FILTERS} {FILTER}.max_inflight_gen_batches=2": f"one of 1, null if {FILTERS}: partial_rollout.over",
    f"{FILTERS} algorithm.use_kl_in_reward=True {FILTER}.metric=seq_final_reward": "reward with",
    f"{FILTERS} {MODEL_RM}.enable=True": "resource_pool=False: must be True if reward.reward_model.enable=True and",
    f"algorithm=gspo {P}.trust_region_bounds=[0.1,0.1]": "null: partial_rollout.trust_region=auto is no region",
    f"{P}.trust_region=none {P}.trust_region_bounds=[0.1,0.1]": "none is no region with",
    f"{CORRECTION}.rollout_is_threshold=0.5_5": "threshold=0.55: at least 1, or lower_upper as text in quotes",
    f"{LOSS}=dppo_tv {P}.trust_region=mask": f"_bounds=None: [low, high], such as [0.2,0.2] if {P}.trust_region=mask and",
    f"+{VLLM}.logprobs_mode=raw_logprobs": f"must be null if {P}.enable=True: set {ROLLOUT}.logp",
    f"{P}.resume_kv=keep +{VLLM}.enable-prefix-caching=False": f"set {ROLLOUT}.enable_prefix_caching",
    f"{P}.resume_kv=keep +{VLLM}.no-enable-prefix-caching=True": f"set {ROLLOUT}.enable_prefix_caching",
    f"+{VLLM}.tensor-parallel-size=2": f"must be null if {P}.enable=True: set {ROLLOUT}.tensor_model_parallel_size",
    f"+{VLLM}.speculative-config.method=ngram": "null if trainer.device=cpu: vLLM's draft proposers",
    f"+{VLLM}.logits_processors=[a.b:C]": "null if",
    f"{ROLLOUT}.agent.num_workers=3 {P}.enable=False": "num_workers=3: a divisor of 8",
    # a split that cannot work
    f"{SEPARATE} {MODEL_RM}.enable=True reward.reward_model.enable_resource_pool=False": "pool=False: must be True if",
    f"{SPLIT}=3 {TP}=2": "=3: with rollout.nnodes=1 it must make whole replicas",
    f"{SPLIT}=2 {TP}=2 trainer.n_gpus_per_node=1": "=1: times trainer.nnodes=1",
    f"{SPLIT}=1 {BACKEND}=shm {JOINS} trainer.nnodes=2": f"trainer.nnodes=2: must be 1 if {BACKEND}=shm",
    f"{BACKEND}=nccl": f"backend=nccl: must be naive if {P}.placement=colocated",
    "+trainer.remove_previous_ckpt_in_save=True": "False: trainer.max_actor_ckpt_to_keep=1 takes its place",
}
"""overrides, and a part of the error; it also has the last override, unless it names another key"""


@pytest.mark.parametrize("overrides", MISTAKES)
def test_mistake_is_refused_in_one_line(configure, monkeypatch, overrides):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError) as caught:
        check_config(configure(*overrides.split()))
    said, message = str(caught.value), MISTAKES[overrides]
    assert message in said and "\n" not in said
    assert "=" in message.split(":")[0] or overrides.split()[-1].partition("=")[0].lstrip("+").rsplit(".", 1)[0] in said
    assert not ray.is_initialized()


REF = "actor_rollout_ref.ref.log_prob"
BUDGET = "max_token_len_per_gpu"
GAE, VECTORIZED = (f"algorithm.adv_estimator={name}" for name in ("gae", "grpo_vectorized"))
GDPO, BY_STD = "algorithm.adv_estimator=gdpo", "algorithm.norm_adv_by_std_in_grpo"
OVERRIDE = f"{MODEL}.override_config"
VERLS_MISTAKES = {
    # verl takes a word for true, and text for a number
    f"{ACTOR}.use_kl_loss=off": "true or false",
    f"{ACTOR}.optim.betas=0.9": "a list",
    f"{ACTOR}.optim=abc": "a section of keys",
    "trainer.n_gpus_per_node='8'": "an integer of at least 1 (this is text; to read a number from an environment variable",
    # keys that nothing reads
    "+trainer.save_frequency=3": "no such key; did you mean trainer.save_freq?",
    f"{ACTOR}.grad_clip=0.5": f"verl's default, 1.0, because verl 0.9.1 reads {ACTOR}.optim.clip_grad instead",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True": "verl 0.9.1 reads the keys of reward instead",
    "data.reward_fn_key=source": "verl's default, data_source, because verl 0.9.1 reads the column data_source alone",
    "data.tokenizer=/mine": "verl's default, None, because verl 0.9.1 reads actor_rollout_ref.model.tokenizer_path instead",
    "data.truncation=left": "verl's default, error, because verl 0.9.1 cuts no prompt",
    f"+{ROLLOUT}.checkpoint_manager_class=my.Own": "null: the recipe has its own",
    f"+{ROLLOUT}.engine_kwargs.vllm.mm-processor-kwargs.a=1": "must be null: data.mm_processor_kwargs reaches the trainer",
    # what would train something else
    f"{ACTOR}.optim.clip_grad=0.0": "a number above 0",
    "actor_rollout_ref.model.custom_chat_template=/models/mine/chat_template.jinja": "the template itself (Jinja text)",
    "data.use_shm=True": "False: verl would read an old copy in /dev/shm",
    f"{LOSS}=geo_mean": "any other: verl averages this loss in each micro-batch",
    f"{ACTOR}.checkpoint.save_contents=[optimizer]": "without model",
    f"{ACTOR}.checkpoint.load_contents=[optimizer,extra]": "without model",
    f"{ACTOR}.checkpoint.load_contents=[model,optimiser]": "model and any of optimizer, extra, hf_model",
    f"{GAE} critic.checkpoint.save_contents=[hf_model]": "save_contents=['hf_model']: null, or a list of model",
    f"{GAE} critic.checkpoint.load_contents=[]": "critic.checkpoint.load_contents=[]: null, or a list of model",
    f"{ACTOR}.use_dynamic_bsz=False": "verl refuses the configuration: AssertionError: [actor] Please set at least one",
    f"{ROLLOUT}.tensor_model_parallel_size=2": "1 device(s) must make whole replicas; one replica takes 2",
    # a micro-batch must hold the longest sample
    f"{ACTOR}.ppo_{BUDGET}=1599": "at least 1,600, the tokens of the longest sample",
    f"{ACTOR}.use_kl_loss=True {ACTOR}.strategy=fsdp2 actor_rollout_ref.ref.log_prob_{BUDGET}=9": "at least 1,600",
    f"{GAE} critic.forward_{BUDGET}=8 critic.ppo_{BUDGET}=8": "at least 1,600",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz=False": f"must equal {ACTOR}.use_dynamic_bsz=True",
    # LoRA: each training engine reads keys of its own
    f"{MODEL}.lora.rank=8": f"verl's default, 0, because fsdp2 does not read it: set {MODEL}.lora_rank",
    f"{MODEL}.lora.rank=8 {MODEL}.lora.merge=True {ACTOR}.strategy=fsdp": f"0, because fsdp does not read it: set {MODEL}",
    f"{MODEL}.lora_rank=8 {MODEL}.lora.alpha=64": f"default, 32, because fsdp2 does not read it: set {MODEL}.lora_alpha",
    f"{MODEL}.lora_rank=8 {MODEL}.lora.dropout=0.1": "0.0, because fsdp2 does not read it: its adapters are plain LoRA",
    f"{MODEL}.lora_adapter_path=/adapter": "lora_rank=0: at least 1 with actor_rollout_ref.model.lora_adapter_path",
    f"engine=megatron {MODEL}.lora_rank=8": f"default, 0, because megatron does not read it: set {MODEL}.lora.rank",
    f"{GAE} critic.model.lora.rank=8": "default, 0, because fsdp2 does not read it: set critic.model.lora_rank",
    f"{ACTOR}.freeze_vision_tower=True": "verl's default, False, because verl 0.9.1 does not read it",
    f"{ACTOR}.clip_ratio=0.05": "0.2, verl's default: set clip_ratio_low and clip_ratio_high, which take its place",
    f"{ROLLOUT}.val_kwargs.do_sample=False {ROLLOUT}.val_kwargs.temperature=1.0": "True, or rollout.val_kwargs.temperature",
    f"{ROLLOUT}.do_sample=False": "verl's default, True, because verl 0.9.1 does not read it",
    f"+{ROLLOUT}.repetition_penalty=1.2": "verl's default, 1.0, because verl 0.9.1 samples with 1.0",
    # the advantages
    "algorithm=dapo reward.reward_manager.name=naive": "cfg.enable=True: must be False with reward.reward_manager",
    "trainer.critic_warmup=2": "critic_warmup=2: must be 0: without a critic the earlier steps update nothing",
    "algorithm.use_pf_ppo=True": "use_pf_ppo=True: must be False: verl reweights the samples of gae alone",
    f"{VECTORIZED} {BY_STD}=False": f"{BY_STD}=False: must be True if {VECTORIZED}: verl divides by the standard deviation",
    f"{GDPO} {BY_STD}=False": f"{BY_STD}=False: must be True if {GDPO}: verl divides by the standard deviation",
    f"{GDPO} algorithm.use_kl_in_reward=True": f"in_reward=True: must be False if {GDPO}: verl takes its advantages from",
    f"{RS}_threshold=2.0": f"{RS}_threshold=2.0: must be null: verl reads it only with rollout_rs",
    f"+{CORRECTION}.rollout_token_veto_threshold=0.0001": f"None, because verl 0.9.1 reads {RS} instead",
    # a model that the engines do not have
    f"+{OVERRIDE}.rms_norm_eps=0.5": f"left out, or the same as +{VLLM}.hf_overrides.rms_norm_eps, which is None",
    f"+{OVERRIDE}.model_config.rope_scaling.factor=2.0 +{VLLM}.hf_overrides.rope_scaling.factor=4.0": (
        f"factor=2.0: left out, or the same as +{VLLM}.hf_overrides.rope_scaling.factor, which is 4.0 if"
    ),
    f"{CORRECTION}.bypass_mode=True": "False: verl changes the driver's loss after the workers",
    f"{CORRECTION}.loss_type=reinforce": "one of null, ppo_clip: only bypass_mode reads it",
    f"{ROLLOUT}.seed=null": "seed=None: an integer",
    GDPO: "gdpo_reward_keys=None: a list of keys of the reward, such as [format,accuracy] if algorithm.adv_estimator=gdpo",
    f"{GDPO} +algorithm.gdpo_reward_keys=acc": "gdpo_reward_keys=acc: a list of keys",
    f"{GDPO} +algorithm.gdpo_reward_keys=[acc,form] +algorithm.gdpo_reward_weights=[1.0]": "null, or a number for each",
    "data.val_max_samples=null": "data.val_max_samples=None: an integer",
    "data.seed=-1 data.val_max_samples=8": "data.seed=-1: an integer of at least 0, if data.shuffle",
    f"{CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_threshold=0.5": "threshold=0.5: at least 1, or lower_upper",
    f"{CORRECTION}.rollout_is=token {ROLLOUT}.calculate_log_probs=False": "calculate_log_probs=False: must be True",
    f"{RS}=token_k1 {RS}_threshold=2.0 {ROLLOUT}.calculate_log_probs=False": "calculate_log_probs=False: must be True",
    f"{RS}=token_k1": "rollout_rs_threshold=None: a number above 0; for a criterion of k1 at least 1, or lower_upper",
    f"{RS}=token_k1 {RS}_threshold=0.5_2": "rollout_rs_threshold=0.52: a number above 0; for a criterion of k1",
    f"{RS}=token_k9 {RS}_threshold=2.0": "rollout_rs=token_k9: null, or any of seq_max_k2",
    f"{GAE} critic.optim.clip_grad=0.0": "critic.optim.clip_grad=0.0: a number above 0",
    f"{ACTOR}.ppo_micro_batch_size=4 {ACTOR}.use_dynamic_bsz=False {ROLLOUT}.log_prob_use_dynamic_bsz=False": (
        f"null if {ACTOR}.use_dynamic_bsz=False: verl does not read it; use ppo_micro_batch_size_per_gpu"
    ),
    f"{ACTOR}.use_kl_loss=True {REF}_use_dynamic_bsz=False {REF}_micro_batch_size=4": "null if actor_rollout_ref.ref.",
    f"{ACTOR}.use_dynamic_bsz=False {ACTOR}.ppo_micro_batch_size_per_gpu=4 {ROLLOUT}.log_prob_micro_batch_size=4 "
    f"{ROLLOUT}.log_prob_use_dynamic_bsz=False": "does not read it; use log_prob_micro_batch_size_per_gpu",
    # code and places that are named
    "trainer.logger=[file,wandbb]": "one or several of clearml, console, file, mlflow, ",
    "trainer.logger=[]": "trainer.logger=[]: one or several of ",
    f"{ROLLOUT}.agent.default_agent_loop=mine": "one of single_turn_agent, tool_agent",
    f"{ROLLOUT}.agent.agent_loop_config_path=/nowhere.yaml": "a YAML list of agent loops, each with its name",
    f"{ROLLOUT}.multi_turn.format=qwen": "format=qwen: one of ",
    "reward.reward_manager.name=mine": "one of dapo, gdpo, naive",
    f"{MANAGER}.source=file": f"{MANAGER}.source=file: one of importlib, register",
    f"{MANAGER}.source=importlib {MANAGER}.name=Own": f"{MANAGER}.module.path=None: a file with the class Own",
    f"{MANAGER}.source=importlib {MANAGER}.name=Own {MANAGER}.module.path=/nowhere.py": f"{MANAGER}.module.path=/nowhere",
    "reward.custom_reward_function.path=/nowhere.py": "a file with the function compute_score",
    "actor_rollout_ref.model.external_lib=no.such": "a module that can be imported",
    "trainer.default_local_dir=/proc/run": "a local directory that this user can write",
    "trainer.default_local_dir=s3://bucket/run": "a local directory that this user can write",
    "trainer.default_local_dir='$HOME/run'": "a local directory that this user can write",
    "trainer.default_local_dir=''": "a local directory that this user can write",
    f"trainer.default_local_dir={__file__}": "a local directory that this user can write",
}
"""what verl finds out late, or never, with and without partial rollout"""


@pytest.mark.parametrize("overrides", VERLS_MISTAKES)
def test_what_verl_finds_out_late_or_never_is_refused_for_both_arms(configure, overrides):
    for arm in ("True", "False"):
        with pytest.raises(ConfigError) as caught:
            check_config(configure(f"{P}.enable={arm}", *overrides.split()))
        assert VERLS_MISTAKES[overrides] in str(caught.value) and "\n" not in str(caught.value)


def test_override_that_hydra_cannot_parse_is_answered_with_how_to_quote_it():
    with pytest.raises(OverrideParseException) as caught:
        OverridesParser.create().parse_overrides(["data.train_files=/a b (1)/train.parquet"])
    said = str(of_hydra(caught.value))
    assert "data.train_files=/a b (1)/train.parquet" in said and "\n" not in said
    assert said.endswith("""; a value with spaces or signs needs quotes of its own: 'KEY="VALUE"'""")


LISTING = [
    rule
    for rule in (*TRAINING, *LEARNING, *_ENGINES, *_PARTIAL_ROLLOUT)
    if rule.holds.__qualname__.startswith(("only.", "one_of.")) and all(isinstance(when, str) for when in rule.when)
]
"""rules that list the values of one key"""
UNDECLARED = (
    *("model_engine", "trainer.remove_previous_ckpt_in_save", f"{ROLLOUT}.checkpoint_manager_class"),
    f"{ACTOR}.megatron.router_replay.mode",
    *(f"{VLLM}.{name}" for sign in "_-" for name in (f"logits{sign}processors", f"speculative{sign}config")),
    *(f"{VLLM}.mm{sign}processor{sign}kwargs" for sign in "_-"),
)
"""keys that verl reads without declaring them for FSDP"""


@pytest.mark.parametrize("rule", LISTING, ids=lambda rule: rule.key)
def test_value_that_a_rule_does_not_list_is_refused_where_the_rule_applies(resolved_config, rule):
    config = resolved_config("quickstart_cpu")
    for key, _, value in (condition.partition("=") for condition in rule.when):
        # It raises where there is no such key.
        OmegaConf.update(config, full(key), yaml.safe_load(value))
    check_verl_keys(config)
    PartialRolloutConfig.from_config(config)
    # Without a reward model verl's defaults, and the quick start's, are listed.
    assert config.reward.reward_model.enable or not [*broken([rule], config)]
    OmegaConf.update(config, full(rule.key), "other", force_add=full(rule.key) in UNDECLARED)
    (error,) = broken([rule], config)
    assert str(error).startswith((f"{full(rule.key)}=other: must be ", f"{full(rule.key)}=other: one of "))
    assert all(full(condition) in str(error) for condition in rule.when) and "\n" not in str(error)


def beyond(kind):
    """A value outside ``kind`` on each side that it bounds."""
    match type_info(kind):
        case inspect.IntType() | inspect.FloatType() as number:
            below = number.gt if number.gt is not None else None if number.ge is None else number.ge - 1
            return [each for each in (below, number.le and number.le * 2, "many") if each is not None]
        case inspect.LiteralType():
            return ["other", 7]
    return [7, None]


def takes(kind, value):
    with contextlib.suppress(msgspec.ValidationError):
        msgspec.convert(value, kind)
        return True


@pytest.mark.parametrize("key", VALUES)
def test_value_beyond_its_limits_is_refused_with_what_is_allowed(resolved_config, key):
    config, kinds = resolved_config("quickstart_cpu"), get_args(VALUES[key])
    kinds = kinds if type(None) in kinds or str in kinds else [VALUES[key]]
    assert key in dict(leaves(_declared())), "verl declares no such key"
    for value in [each for each in (*beyond(kinds[0]), True) if not any(takes(kind, each) for kind in kinds)]:
        OmegaConf.update(config, key, value, force_add=True)
        with pytest.raises(ConfigError) as caught:
            check_verl_keys(config)
        words = str(caught.value).removeprefix(f"{key}={value}: ")
        assert words.startswith(", or ".join(allowed(type_info(kind)) for kind in kinds)) and "\n" not in words


def test_devices_that_share_a_model_share_its_batch_and_its_longest_sample(configure, monkeypatch):
    monkeypatch.setattr("verl_ext.packed_attention.flash_attn_problem", lambda: None)
    flash = "actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2"
    odd = "data.train_batch_size=3", f"{ACTOR}.ppo_mini_batch_size=3", f"{ROLLOUT}.n=3", "trainer.n_gpus_per_node=2"
    shared = *odd, flash, "actor_rollout_ref.model.use_remove_padding=True", f"{ACTOR}.ulysses_sequence_parallel_size=2"
    check_config(configure(*shared, f"{ACTOR}.ppo_{BUDGET}=800"))
    with pytest.raises(ConfigError, match=r"ppo_\w+=799: at least 800, .* over the 2 device\(s\) that share it"):
        check_config(configure(*shared, f"{ACTOR}.ppo_{BUDGET}=799"))
    with pytest.raises(
        ConfigError, match=r"train_batch_size=3: times .*n=3 it must be divisible by 2 \(data-parallel ranks\)"
    ):
        check_config(configure(*odd))


USING = "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "cispo"


def test_every_policy_loss_of_verl_is_either_accepted_or_refused_above(configure):
    assert {*POLICY_LOSS_REGISTRY} == {*USING, "dro", "bypass_mode", "geo_mean"}
    dual = {name for name, loss in POLICY_LOSS_REGISTRY.items() if "clip_ratio_c" in getsource(loss)}
    assert dual == {*DUAL_CLIPS}
    for loss_mode in USING:
        bounds = (f"{P}.trust_region_bounds=[0.2,0.2]",) if loss_mode in DIVERGENCE_LOSSES else ()
        check_settings(configure(f"{LOSS}={loss_mode}", f"{P}.trust_region=mask", *bounds))


@pytest.mark.parametrize(
    ("variable", "override", "words"),
    [
        ("RAY_TMPDIR", "", r"_temp_dir=None: a path of at most 43 bytes, because .*; null means /tmp/d+/ray, from"),
        ("MINE", "trainer.nnodes=2", r"nnodes=2: 1 \(NNODES=1\), or a Ray cluster: `ray start --head`"),
    ],
)
def test_what_a_new_ray_cannot_do_is_refused(configure, monkeypatch, variable, override, words):
    for name in ("RAY_ADDRESS", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "/tmp/" + "d" * 60)
    with pytest.raises(ConfigError, match=words):
        check_settings(configure(*override.split()))
    # A Ray that runs has its directory, and its nodes.
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    check_settings(configure(*override.split()))


def test_each_arm_has_its_own_agent_loop_manager_and_priorities(configure, capsys):
    on, off = configure("partial_rollout.correction=none"), configure("partial_rollout.enable=False")
    for config in (on, off):
        check_settings(config)
        main_ppo.apply_overrides(config)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: partial_rollout.correction=none:")
    assert on.algorithm.rollout_correction.rollout_is is None
    on, off = on.actor_rollout_ref.rollout, off.actor_rollout_ref.rollout
    assert (on.scheduling_policy, off.scheduling_policy, on.custom.kv_headroom) == ("priority", "fcfs", 0.05)
    assert "PartialRollout" in on.agent.agent_loop_manager_class and "Observed" in off.agent.agent_loop_manager_class
