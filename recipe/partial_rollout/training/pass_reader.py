"""What needs verl's forward pass over the batch, which gives the log-probs of the weights before the update."""

from __future__ import annotations

from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.choices import Proximal
from recipe.partial_rollout.config.settings import PartialRolloutConfig

_ACTOR, _CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
_DROPOUT = "actor_rollout_ref.model.lora.dropout"
_READS_OLD_LOG_PROBS = ("optimal_token_baseline", "tir_optimal_token_baseline")


class PassReader(NamedTuple):
    """A setting with which the pass is needed."""

    key: str
    value: Any
    allowed: str
    """the value without which it is not, and why"""


def leaves_pass_out(config: DictConfig, settings: PartialRolloutConfig) -> bool:
    """Whether the update's own forward pass gives the log-probs; ``config`` has been checked, or is one of noPR."""
    auto = settings.enable and settings.proximal is Proximal.AUTO and reader_of_pass(config) is None
    return auto or settings.proximal is Proximal.UPDATE


def reader_of_pass(config: DictConfig) -> PassReader | None:
    """The first setting of a composed config that needs the pass; None if the update's own forward pass does."""
    actor, correction, algorithm = config.actor_rollout_ref.actor, config.algorithm.rollout_correction, config.algorithm
    batch, mini_batch = config.data.train_batch_size, actor.ppo_mini_batch_size
    moves = "later updates of a batch start from other weights"
    if actor.ppo_epochs != 1:
        return PassReader(f"{_ACTOR}.ppo_epochs", actor.ppo_epochs, f"1: {moves}")
    if mini_batch < batch:
        return PassReader(f"{_ACTOR}.ppo_mini_batch_size", mini_batch, f"data.train_batch_size={batch}: {moves}")
    if correction.rollout_rs is not None:
        return PassReader(f"{_CORRECTION}.rollout_rs", correction.rollout_rs, "null: rejection reads them")
    if correction.rollout_is_batch_normalize:
        why = "False: the loss sees one micro-batch of the weights"
        return PassReader(f"{_CORRECTION}.rollout_is_batch_normalize", True, why)
    if algorithm.use_kl_in_reward:
        return PassReader("algorithm.use_kl_in_reward", True, "False: the penalty reads them")
    if algorithm.adv_estimator in _READS_OLD_LOG_PROBS:
        return PassReader("algorithm.adv_estimator", algorithm.adv_estimator, "any other: this one reads them")
    if dropout := OmegaConf.select(config, _DROPOUT):
        return PassReader(_DROPOUT, dropout, "0: the update's forward pass has the dropout")
    return None
