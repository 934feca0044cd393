"""A user's mistake ends before Ray starts, in one line: key, value, what is allowed."""

import json
import shutil
from inspect import getsource
from types import UnionType
from typing import get_args

import pytest
import ray
from msgspec import inspect
from msgspec.inspect import type_info
from omegaconf import OmegaConf

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.config.keys import ConfigError, allowed, declarations, leaves
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.preflight import check_settings
from recipe.partial_rollout.preflight.rules import DUAL_CLIPS, NOT_UNDER_V1
from recipe.partial_rollout.preflight.verl_keys import VALUES, _declared, check_verl_keys
from tests.unit.shared import check_config

SIZES = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2"]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A model directory with 10 embedding rows, a 10-token tokenizer, and empty data files."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("task")
    core = Tokenizer(models.WordLevel({str(i): i for i in range(10)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="0").save_pretrained(directory)
    sizes = {
        "model_type": "qwen3",
        "vocab_size": 10,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
    }
    (directory / "config.json").write_text(json.dumps(sizes))
    (directory / "data.parquet").write_bytes(b"")
    return directory


@pytest.fixture
def configure(task, resolved_config):
    def build(*overrides):
        files = [f"data.{split}_files={task}/data.parquet" for split in ("train", "val")]
        files.append(f"actor_rollout_ref.model.path={task}")
        return resolved_config("quickstart_cpu", *SIZES, *files, *overrides)

    return build


@pytest.mark.parametrize("name", ["RAY_TMPDIR", "TMPDIR"])
def test_temporary_directory_of_the_environment_that_is_too_long_for_rays_sockets_is_refused(
    configure, monkeypatch, name
):
    for variable in ("RAY_ADDRESS", "RAY_TMPDIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "/tmp/" + "d" * 60)
    with pytest.raises(
        ConfigError, match=r"_temp_dir=None: at most 43 bytes for Ray's sockets; null is /tmp/d+/ray, by"
    ):
        check_config(configure())
    # A Ray that runs has its directory.
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    check_config(configure())


def test_quickstart_config_passes(configure):
    settings = check_config(configure())
    assert settings.enable and settings.batch_samples == 8
    for threshold in ("5.0", "'1e-9_2.0'"):
        check_config(configure(f"algorithm.rollout_correction.rollout_is_threshold={threshold}"))
    alone = configure("algorithm=reinforce_plus_plus", "actor_rollout_ref.rollout.n=1")
    assert check_config(alone).samples_per_group == 1, "its baseline needs no sibling"


def test_slots_are_seats_at_most_unless_they_are_given(configure):
    free = check_config(configure("actor_rollout_ref.rollout.max_num_seqs=32"))
    given = check_config(configure("partial_rollout.slots_per_replica=48"))
    check_config(configure("partial_rollout.slots_per_replica=984"))
    check_config(configure("actor_rollout_ref.rollout.max_num_seqs=2048"))
    assert (free.slots_per_replica, free.slots_given) == (32, False)
    assert (given.slots_per_replica, given.slots_given) == (48, True)


BUCKET = "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes"


@pytest.fixture
def with_model(task, tmp_path, configure):
    """``with_model(sizes, *overrides)``: the config with a model of ``sizes``, as its ``config.json`` has them."""

    def build(sizes, *overrides):
        shutil.copytree(task, tmp_path, dirs_exist_ok=True)
        (tmp_path / "config.json").write_text(json.dumps(sizes))
        return configure(f"actor_rollout_ref.model.path={tmp_path}", *overrides)

    return build


SMOLLM2 = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 1,
    "num_attention_heads": 9,
}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "overrides", "megabytes"),
    [
        (SMOLLM2, (), 108),
        (SMOLLM2, ("actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",), 64),
        (SMOLLM2, ("actor_rollout_ref.actor.fsdp_config.model_dtype=null",), 108),
        ({**SMOLLM2, "hidden_size": 512, "intermediate_size": 114688, "num_attention_heads": 8}, (), 224),
        ({"model_type": "gemma3", "vocab_size": 10, "text_config": {**SMOLLM2, "model_type": "gemma3_text"}}, (), 108),
        ({"vocab_size": 10}, (), 2048),
        (SMOLLM2, (f"{BUCKET}=300",), 300),
    ],
)
def test_bucket_of_the_weight_sync_holds_the_models_largest_tensor(with_model, sizes, overrides, megabytes):
    config = with_model(sizes, *overrides)
    check_config(config)
    assert OmegaConf.select(config, BUCKET) == megabytes


