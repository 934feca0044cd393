"""Chooses an attention that is installed, and checks learning-rate schedules against the length of the training."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from verl.trainer.ppo.utils import need_critic

from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.terminal import say
from verl_ext import packed_attention
from verl_ext.packed_attention import FLASH, NAME, PADDED

_ATTENTION = "override_config.attn_implementation"
_SEQUENCE_PARALLEL = "ulysses_sequence_parallel_size"
_ATTENDS = {"attention", "full_attention", "sliding_attention", "chunked_attention"}
"""types of layers in which a packed row's position ids keep its sequences apart"""
_CARRIES = re.compile("mamba|ssm|conv|linear_att|recurrent|lru_")
"""finds keys of a model's config that belong to convolutions, linear attention and other recurrent layers"""
_SPLIT_BY_VERL = "qwen3_5", "qwen3_5_moe"
"""models whose recurrent layers verl patches, so that they restart with each sequence of a packed row"""


def choose_attention(config: DictConfig) -> None:
    """Give every model of ``config`` an attention that is installed, and pad its rows if packing would mix them.

    An attention that the user named stays. Prints what differs from verl's default. Call it before interpolations are
    resolved, because some copy its result.

    Raises:
        ConfigError: flash-attn is asked for, by name or by sequence parallelism, and is not installed.
    """
    if config.actor_rollout_ref.actor.strategy not in ("fsdp", "fsdp2"):
        # Megatron brings its own.
        return
    problem = packed_attention.flash_attn_problem()
    remedy = f"{problem}: {packed_attention.INSTALL}"
    models: dict[str, tuple[str, ...]] = {
        "actor_rollout_ref.model": ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
    }
    if need_critic(config):
        models["critic.model"] = ("critic",)
    fallen, padded = [], []
    for path, engines in models.items():
        chosen = OmegaConf.select(config, f"{path}.{_ATTENTION}")
        fits = _Fit.of(OmegaConf.select(config, f"{path}.path"))
        # The critic packs where the actor does: verl's default for it is false.
        packs = config.actor_rollout_ref.model.use_remove_padding and fits.packed
        installed = NAME if packs else fits.padded
        if problem and chosen == FLASH:
            raise fail(f"{path}.{_ATTENTION}", chosen, f"must be {installed} or null unless you install it ({remedy})")
        if chosen == NAME and not OmegaConf.select(config, f"{path}.use_remove_padding"):
            raise fail(f"{path}.{_ATTENTION}", chosen, f"must be {fits.padded} with {path}.use_remove_padding=False")
        # platform=cpu names the packed one for models of every kind.
        if (problem and chosen is None) or (chosen == NAME and not packs):
            OmegaConf.update(config, f"{path}.{_ATTENTION}", installed, force_add=True)
            OmegaConf.update(config, f"{path}.use_remove_padding", packs, force_add=True)
            fallen.append(f"{path} ({installed})")
        elif fits.mixed and OmegaConf.select(config, f"{path}.use_remove_padding"):
            OmegaConf.update(config, f"{path}.use_remove_padding", False)
            padded.append(path)
        if problem or chosen not in (None, FLASH):
            # verl implements sequence parallelism for flash-attn; others silently attend within their own piece.
            for key in (f"{engine}{part}.{_SEQUENCE_PARALLEL}" for engine in engines for part in ("", ".fsdp_config")):
                if (size := OmegaConf.select(config, key) or 1) > 1:
                    instead = remedy if problem else f"{path}.{_ATTENTION}=null"
                    raise fail(key, size, f"must be 1 with any attention but {FLASH} ({instead})")
    if fallen:
        instead = f"; verl's default is {FLASH} ({remedy})" if problem else ""
        say(f"attention of {' and '.join(fallen)}: torch's own{instead}")
    if padded:
        say(f"rows of {' and '.join(padded)} are padded: their layers would mix packed sequences")


class _Fit(NamedTuple):
    """Layouts of a micro-batch in which a model's rows do not affect each other."""

    packed: bool = True
    """whether they may share a row with the packed attention"""
    mixed: bool = False
    """whether they would affect each other in a shared row with any attention"""
    padded: str = PADDED
    """attention for rows that are padded"""

    @classmethod
    def of(cls, path: str) -> _Fit:
        """Judge by the model's config, and by what transformers' class of it supports.

        If the config cannot be read, return the default: a later check reports the missing model.
        """
        try:
            layout, _ = PreTrainedConfig.get_config_dict(path)
        except (OSError, ValueError):
            return cls()
        name, text = layout.get("model_type", ""), layout.get("text_config") or layout
        # A class of the model's own code is not known here.
        model: Any = name in CONFIG_MAPPING and AutoModelForCausalLM._model_mapping.get(CONFIG_MAPPING[name], None)
        carries = getattr(model, "_is_stateful", False) or any(map(_CARRIES.search, text))
        mixed = name not in _SPLIT_BY_VERL and (carries or not _ATTENDS.issuperset(text.get("layer_types") or ()))
        plain = not (mixed or layout.keys() & {"vision_config", "audio_config"} or layout.get("attn_logit_softcapping"))
        supports = [getattr(model, f"_supports_{part}", False) for part in ("attention_backend", "flash_attn", "sdpa")]
        return cls(plain and all(supports), mixed, PADDED if supports[-1] or not model else "eager")


def check_schedule(config: DictConfig, rows: int) -> None:
    """Refuse a learning rate that is still warming up when the training ends.

    Args:
        rows: prompts of the training data.

    Raises:
        ConfigError: the training would end within the warm-up.
    """
    trainer = config.trainer
    data = rows // config.data.train_batch_size * trainer.total_epochs
    steps = min(data, trainer.total_training_steps or data)
    # verl updates the actor from this step on, and moves its learning rate with each update.
    first = max(1, trainer.critic_warmup or 0)
    updates = {"actor_rollout_ref.actor.optim": steps + 1 - first}
    if need_critic(config):
        updates["critic.optim"] = steps
    for part, count in updates.items():
        optim = OmegaConf.select(config, part)
        # A number of steps comes before a share, which is Megatron's of the decay where that has a length of its own.
        name, unit = "lr_warmup_steps", 1
        if (optim[name] or 0) <= 0:
            name, unit = "lr_warmup_steps_ratio", optim.get("lr_decay_steps") or steps
        value = optim[name] or 0
        if 0 < count <= value * unit:
            words = f"below {count / unit:.4g}: the warm-up would outlast the {count} updates of this training"
            raise fail(f"{part}.{name}", value, f"{words}, and the rate would never reach {part}.lr")
