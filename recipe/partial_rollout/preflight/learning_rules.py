"""Rules on verl's keys of training and learning, for PR and noPR, one a row; ``preflight/rule.py`` explains a row."""

from __future__ import annotations

import os
import re
from pathlib import Path

from omegaconf import DictConfig
from ray._common.utils import get_default_ray_temp_dir
from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.tracking import Tracking

from recipe.partial_rollout.checkpoint.run_checkpoints import writable
from recipe.partial_rollout.config.settings import OVERLONG, Correction
from recipe.partial_rollout.preflight.rule import (
    BATCH,
    CORRECTION,
    LOSS,
    NO_PR,
    REWARD_MODEL,
    SCORES_LATE,
    V1,
    Rule,
    accepts_on_policy_samples,
    at,
    budget,
    compares_siblings,
    copies,
    divided,
    divisible,
    full,
    keeps_on_policy_tokens,
    longest,
    one_of,
    only,
    rejections,
    unread,
    where,
)
from recipe.partial_rollout.preflight.verl_keys import default_of
from recipe.partial_rollout.training.loss import WeightGranularity

_A_DEVICE = "verl does not read it; use {}_micro_batch_size_per_gpu"
_FILTER = "algorithm.filter_groups"
_FILTERED = f"{_FILTER}.enable=True"
_TEMPORARY = 107 - len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""most bytes of the path of Ray's temporary directory: Linux takes 107 for a socket, and Ray appends the rest"""
DUAL_CLIPS = "vanilla", "dppo_tv", "dppo_kl"
"""losses of verl that read ``clip_ratio_c``"""
NOT_UNDER_V1 = "remax", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline"
"""estimators that need a greedy baseline, columns of the reward, or sums over the vocabulary; v1 provides none of
these"""

_LORA = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
    "lora_adapter_path": "adapter_path",
}
"""verl's keys of LoRA: for FSDP below ``model``, for Megatron below ``model.lora``"""


def _lora(model: str, strategy: str) -> tuple[Rule, ...]:
    """Require that LoRA is set by the keys that the training engine reads; by the others it would train the whole model.

    Args:
        model: key of the model's section. strategy: key that names its training engine.
    """
    adapter = f"{model}.lora_adapter_path"
    return (
        *where(
            lambda c: at(c, strategy) != "megatron",
            *(unread(f"{model}.lora.{name}", strategy, f"set {full(model)}.{fsdp}") for fsdp, name in _LORA.items()),
            *(
                unread(f"{model}.lora.{name}", strategy, "its adapters are plain LoRA")
                for name in default_of(full(f"{model}.lora"))
                if name not in ("merge", *_LORA.values())
            ),
            unread(f"{model}.mtp.enable_train", strategy, "it trains no layers that predict several tokens"),
            Rule(
                f"{model}.lora_rank",
                lambda v, c: at(c, adapter) is None or v >= 1,
                f"at least 1 with {full(adapter)}",
                "otherwise the adapter is not loaded, and the whole model is trained",
            ),
        ),
        *where(
            lambda c: at(c, strategy) == "megatron",
            *(unread(f"{model}.{fsdp}", strategy, f"set {full(model)}.lora.{name}") for fsdp, name in _LORA.items()),
        ),
    )


def _lacks_penalty(name: str) -> bool:
    """Whether ``name`` is one of verl's reward managers without DAPO's penalty; a user's may have one."""
    return name != "dapo" and getattr(REWARD_MANAGER.get(name), "__module__", "").startswith("verl.")


def _is_corrected(config: DictConfig) -> bool:
    """Whether partial rollout weights the tokens."""
    return config.partial_rollout.enable and config.partial_rollout.correction != Correction.NONE