P, ACTOR, ROLLOUT = "partial_rollout", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION, LOSS = "algorithm.rollout_correction", f"{ACTOR}.policy_loss.loss_mode"
FILTER, PENALTY = "algorithm.filter_groups", "algorithm=dapo reward.reward_kwargs"
FILTERS = f"{FILTER}.enable=True"
SEPARATE, BACKEND, TP = (
    f"{P}.placement=separate",
    f"{ROLLOUT}.checkpoint_engine.backend",
    f"{ROLLOUT}.tensor_model_parallel_size",
)
SPLIT = f"{SEPARATE} {ROLLOUT}.nnodes=1 {ROLLOUT}.n_gpus_per_node"
V1 = "trainer.use_v1=True"
JOINS = "+ray_kwargs.ray_init.address=auto"
MODEL_RM, LORA = f"{P}.reward_in_worker=False reward.reward_model", "actor_rollout_ref.model.lora"
MISTAKES = {
    f"{ROLLOUT}.n=0": "at least 1",
    "trainer.n_gpus_per_node=3": "data.train_batch_size=4: times actor_rollout_ref.rollout.n=2 it must be",
    f"{ACTOR}.ppo_mini_batch_size=3": "a divisor of data.train_batch_size=4",
    "data.gen_batch_size=7": "as data.train_batch_size=4, or null",
    f"{ROLLOUT}.max_model_len=500": "response_length=1536: with prompt_length=64 it must fit",
    f"{ROLLOUT}.calculate_log_probs=False": "True with partial_rollout.enable=True: samples span",
    f"{ROLLOUT}.name=sglang": "vllm with partial_rollout.enable=True",
    f"{P}.drain=0": "partial_rollout.drain=0: true or false",
    f"{P}.overlap=-0.5": "partial_rollout.overlap=-0.5: at least 0; with partial_rollout.mode=april",
    f"{P}.overlap=-0.9 {P}.mode=april": "data.train_batch_size at least 1",
    f"{P}.overlap=-1": "above -1",
    f"{P}.enable=False trainer.use_v1=True algorithm.adv_estimator=remax": "any other with trainer.use_v1=True: verl's",
    **{
        f"{V1} algorithm.adv_estimator={name}": "any other with trainer.use_v1=True: verl's v1" for name in NOT_UNDER_V1
    },
    f"{ACTOR}.loss_scale_factor=null {V1} {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm": (
        f"=1536 with {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm and {V1}: null weighs"
    ),
    f"critic.loss_scale_factor=0 {V1} critic.enable=True critic.loss_agg_mode=seq-mean-token-sum-norm": "above 0",
    f"{P}.overlap=9": "partial_rollout.overlap=9.0: at most partial_rollout.max_staleness=8",
    # verl's server takes 1,000 calls at once, and needs some for control: an interruption must not queue.
    f"{P}.slots_per_replica=985": "at most 984",
    f"{P}.failures.tool_timeout_s=1300": "at most partial_rollout.failures.sample_timeout_s=1200",
    f"{P}.tools.release_after_s=inf": "below partial_rollout.deadlines.stall_s=60",
    f"{P}.tools.release_after_s=60": "=60: below partial_rollout.deadlines.stall_s=60",
    "actor_rollout_ref.model.path=/nowhere/model": "a local model directory",
    "data.train_files=/nowhere/a.parquet": "an existing parquet file",
    "data.val_files=/nowhere/b.parquet": "an existing parquet file",
    "data.val_files='/nowhere/a[1].parquet'": "paths without * ? [ ], which the reader of data files",
    "data.seed=null data.val_max_samples=8": "data.seed=None: an integer with data.shuffle and max_samples",
    f"{V1} trainer.v1.sampler.max_off_policy_threshold=4": "8 with trainer.use_v1=True: partial_rollout.max_",
    f"{V1} trainer.v1.sampler.max_off_policy_strategy=wait": "drop with trainer.use_v1=True: nothing is dropped",
    f"{V1} trainer.v1.sampler.custom_sampler.path=a.py": "null with trainer.use_v1=True: the recipe's manager",
    f"{V1} trainer.v1.sampler.sync_refill_failed_groups=True": "False with trainer.use_v1=True: a failed",
    f"{V1} skip.rollout_tq.enable=True": "False with trainer.use_v1=True: batches do not come from",
    "skip.rollout.enable=True": "False with partial_rollout.enable=True: batches do not come from",
    "trainer.resume_mode=never": "one of auto, disable, resume_path",
    "trainer.resume_mode=resume_path": "trainer.resume_from_path=None: an existing",
    "reward.reward_model.enable=True": "partial_rollout.reward_in_worker=True: False with",
    "algorithm.adv_estimator=remax": "any other",
    "algorithm.adv_estimator=gae critic.enable=False": "critic.enable=False: one of True, null with",
    f"{ROLLOUT}.enable_rollout_routing_replay=True": "False with partial_rollout.enable=True: an interrupted",
    f"{ROLLOUT}.disaggregation.enabled=True": "False with partial_rollout.enable=True",
    f"{ROLLOUT}.full_determinism=True": "False with partial_rollout.enable=True: every request is seeded alike",
    f"+{ACTOR}.megatron.router_replay.mode=R3": "one of disabled, null with",
    f"{ACTOR}.checkpoint.async_save=True": "False: a checkpoint is sealed once whole",
    "model_engine=megatron": "dp",
    "algorithm.rollout_correction=null": "algorithm.rollout_correction=None: verl's node",
    f"{CORRECTION}.bypass_mode=True": "False with partial_rollout.enable=True: verl changes the driver's loss once",
    f"{P}.trust_region=kl": "one of auto, none, mask",
    f"{P}.trust_region_bounds=0.2": "=0.2: [low, high], each a number above 0, or null",
    f"{P}.trust_region_bounds=[0,0.3]": "=[0, 0.3]: [low, high], each a number above 0, or null",
    f"{P}.trust_region_bounds=[low,0.3]": "[low, high], each a number above 0, or null",
    f"{CORRECTION}.rollout_is=row": "one of geometric, null, sequence, token with",
    f"+ray_kwargs.ray_init._temp_dir=/tmp/{'d' * 60}": "at most 43 bytes for Ray's sockets",
    "actor_rollout_ref.rollout.top_p=0.7": "rollout.top_p=0.7: 1.0",
    "actor_rollout_ref.rollout.top_k=20": "rollout.top_k=20: one of -1, 0",
    "actor_rollout_ref.rollout.temperature=0.001": "rollout.temperature=0.001: at least 0.01",
    f"{CORRECTION}.rollout_is_threshold=null": "rollout_is_threshold=None: a number above 0",
    f"{CORRECTION}.rollout_is_threshold='2.0_5.0'": "rollout_is_threshold=2.0_5.0: a number above 0",
    f"{LOSS}=bypass_mode": "this one ignores them",
    f"{LOSS}=dro": "a loss that takes rollout_is_weights (ValueError: policy_loss.dro_beta must be",
    f"{P}.enable=False {LOSS}=dro": "policy_loss.dro_beta must be",
    f"{P}.correction=none {LOSS}=dro": "policy_loss.dro_beta must be",
    f"{ACTOR}.clip_ratio_c=1.0": "a number above 1, or null for",
    "distillation.enabled=True": "False with partial_rollout.enable=True: its loss",
    f"algorithm=gspo {CORRECTION}.rollout_is=token": "one of geometric, null, sequence with",
    f"{P}.correction=none {CORRECTION}.rollout_is=token": "null with partial_rollout.correction=none",
    f"{P}.correction=none {CORRECTION}.rollout_is=''": "null with partial_rollout.correction=none",
    f"{P}.correction=none {ACTOR}.clip_ratio_c=null": "clip_ratio_c=None: a number above 1",
    f"{P}.correction=none {P}.trust_region=mask": "none with partial_rollout.correction=none",
    f"{LOSS}=dppo_tv {ACTOR}.clip_ratio_c=null": "clip_ratio_c=None: a number above 1",
    f"+{ROLLOUT}.engine_kwargs.vllm.speculative_config.method=ngram": "null with trainer.device=cpu: vLLM's proposers",
    f"{P}.enable=False {P}.placement=separate": "colocated with partial_rollout.enable=False",
    f"{P}.resume_kv=keep {ROLLOUT}.free_cache_engine=True": f"engine=True: False with {P}.resume_kv=keep and",
    f"{P}.resume_kv=keep {ROLLOUT}.enable_prefix_caching=False": "caching=False: True with",
    "actor_rollout_ref.model.path=nobody/no-model": "`hf download nobody/no-model --local-dir DIR`",
    f"algorithm=grpo_passk {ROLLOUT}.n=1": "at least 2 with algorithm.adv_estimator=grpo_passk, whose",
    f"+algorithm.gdpo_reward_keys=[acc] algorithm.adv_estimator=gdpo {ROLLOUT}.n=1": (
        "at least 2 with algorithm.adv_estimator=gdpo, whose"
    ),
    f"{FILTERS} {P}.enable=False": f"{FILTERS}: False with partial_rollout.enable=False: verl's v0 trainer",
    f"{FILTERS} {ROLLOUT}.n=1": f"{FILTERS}: False with actor_rollout_ref.rollout.n=1",
    f"{FILTERS} {FILTER}.metric=null": "metric=None: reward, or a name of its extra information",
    f"{FILTERS} {FILTER}.max_num_gen_batches=1": "0 for no limit, or at least 2",
    f"{FILTERS} {FILTER}.max_inflight_gen_batches=2": f"one of 1, null with {FILTERS}: partial_rollout.over",
    f"{FILTERS} algorithm.use_kl_in_reward=True {FILTER}.metric=seq_final_reward": "reward with",
    f"{FILTERS} {MODEL_RM}.enable=True": "enable_resource_pool=False: True with reward.reward_model.enable=True and",
    f"{PENALTY}.overlong_buffer_cfg.penalty_factor=null": "penalty_factor=None: at least 0",
    f"{PENALTY}.max_resp_len=null": "max_resp_len=None: tokens: ${data.max_response_length}",
    # a split that cannot work
    f"{SEPARATE} {P}.resume_kv=recompute {ROLLOUT}.free_cache_engine=True": f"engine=True: False with {SEPARATE}",
    f"{SEPARATE} {MODEL_RM}.enable=True reward.reward_model.enable_resource_pool=False": "resource_pool=False: True with",
    f"{SEPARATE} trainer.critic_warmup=2": f"critic_warmup=2: 0 with {SEPARATE}: its steps",
    f"{SEPARATE} {LORA}_rank=8 {LORA}.merge=False": "lora.merge=False: True with",
    f"{SEPARATE} {ROLLOUT}.nnodes=0": f"nnodes=0: at least 1 with {SEPARATE}",
    f"{SPLIT}=3 {TP}=2": "=3: with rollout.nnodes=1 it must make whole replicas",
    f"{SPLIT}=2 {TP}=2 trainer.n_gpus_per_node=1": "=1: times trainer.nnodes=1",
    f"{SPLIT}=1 {BACKEND}=naive": f"backend=naive: shm (one node) or nccl (GPUs) with {SEPARATE}",
    f"{SPLIT}=1 {BACKEND}=shm {JOINS} trainer.nnodes=2": f"trainer.nnodes=2: 1 with {BACKEND}=shm",
    f"{SPLIT}=1 {BACKEND}=shm {ROLLOUT}.nnodes=2": f"rollout.nnodes=2: 1 with {BACKEND}=shm",
    f"{BACKEND}=nccl": f"backend=nccl: naive with {P}.enable=True",
}
"""overrides, and a part of the error; it also has the last override, unless it names another key"""


