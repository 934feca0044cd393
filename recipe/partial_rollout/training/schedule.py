"""Keys that count training steps, compared with the steps that a training has."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic

from recipe.partial_rollout.config.keys import fail


def check_schedule(config: DictConfig, rows: int) -> None:
    """Refuse a learning rate that is still warming up when the training ends, and an actor that is never updated.

    Args:
        rows: prompts of the training data.

    Raises:
        ConfigError: in one line.
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
