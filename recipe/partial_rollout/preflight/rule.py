"""How a rule is written: a row of a key, what holds of its value, what is allowed and why; ``where`` says when it applies.

A key of ``actor_rollout_ref`` is written without that, such as ``rollout.n``. Below are what rules ask of a configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold

from recipe.partial_rollout.config.keys import ConfigError, fail
from recipe.partial_rollout.config.settings import trainer_devices

BATCH, GPUS = "data.train_batch_size", "trainer.n_gpus_per_node"
CORRECTION, LOSS = "algorithm.rollout_correction", "actor.policy_loss.loss_mode"
NO_PR, V1, REWARD_MODEL = "partial_rollout.enable=False", "trainer.use_v1=True", "reward.reward_model.enable=True"
SCORES_LATE = "a colocated reward model scores once the engines sleep"
Condition = str | Callable[[DictConfig], Any]
"""a key's value as text, such as ``rollout.n=1``, which the message says; or a predicate"""


def full(key: str) -> str:
    """``key`` as verl has it; a part of ``actor_rollout_ref`` may be written without that, such as ``rollout.n``."""
    return f"actor_rollout_ref.{key}" if key.partition(".")[0] in ("actor", "model", "ref", "rollout") else key


def at(config: DictConfig, key: str) -> Any:
    """The value of ``key``; None if it is not there."""
    return OmegaConf.select(config, full(key))


class Rule(NamedTuple):
    """A condition on a key's value, which must hold where all of ``when`` apply."""

    key: str
    holds: Callable[[Any, DictConfig], Any]
    """of value and config; a value that it cannot read does not hold"""
    allowed: str | Callable[[DictConfig], str]
    why: str = ""
    when: tuple[Condition, ...] = ()

    def refusal(self, config: DictConfig) -> ConfigError | None:
        """The error for the key, if the rule applies and its value does not hold."""
        value = at(config, self.key)
        if not all(applies(condition, config) for condition in self.when):
            return None
        with suppress(AttributeError, TypeError, ValueError, ZeroDivisionError):
            if self.holds(value, config):
                return None
        words = self.allowed if isinstance(self.allowed, str) else self.allowed(config)
        conditions = " and ".join(full(condition) for condition in self.when if isinstance(condition, str))
        return fail(
            full(self.key), value, words + (conditions and f" if {conditions}") + (self.why and f": {self.why}")
        )


def applies(condition: Condition, config: DictConfig) -> Any:
    """Whether ``condition`` applies to ``config``."""
    if callable(condition):
        return condition(config)
    key, _, value = condition.partition("=")
    return str(at(config, key)) == value


def where(conditions: Condition | tuple[Condition, ...], *rules: Rule) -> tuple[Rule, ...]:
    """``rules``, for where ``conditions`` apply too."""
    more = conditions if isinstance(conditions, tuple) else (conditions,)
    return tuple(rule._replace(when=(*rule.when, *more)) for rule in rules)


def broken(rules: Iterable[Rule], config: DictConfig) -> Iterator[ConfigError]:
    """Yield an error for each of ``rules`` that ``config`` breaks."""
    return filter(None, (rule.refusal(config) for rule in rules))


# -- rules of a kind ---------------------------------------------------------------------------------------------------


def only(key: str, wanted: Any, why: str = "") -> Rule:
    """One value; null counts as False."""
    words = f"must be {'null' if wanted is None else wanted}"
    return Rule(key, lambda value, _: (value or False) == (wanted or False), words, why)


def one_of(key: str, names: Collection[Any], why: str = "") -> Rule:
    # The words are composed late, because a registry of verl's may grow after the import.
    return Rule(
        key,
        lambda value, _: value in names,
        lambda _: "one of " + ", ".join(sorted("null" if name is None else str(name) for name in names)),
        why,
    )


def divisible(key: str, times: str, by: Callable[[DictConfig], int], what: str, why: str = "") -> Rule:
    """The product of two keys must be divisible by a number of ``what``."""
    return Rule(
        key,
        lambda value, c: value * at(c, times) % by(c) == 0,
        lambda c: f"times {full(times)}={at(c, times)} it must be divisible by {by(c)} {what}",
        why,
    )


def budget(key: str, engine: str) -> Rule:
    """Tokens of a micro-batch, which cannot split a sample."""
    return Rule(
        key,
        lambda value, c: value * split(c, engine)[1] >= longest(c),
        lambda c: (
            f"at least {-(-longest(c) // split(c, engine)[1]):,}, the tokens of the longest sample "
            f"(rollout.prompt_length + rollout.response_length) on each of {split(c, engine)[1]} device(s) that share it"
        ),
    )


def divided(engine: str) -> tuple[Rule, ...]:
    """Batch, mini-batch and devices of ``engine``."""
    mini = f"{engine}.ppo_mini_batch_size"
    return (
        Rule(mini, lambda v, c: v >= 1 and at(c, BATCH) % v == 0, lambda c: f"a divisor of {BATCH}={at(c, BATCH)}"),
        divisible(mini, "rollout.n", lambda c: copies(c, engine), "device(s)"),
        divisible(GPUS, "trainer.nnodes", lambda c: split(c, engine)[0], f"devices that share {engine}"),
    )


# -- what rules ask ----------------------------------------------------------------------------------------------------


def replica_devices(config: DictConfig) -> int:
    """Devices of an engine replica."""
    rollout = config.actor_rollout_ref.rollout
    return prod((rollout.tensor_model_parallel_size, rollout.data_parallel_size, rollout.pipeline_model_parallel_size))


def longest(config: DictConfig) -> int:
    """Tokens of the longest sample."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.prompt_length + rollout.response_length


def split(config: DictConfig, engine: str) -> tuple[int, int]:
    """Devices that share the model of ``engine`` (actor, ref or critic), and those of them that share a sequence."""
    node = at(config, engine)
    if node.strategy == "megatron":
        megatron = node.megatron
        context = megatron.context_parallel_size
        return megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size * context, context
    inner = node.get("fsdp_config") or node.get("fsdp") or {}
    sequence = max(node.get("ulysses_sequence_parallel_size") or 1, inner.get("ulysses_sequence_parallel_size") or 1)
    return sequence, sequence


def copies(config: DictConfig, engine: str) -> int:
    """Parts that ``engine`` divides a batch into."""
    return max(1, trainer_devices(config) // split(config, engine)[0])


def compares_siblings(config: DictConfig) -> bool:
    """Whether the advantage estimator is one of verl's that compares the samples of a prompt."""
    estimator: Any = ADV_ESTIMATOR_REGISTRY.get(config.algorithm.adv_estimator)
    return estimator.__module__.startswith("verl.") and "index" in inspect.signature(estimator).parameters


def keeps_on_policy_tokens(threshold: Any) -> bool:
    """Whether a token of weight 1 keeps it; raises what verl raises for a threshold that it does not take."""
    upper, lower = _parse_rollout_is_threshold(threshold)
    # One bound caps the weights; of two, tokens outside are masked.
    return lower is None or lower <= 1 <= upper