@pytest.mark.parametrize("overrides", MISTAKES)
def test_mistake_is_refused_in_one_line(configure, monkeypatch, overrides):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as caught:
        check_config(configure(*overrides.split()))
    said, message = str(caught.value), MISTAKES[overrides]
    assert message in said and "\n" not in said
    assert "=" in message.split(":")[0] or overrides.split()[-1].partition("=")[0].lstrip("+").rsplit(".", 1)[0] in said
    assert not ray.is_initialized()


BUDGET = "max_token_len_per_gpu"
GAE = "algorithm.adv_estimator=gae"
VERLS_MISTAKES = {
    # verl takes a word for true, and text for a number
    f"{ACTOR}.use_kl_loss=off": "true or false",
    "trainer.val_before_train={a:1}": "true or false",
    "trainer.save_freq=null": "an integer",
    f"{ACTOR}.optim.betas=0.9": "a list such as [0.9, 0.999]",
    f"{ACTOR}.optim=abc": f"a section of keys such as {ACTOR}.optim.lr",
    "trainer.n_gpus_per_node='8'": "an integer of at least 1 (this is text; of a variable's text, ${oc.decode",
    # keys that nothing reads
    "+trainer.save_frequency=3": "no such key; did you mean trainer.save_freq?",
    f"+{ROLLOUT}.swap_space=3": "unexpected keyword argument 'swap_space'",
    f"+{ROLLOUT}.val_kwargs.seed=1": "seed",
    f"{ACTOR}.grad_clip=0.5": f"verl's default, 1.0: verl 0.9.1 reads {ACTOR}.optim.clip_grad instead",
    "custom_reward_function.path=mine.py": "verl 0.9.1 reads reward.custom_reward_function instead",
    "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True": "verl 0.9.1 reads the keys of reward instead",
    "+data.sampler.class_path=mine.py": "verl 0.9.1 does not read it",
    f"+{ROLLOUT}.checkpoint_manager_class=my.Own": "null: the recipe has its own",
    # what would train something else
    f"{ACTOR}.optim.clip_grad=0.0": "above 0",
    f"{LOSS}=geo_mean": "any other: verl averages it in each micro-batch",
    f"{LOSS}=ppo": "one of bypass_mode, cispo",
    "algorithm.adv_estimator=ppo": "one of gae, gdpo",
    f"{ACTOR}.checkpoint.save_contents=[optimizer]": "with model",
    f"{ACTOR}.checkpoint.save_contents=null": "with model",
    f"{ACTOR}.use_dynamic_bsz=False": "verl refuses the configuration: AssertionError: [actor] Please set at least one",
    f"{ROLLOUT}.tensor_model_parallel_size=2": "whole replicas on 1 device(s); one has 2",
    # a micro-batch must hold the longest sample
    f"{ACTOR}.ppo_{BUDGET}=1599": "at least 1,600, the tokens of the longest sample",
    f"{ROLLOUT}.log_prob_{BUDGET}=1599": "at least 1,600",
    f"{ACTOR}.use_kl_loss=True {ACTOR}.strategy=fsdp2 actor_rollout_ref.ref.log_prob_{BUDGET}=9": "at least 1,600",
    f"{GAE} critic.forward_{BUDGET}=8 critic.ppo_{BUDGET}=8": "at least 1,600",
    f"{ROLLOUT}.log_prob_use_dynamic_bsz=False": f"as {ACTOR}.use_dynamic_bsz=True",
    # code and places that are named
    f"{ROLLOUT}.agent.default_agent_loop=mine": "one of single_turn_agent, tool_agent",
    f"{ROLLOUT}.agent.agent_loop_config_path=/nowhere.yaml": "a YAML list of agent loops, each with its name",
    f"{ROLLOUT}.multi_turn.format=qwen": "format=qwen: one of ",
    "reward.reward_manager.name=mine": "one of dapo, gdpo, naive",
    "reward.custom_reward_function.path=/nowhere.py": "a file with the function compute_score",
    "reward.custom_reward_function.path=pkg://math reward.custom_reward_function.name=cos": "a function of data_source",
    "actor_rollout_ref.model.external_lib=no.such": "a module that can be imported",
    "actor_rollout_ref.model.use_liger=True": "another, or the package liger_kernel",
    "trainer.default_local_dir=/proc/run": "a directory that this user can write",
    f"{GAE} critic.model.path=/nowhere": "a local model directory",
}
"""what verl finds out late, or never, with and without partial rollout"""


