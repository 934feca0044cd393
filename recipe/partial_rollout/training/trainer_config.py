"""Chooses an attention that is installed, and checks learning-rate schedules against the length of the training."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedConfig
from verl.trainer.ppo.utils import need_critic

from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.terminal import say
from verl_ext import packed_attention
from verl_ext.packed_attention import FLASH, NAME, PADDED

_ATTENTION = "override_config.attn_implementation"
_SEQUENCE_PARALLEL = "ulysses_sequence_parallel_size"


def choose_attention(config: DictConfig) -> None:
    """Give every model of ``config`` an attention that is installed; one that the user named stays.

    Prints the attention if it is not verl's default. Call it before interpolations are resolved, because some copy its
    result.

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
    fallen = []
    for path, engines in models.items():
        chosen = OmegaConf.select(config, f"{path}.{_ATTENTION}")
        # The critic packs where the actor does: verl's default for it is false.
        packs = config.actor_rollout_ref.model.use_remove_padding and _is_plain(
            OmegaConf.select(config, f"{path}.path")
        )
        installed = NAME if packs else PADDED
        if problem and chosen == FLASH:
            raise fail(f"{path}.{_ATTENTION}", chosen, f"must be {installed} or null unless you install it ({remedy})")
        if chosen == NAME and not OmegaConf.select(config, f"{path}.use_remove_padding"):
            raise fail(f"{path}.{_ATTENTION}", chosen, f"must be {PADDED} with {path}.use_remove_padding=False")
        # platform=cpu names the packed one for models of every kind.
        if (problem and chosen is None) or (chosen == NAME and not packs):
            OmegaConf.update(config, f"{path}.{_ATTENTION}", installed, force_add=True)
            OmegaConf.update(config, f"{path}.use_remove_padding", packs, force_add=True)
            fallen.append(f"{path} ({installed})")
        if problem or chosen not in (None, FLASH):
            # verl implements sequence parallelism for flash-attn; others silently attend within their own piece.
            for key in (f"{engine}{part}.{_SEQUENCE_PARALLEL}" for engine in engines for part in ("", ".fsdp_config")):
                if (size := OmegaConf.select(config, key) or 1) > 1:
                    instead = remedy if problem else f"{path}.{_ATTENTION}=null"
                    raise fail(key, size, f"must be 1 with any attention but {FLASH} ({instead})")
    if fallen:
        instead = f"; verl's default is {FLASH} ({remedy})" if problem else ""
        say(f"attention of {' and '.join(fallen)}: torch's own{instead}")


def _is_plain(path: str) -> bool:
    """Return whether the packed attention fits the model: its config has no vision, audio or soft-capped logits.

    If the config cannot be read, return True: a later check reports the missing model.
    """
    try:
        layout, _ = PreTrainedConfig.get_config_dict(path)
    except (OSError, ValueError):
        return True
    return not (layout.keys() & {"vision_config", "audio_config"} or layout.get("attn_logit_softcapping"))


def check_schedule(config: DictConfig, rows: int) -> None:
    """Refuse a learning rate that is still warming up when the training ends, and an actor that is never updated.

    Args:
        rows: prompts of the training data.

    Raises:
        ConfigError: the training would end within the warm-up, or before the first update of the actor.
    """
    trainer = config.trainer
    data = rows // config.data.train_batch_size * trainer.total_epochs
    steps = min(data, trainer.total_training_steps or data)
    # verl updates the actor from this step on, and moves its learning rate with each update.
    first = max(1, trainer.critic_warmup or 0)
    has_critic = need_critic(config)
    if first > steps and not has_critic:
        raise fail("trainer.critic_warmup", first, f"at most {steps}, the steps of this training: nothing would train")
    updates = {"actor_rollout_ref.actor.optim": steps + 1 - first}
    if has_critic:
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
