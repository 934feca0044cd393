"""A learning rate reaches its peak before the training ends, or the start is refused."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from verl.workers.config import FSDPOptimizerConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.training.trainer_config import check_schedule

OPTIM, GAE = "actor_rollout_ref.actor.optim", "algorithm.adv_estimator=gae"
ROWS, STEPS = 26, 12
"""two epochs of batches of 4; what a batch does not fill is left out of each epoch"""


def highest_rate(steps, **keys):
    """The highest rate of ``steps`` updates, as a share of the peak, by verl's own scheduler."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    config = FSDPOptimizerConfig(lr=1.0, total_training_steps=steps, **keys)
    scheduler = FSDPEngine._build_lr_scheduler(SimpleNamespace(optimizer_config=config, rank=1), optimizer)
    rates = []
    with warnings.catch_warnings():
        # The optimizer makes no step here.
        warnings.simplefilter("ignore")
        for _ in range(steps):
            rates.append(scheduler.get_last_lr()[0])
            scheduler.step()
    return max(rates)


def by_verls_schedule(kind, name, value):
    """The settings, and how they are refused if verl's schedule does not reach the rate that is asked for."""
    settings = (f"{OPTIM}.lr_scheduler_type={kind}", f"{OPTIM}.{name}={value}")
    reached = highest_rate(STEPS, lr_scheduler_type=kind, **{name: value}) == 1
    return settings, None if reached else rf"^{OPTIM}.{name}={value}: below [^\n]* never reach {OPTIM}.lr$"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        *[by_verls_schedule("constant", "lr_warmup_steps", value) for value in (-1, 0, STEPS - 1, STEPS, 1000)],
        *[by_verls_schedule("cosine", "lr_warmup_steps_ratio", value) for value in (0.0, 0.1, 0.99, 1.0, 10.0)],
        ([f"{OPTIM}.lr_warmup_steps=8", "trainer.total_training_steps=8"], f"{OPTIM}.lr_warmup_steps=8: below 8: "),
        ([f"{OPTIM}.lr_warmup_steps=30", "trainer.total_training_steps=99"], f"{OPTIM}.lr_warmup_steps=30: below 12: "),
        ([GAE, f"{OPTIM}.lr_warmup_steps=8", "trainer.critic_warmup=5"], f"{OPTIM}.lr_warmup_steps=8: below 8: "),
        ([GAE, f"{OPTIM}.lr_warmup_steps_ratio=0.5", "trainer.critic_warmup=8"], "_ratio=0.5: below 0.4167: "),
        ([f"+{OPTIM}.lr_decay_steps=24", f"{OPTIM}.lr_warmup_steps_ratio=0.5"], "_ratio=0.5: below 0.5: "),
        ([GAE, "trainer.critic_warmup=13"], None),
        (
            [GAE, "critic.optim.lr_warmup_steps=50"],
            "critic.optim.lr_warmup_steps=50: below 12",
        ),
        (["critic.optim.lr_warmup_steps=50"], None),
    ],
)
def test_counts_of_steps_are_compared_with_the_updates_of_the_training(resolved_config, overrides, message):
    sizes = "data.train_batch_size=4", "trainer.total_epochs=2", "trainer.total_training_steps=null"
    config = resolved_config("quickstart_cpu", *sizes, *overrides)
    if message is None:
        check_schedule(config, ROWS)
    else:
        with pytest.raises(ConfigError, match=message):
            check_schedule(config, ROWS)