@pytest.mark.parametrize("overrides", VERLS_MISTAKES)
def test_what_verl_finds_out_late_or_never_is_refused_in_one_line_for_both_arms(configure, overrides):
    for arm in ("True", "False"):
        with pytest.raises(ConfigError) as caught:
            check_config(configure(f"{P}.enable={arm}", *overrides.split()))
        assert VERLS_MISTAKES[overrides] in str(caught.value) and "\n" not in str(caught.value)


def beyond(kind):
    """A value outside ``kind`` on each side that it bounds."""
    match type_info(kind):
        case inspect.IntType() | inspect.FloatType() as number:
            below = number.gt if number.gt is not None else None if number.ge is None else number.ge - 1
            return [each for each in (below, number.le and number.le * 2, "many") if each is not None]
        case inspect.LiteralType():
            return ["other", 7]
    return [7, None]


@pytest.mark.parametrize("key", VALUES)
def test_value_beyond_its_limits_is_refused_with_key_value_and_what_is_allowed(resolved_config, key):
    config, row = resolved_config("quickstart_cpu"), VALUES[key]
    assert key in dict(leaves(_declared())), "verl declares no such key"
    for value in beyond(row.kind):
        OmegaConf.update(config, key, value, force_add=True)
        with pytest.raises(ConfigError) as caught:
            check_verl_keys(config)
        words = str(caught.value).removeprefix(f"{key}={value}: ")
        kinds = get_args(row.kind) if isinstance(row.kind, UnionType) else [row.kind]
        assert words.startswith(", or ".join(allowed(type_info(kind)) for kind in kinds)) and "\n" not in words
        assert words.endswith(", or null") == (row.null is not None)