TRAINING = (
    one_of("model_engine", ("dp", None), "set engine=fsdp2 or engine=megatron to choose the training engine"),
    # how a batch is divided
    divisible(BATCH, "rollout.n", lambda c: copies(c, "actor"), "data-parallel ranks"),
    Rule(
        "data.gen_batch_size",
        lambda v, c: v in (None, at(c, BATCH)),
        lambda c: f"must equal {BATCH}={at(c, BATCH)}, or be null",
    ),
    *divided("actor"),
    Rule(
        "rollout.log_prob_use_dynamic_bsz",
        lambda v, c: v == c.actor_rollout_ref.actor.use_dynamic_bsz,
        lambda c: f"must equal actor_rollout_ref.actor.use_dynamic_bsz={c.actor_rollout_ref.actor.use_dynamic_bsz}",
        "verl's worker asserts it",
    ),
    # verl's workers need the other key, and fail without a word
    *where("actor.use_dynamic_bsz=False", only("actor.ppo_micro_batch_size", None, _A_DEVICE.format("ppo"))),
    *where(
        "rollout.log_prob_use_dynamic_bsz=False",
        only("rollout.log_prob_micro_batch_size", None, _A_DEVICE.format("log_prob")),
    ),
    *where(
        ("ref.log_prob_use_dynamic_bsz=False", need_reference_policy),
        only("ref.log_prob_micro_batch_size", None, _A_DEVICE.format("log_prob")),
    ),
    # micro-batches that are made by tokens: of the update, the log-probs, the reference
    *where("actor.use_dynamic_bsz=True", budget("actor.ppo_max_token_len_per_gpu", "actor")),
    *where("rollout.log_prob_use_dynamic_bsz=True", budget("rollout.log_prob_max_token_len_per_gpu", "actor")),
    *where(
        ("ref.log_prob_use_dynamic_bsz=True", need_reference_policy),
        budget("ref.log_prob_max_token_len_per_gpu", "ref"),
    ),
    *where(need_critic, *divided("critic"), budget("critic.ppo_max_token_len_per_gpu", "critic")),
    Rule(
        "rollout.response_length",
        lambda _, c: (most := at(c, "rollout.max_model_len")) is None or longest(c) <= most,
        lambda c: (
            f"with prompt_length={at(c, 'rollout.prompt_length')} it must fit "
            f"rollout.max_model_len={at(c, 'rollout.max_model_len')}"
        ),
    ),
    Rule(
        "rollout.prompt_length",
        lambda v, c: v >= c.data.max_prompt_length,
        lambda c: (
            f"at least data.max_prompt_length={c.data.max_prompt_length}: the samples of longer prompts would fail"
        ),
    ),
    # what is trained
    *_lora("model", "actor.strategy"),
    *where(need_critic, *_lora("critic.model", "critic.strategy")),
    # for data/a[1]/x.parquet verl would read data/a1/x.parquet
    *(
        Rule(
            f"data.{split}_files",
            lambda v, _: not {*"*?[]"} & {*"".join([v] if isinstance(v, str) else v)},
            "paths without * ? [ ], which the reader of data files would take for a pattern",
        )
        for split in ("train", "val")
    ),
    *(
        only(
            f"{who}.use_shm",
            False,
            "verl would read an old copy in /dev/shm that has the same size in place of the file",
        )
        for who in ("data", "model", "critic.model")
    ),
    Rule(
        "model.custom_chat_template",
        lambda v, _: v is None or "{" in v,
        "null, or the template itself (Jinja text), not a path to it",
    ),
    Rule(
        "trainer.nnodes",
        lambda v, c: v == 1 or os.environ.get("RAY_ADDRESS") or at(c, "ray_kwargs.ray_init.address"),
        "1 (NNODES=1), or a Ray cluster: `ray start --head` on one node, `ray start --address=HEAD:6379` on the others, "
        "then RAY_ADDRESS=auto",
    ),
    *where(
        lambda c: (at(c, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS") or "local") == "local",
        Rule(
            "ray_kwargs.ray_init._temp_dir",
            lambda v, _: len(os.fsencode(v or get_default_ray_temp_dir())) <= _TEMPORARY,
            lambda _: (
                f"a path of at most {_TEMPORARY} bytes, because Ray's sockets are below it; null means "
                f"{get_default_ray_temp_dir()}, from RAY_TMPDIR or TMPDIR"
            ),
        ),
    ),
    Rule(
        "data.seed",
        lambda v, c: (
            (v is not None and v >= 0)
            or not c.data.shuffle
            or all((c.data.get(f"{split}_max_samples") or -1) <= 0 for split in ("train", "val"))
        ),
        "an integer of at least 0, if data.shuffle and max_samples are set",
        "without a seed each process would draw other rows",
    ),
    # what a run writes, and resumes from
    Rule(
        "trainer.default_local_dir",
        lambda v, _: v and not re.search(r"://|(^|/)[$~]", str(v)) and writable(v),
        "a local directory that this user can write",
    ),
    *where(
        "trainer.resume_mode=resume_path",
        Rule(
            "trainer.resume_from_path",
            lambda v, _: v and re.fullmatch(r"global_step_\d+", Path(str(v)).name) and Path(str(v)).is_dir(),
            "an existing directory .../global_step_K",
        ),
    ),
    only("trainer.default_hdfs_dir", None, "checkpoints are saved locally only"),
    only("trainer.remove_previous_ckpt_in_save", False, "trainer.max_actor_ckpt_to_keep=1 takes its place"),
    *(
        only(f"{who}.checkpoint.async_save", False, "a checkpoint counts as complete once the save returns")
        for who in ("actor", "critic")
    ),
    *(
        Rule(
            f"{who}.checkpoint.{contents}",
            lambda v, _: v is None or ("model" in v and {*v} <= {"model", "optimizer", "extra", "hf_model"}),
            "null, or a list of model and any of optimizer, extra, hf_model",
            "without model a resume would start from the first weights",
            trained,
        )
        for who, trained in (("actor", ()), ("critic", (need_critic,)))
        for contents in ("save_contents", "load_contents")
    ),
    Rule(
        "trainer.logger",
        lambda v, _: v and {*v} <= {*Tracking.supported_backend},
        "one or several of " + ", ".join(sorted(Tracking.supported_backend)),
    ),
)
LEARNING = (
    # dynamic sampling
    *where(NO_PR, only(f"{_FILTER}.enable", False, "verl's v0 trainer ignores it")),
    *where("rollout.n=1", only(f"{_FILTER}.enable", False, "a group of one sample would always be filtered")),
    *where(
        _FILTERED,
        *where(REWARD_MODEL, only("reward.reward_model.enable_resource_pool", True, SCORES_LATE)),
        one_of(f"{_FILTER}.max_inflight_gen_batches", (1, None), "partial_rollout.overlap sets how much is in flight"),
        Rule(
            f"{_FILTER}.max_num_gen_batches",
            lambda v, _: v != 1,
            "0 for no limit, or at least 2: with 1 no filtered group could be replaced",
        ),
        Rule(
            f"{_FILTER}.metric",
            lambda v, _: v and isinstance(v, str),
            "reward, or a key of the extra information that the reward function returns, such as acc",
        ),
        Rule(
            f"{_FILTER}.metric",
            lambda v, c: not (v == "seq_final_reward" and c.algorithm.use_kl_in_reward),
            "reward with use_kl_in_reward=True: the KL penalty is known only after the filter",
        ),
    ),
    # algorithm and loss
    one_of("algorithm.adv_estimator", ADV_ESTIMATOR_REGISTRY),
    *where("algorithm.adv_estimator=gae", one_of("critic.enable", (True, None), "gae needs the values of a critic")),
    Rule(
        "rollout.n",
        lambda v, c: v >= 2 or not compares_siblings(c),
        lambda c: (
            f"at least 2 if algorithm.adv_estimator={c.algorithm.adv_estimator}, whose baseline is a prompt's other "
            "samples (1 is verl's default; the recipes have 8)"
        ),
    ),
    one_of(LOSS, POLICY_LOSS_REGISTRY),
    Rule(
        LOSS,
        lambda v, _: v != "geo_mean",
        "any other",
        "verl averages this loss in each micro-batch and adds up the averages, so its gradient grows with their number",
    ),
    *where(
        lambda c: at(c, LOSS) in DUAL_CLIPS,
        Rule(
            "actor.clip_ratio_c",
            lambda v, c: v > 1 if v is not None else _is_corrected(c) and at(c, LOSS) == "vanilla",
            "a number above 1; or null (no dual clip) if partial_rollout.enable=True, "
            "partial_rollout.correction=decoupled and loss_mode=vanilla",
        ),
    ),
    *where(
        V1,
        Rule(
            "algorithm.adv_estimator",
            lambda v, _: v not in NOT_UNDER_V1,
            "any other",
            "verl's v1 trainers do not provide the inputs of this estimator",
        ),
        # v0 pads every micro-batch to rollout.response_length.
        *(
            Rule(
                f"{part}.loss_scale_factor",
                lambda v, _: v and v > 0,
                lambda c: f"a number above 0, such as rollout.response_length={at(c, 'rollout.response_length')}",
                "with null a sample's weight depends on the longest response of its micro-batch",
                (f"{part}.loss_agg_mode=seq-mean-token-sum-norm",),
            )
            for part in ("actor", "critic")
        ),
    ),
    *(
        rule
        for name in ("grpo_vectorized", "gdpo")
        for rule in where(
            f"algorithm.adv_estimator={name}",
            only("algorithm.norm_adv_by_std_in_grpo", True, "verl divides by the standard deviation whatever it says"),
        )
    ),
    *where(
        lambda c: c.algorithm.adv_estimator != "gae",
        only("algorithm.use_pf_ppo", False, "verl reweights the samples of gae alone"),
    ),
    *where(
        "algorithm.adv_estimator=gdpo",
        only(
            "algorithm.use_kl_in_reward",
            False,
            "verl takes its advantages from gdpo_reward_keys; set actor_rollout_ref.actor.use_kl_loss",
        ),
        Rule(
            "algorithm.gdpo_reward_keys",
            lambda v, _: v and not isinstance(v, str),
            "a list of keys of the reward, such as [format,accuracy]",
        ),
        # verl ignores weights beyond the number of keys.
        Rule(
            "algorithm.gdpo_reward_weights",
            lambda v, c: v is None or len(v) == len(c.algorithm.gdpo_reward_keys),
            lambda c: f"null, or a number for each of algorithm.gdpo_reward_keys={c.algorithm.gdpo_reward_keys}",
        ),
    ),
    *where(
        lambda c: c.actor_rollout_ref.actor.strategy != "megatron",
        Rule("actor.optim.clip_grad", lambda v, _: v and v > 0, "a number above 0, the largest norm of a gradient"),
    ),
    *where(
        lambda c: not need_critic(c),
        # verl updates the actor from step ``critic_warmup`` on.
        Rule(
            "trainer.critic_warmup",
            lambda v, _: (v or 0) <= 1,
            "must be 0",
            "without a critic the earlier steps update nothing, and their prompts are lost",
        ),
    ),
    *where(
        (need_critic, lambda c: c.critic.strategy != "megatron"),
        Rule("critic.optim.clip_grad", lambda v, _: v and v > 0, "a number above 0, the largest norm of a gradient"),
    ),
    Rule(
        "actor.clip_ratio",
        lambda v, c: (
            v in (None, default_of("actor_rollout_ref.actor.clip_ratio"))
            or None in (bounds := (at(c, "actor.clip_ratio_low"), at(c, "actor.clip_ratio_high")))
            or bounds == (v, v)
        ),
        lambda _: f"{default_of('actor_rollout_ref.actor.clip_ratio')}, verl's default",
        "set clip_ratio_low and clip_ratio_high, which take its place",
    ),
    # verl's rollout correction
    one_of(f"{CORRECTION}.rollout_is", (None, *WeightGranularity)),
    *where(
        lambda c: at(c, CORRECTION) and (at(c, f"{CORRECTION}.rollout_is") or _is_corrected(c)),
        Rule(
            f"{CORRECTION}.rollout_is_threshold",
            lambda v, _: keeps_on_policy_tokens(v),
            # hydra reads 0.5_5 as the number 0.55.
            "at least 1, or lower_upper as text in quotes, such as '0.5_5.0'",
            "one number caps the weights; of two, which must have 1 between them, tokens outside are masked",
        ),
    ),
    Rule(
        f"{CORRECTION}.rollout_rs",
        lambda v, _: v is None or {*rejections(v)} <= SUPPORTED_ROLLOUT_RS_OPTIONS,
        lambda _: f"null, or any of {', '.join(sorted(SUPPORTED_ROLLOUT_RS_OPTIONS))}, joined by commas",
    ),
    *where(
        lambda c: at(c, f"{CORRECTION}.rollout_rs") is None,
        only(f"{CORRECTION}.rollout_rs_threshold", None, "verl reads it only with rollout_rs"),
    ),
    *where(
        lambda c: at(c, f"{CORRECTION}.rollout_rs") is not None,
        Rule(
            f"{CORRECTION}.rollout_rs_threshold",
            lambda v, c: accepts_on_policy_samples(at(c, f"{CORRECTION}.rollout_rs"), v),
            "a number above 0; for a criterion of k1 at least 1, or lower_upper as text in quotes, such as '0.5_2.0'",
            "one for all criteria of rollout_rs, or as many as they are, joined by commas",
        ),
    ),
    *where(
        lambda c: at(c, f"{CORRECTION}.rollout_is") or at(c, f"{CORRECTION}.rollout_rs"),
        only("rollout.calculate_log_probs", True, "rollout_is and rollout_rs need the engine's log-probs"),
    ),
    # validation
    Rule(
        "rollout.val_kwargs.do_sample",
        lambda v, c: v or at(c, "rollout.val_kwargs.temperature") == 0,
        "True, or rollout.val_kwargs.temperature=0, which is greedy",
        "verl does not read it, and samples at the temperature",
    ),
    # rewards
    *where(REWARD_MODEL, only("partial_rollout.reward_in_worker", False)),
    *where(
        "reward.reward_manager.source=register",
        Rule(
            f"{OVERLONG}.enable",
            lambda v, c: not v or not _lacks_penalty(c.reward.reward_manager.name),
            lambda c: f"must be False with reward.reward_manager.name={c.reward.reward_manager.name}",
            "only verl's dapo subtracts the penalty",
        ),
    ),
    *where(
        ("reward.reward_manager.name=dapo", f"{OVERLONG}.enable=True"),
        Rule(f"{OVERLONG}.penalty_factor", lambda v, _: v >= 0, "at least 0"),
        # Where the buffer has no length of its own, the recipe gives it a fifth of this.
        Rule(
            "reward.reward_kwargs.max_resp_len",
            lambda v, _: v >= 1,
            "at least 1 token, such as ${data.max_response_length}",
        ),
    ),
)