def test_tools_file_may_bring_a_format_of_its_own(configure, tmp_path):
    own = tmp_path / "own_tool.py"
    own.write_text(
        "from verl.experimental.agent_loop.tool_parser import ToolParser\n"
        "from verl.tools.function_tool import function_tool\n\n\n"
        "@function_tool\ndef add(a: int) -> int:\n"
        '    """Adds one.\n\n    Args:\n        a: a number.\n    """\n    return a + 1\n\n\n'
        '@ToolParser.register("own")\nclass Own(ToolParser):\n'
        "    async def extract_tool_calls(self, responses_ids, tools=None):\n        return '', []\n"
    )
    turns = f"{ROLLOUT}.multi_turn"
    check_config(configure(f"{turns}.format=own", f"{turns}.function_tool_path={own}"))


FLASH = "actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2"


def test_sequence_parallel_devices_share_the_longest_sample(configure, monkeypatch):
    monkeypatch.setattr("verl_ext.packed_attention.flash_attn_problem", lambda: None)
    shared = [
        FLASH,
        "actor_rollout_ref.model.use_remove_padding=True",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        "trainer.n_gpus_per_node=2",
        f"{ACTOR}.ppo_{BUDGET}=800",
    ]
    check_config(configure(*shared))
    with pytest.raises(
        ConfigError, match=rf"ppo_{BUDGET}=799: at least 800, .* on each of 2 device\(s\) that share it"
    ):
        check_config(configure(*shared[:4], f"{ACTOR}.ppo_{BUDGET}=799"))


def test_batch_divides_by_the_copies_of_the_model_not_by_the_devices_that_share_one(configure, monkeypatch):
    monkeypatch.setattr("verl_ext.packed_attention.flash_attn_problem", lambda: None)
    odd = "data.train_batch_size=3", f"{ACTOR}.ppo_mini_batch_size=3", f"{ROLLOUT}.n=3", "trainer.n_gpus_per_node=2"
    shared = *odd, FLASH, "actor_rollout_ref.model.use_remove_padding=True", f"{ACTOR}.ulysses_sequence_parallel_size=2"
    check_config(configure(*shared))
    with pytest.raises(ConfigError, match=r"train_batch_size=3: times .*n=3 it must be divisible by 2 device\(s\)"):
        check_config(configure(*odd))
    with pytest.raises(ConfigError, match=r"train_batch_size=3: times .*n=3 it must be divisible by 2 device\(s\)"):
        check_config(
            configure(*shared, f"{ACTOR}.use_kl_loss=True", "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1")
        )


def test_keys_that_verl_or_the_users_own_code_may_read_are_allowed(configure):
    undeclared = ["+data.cache_dir=/tmp", "+data.filter_prompts=False", "+data.difficulty=3", "+mine.x=1"]
    handed_on = [
        "+actor_rollout_ref.model.override_config.x=1",
        f"+{ROLLOUT}.custom.x=1",
        "+ray_kwargs.ray_init._temp_dir=/tmp",
        f"+{ROLLOUT}.engine_kwargs.vllm.kv-cache-dtype=auto",
    ]
    check_config(configure(*undeclared, *handed_on))


USING = [
    "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "cispo",
]  # fmt: skip


@pytest.mark.parametrize("loss_mode", USING)
def test_loss_that_uses_the_behaviour_weights_is_accepted_and_can_mask(configure, loss_mode):
    assert check_config(configure(f"{LOSS}={loss_mode}", f"{P}.trust_region=mask")).enable


def test_every_policy_loss_of_verl_is_either_accepted_or_refused_above():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    assert set(POLICY_LOSS_REGISTRY) == {*USING, "dro", "bypass_mode", "geo_mean"}
    dual = {name for name, loss in POLICY_LOSS_REGISTRY.items() if "clip_ratio_c" in getsource(loss)}
    assert dual == {*DUAL_CLIPS}


def test_what_only_verl_reads_is_theirs_to_judge(configure, task):
    for arm in (f"{P}.correction=none", f"{P}.correction=decoupled", f"{P}.enable=False"):
        check_config(configure(arm, "algorithm=gspo", f"{ACTOR}.clip_ratio_c=null"))
    check_config(configure(f"actor_rollout_ref.model.hf_config_path={task}/config.json"))


def test_uncorrected_training_is_an_ablation_with_a_warning(configure, capsys):
    ablation = configure("partial_rollout.correction=none")
    check_config(ablation)
    main_ppo.wire(ablation)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: partial_rollout.correction=none:")
    assert ablation.algorithm.rollout_correction.rollout_is is None
    assert ablation.actor_rollout_ref.actor.policy_loss.loss_mode == "vanilla"


@pytest.mark.parametrize("override", ["actor_rollout_ref.rollout.name=sglang", "trainer.resume_mode=auto"])
def test_without_partial_rollout_verls_own_choices_are_allowed(configure, override):
    assert not check_settings(configure("partial_rollout.enable=False", override)).enable


@pytest.mark.parametrize(("word", "value"), [("no", False), ("Off", False), ("yes", True), ("True", True)])
def test_flag_is_what_yaml_says_for_whoever_reads_it(configure, word, value):
    # Hydra's command line hands "no" over as a string; a config file says False.
    flags = [declared.name for declared in declarations(PartialRolloutConfig) if declared.kind is bool]
    config = configure(*[f"partial_rollout.{key}={word}" for key in flags])
    assert check_config(config).enable is value
    assert {key: OmegaConf.select(config.partial_rollout, key) for key in flags} == dict.fromkeys(flags, value)


def test_second_node_needs_a_ray_cluster(configure, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=r"trainer.nnodes=2: 1 \(NNODES=1\), or a Ray cluster: `ray start --head`"):
        check_config(configure("trainer.nnodes=2"))
    check_config(configure("trainer.nnodes=2", "+ray_kwargs.ray_init.address=auto"))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    check_config(configure("trainer.nnodes=2"))


def test_partial_rollout_has_its_own_manager_priorities_and_headroom_and_the_baseline_is_observed(configure):
    on, off = configure(), configure("partial_rollout.enable=False")
    main_ppo.wire(on)
    main_ppo.wire(off)
    on, off = on.actor_rollout_ref.rollout, off.actor_rollout_ref.rollout
    assert (on.scheduling_policy, off.scheduling_policy, on.custom.kv_headroom) == ("priority", "fcfs", 0.05)
    assert "PartialRollout" in on.agent.agent_loop_manager_class and "Observed" in off.agent.agent_loop_manager_class
