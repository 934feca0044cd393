"""A rule on the configuration: a key, a condition on its value, the words for what is allowed, and why.

``where`` limits rules to some configurations. A key below ``actor_rollout_ref`` is written without that, such as
``rollout.n``. The functions at the end of this file compute the sizes that rules compare.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.rollout_corr_helper import _parse_rollout_is_threshold, _parse_rollout_rs_thresholds

from recipe.partial_rollout.config.keys import ConfigError, fail
from recipe.partial_rollout.config.settings import trainer_devices
from recipe.partial_rollout.preflight.verl_keys import default_of

BATCH, GPUS = "data.train_batch_size", "trainer.n_gpus_per_node"
CORRECTION, LOSS = "algorithm.rollout_correction", "actor.policy_loss.loss_mode"
NO_PR, V1, REWARD_MODEL = "partial_rollout.enable=False", "trainer.use_v1=True", "reward.reward_model.enable=True"
SCORES_LATE = "a colocated reward model cannot score before the engines sleep, which is too late here"
Condition = str | Callable[[DictConfig], Any]
"""``KEY=VALUE`` such as ``rollout.n=1``, which the error message repeats; or a predicate on the config"""


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
    """predicate on value and config; the value is refused if it returns false or raises, for example a ``TypeError``"""
    allowed: str | Callable[[DictConfig], str]
    why: str = ""
    when: tuple[Condition, ...] = ()

    def refusal(self, config: DictConfig) -> ConfigError | None:
        """Return the error for the key if the rule applies and its value breaks it; otherwise None."""
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
    """Return ``rules`` with ``conditions`` added: each then applies only where these hold, too."""
    more = conditions if isinstance(conditions, tuple) else (conditions,)
    return tuple(rule._replace(when=(*rule.when, *more)) for rule in rules)


def broken(rules: Iterable[Rule], config: DictConfig) -> Iterator[ConfigError]:
    """Yield an error for each of ``rules`` that ``config`` breaks."""
    return filter(None, (rule.refusal(config) for rule in rules))


# -- rules of a kind ---------------------------------------------------------------------------------------------------


def only(key: str, wanted: Any, why: str = "") -> Rule:
    """Require one value; null counts as False."""
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


def unread(key: str, strategy: str, instead: str) -> Rule:
    """Require verl's default, because the training engine that ``strategy`` names does not read ``key``.

    ``instead`` says what to do.
    """
    default = default_of(full(key))
    return Rule(
        key,
        lambda value, _: value == default or not (value or default),
        lambda c: f"must stay at verl's default, {default}, because {at(c, strategy)} does not read it",
        instead,
    )


def divisible(key: str, times: str, by: Callable[[DictConfig], int], what: str, why: str = "") -> Rule:
    """Require that ``key`` times ``times`` is divisible by ``by(config)``; ``what`` says what that number counts."""
    return Rule(
        key,
        lambda value, c: value * at(c, times) % by(c) == 0,
        lambda c: f"times {full(times)}={at(c, times)} it must be divisible by {by(c)} ({what})",
        why,
    )


def budget(key: str, engine: str) -> Rule:
    """Require that a micro-batch of ``key`` tokens a device can hold the longest sample, which cannot be split."""
    return Rule(
        key,
        lambda value, c: value * split(c, engine)[1] >= longest(c),
        lambda c: (
            f"at least {-(-longest(c) // split(c, engine)[1]):,}, the tokens of the longest sample "
            f"(rollout.prompt_length + rollout.response_length) over the {split(c, engine)[1]} device(s) that share it"
        ),
    )


def divided(engine: str) -> tuple[Rule, ...]:
    """Require that ``engine`` (actor or critic) can divide batch and mini-batch evenly among its devices."""
    mini = f"{engine}.ppo_mini_batch_size"
    return (
        Rule(mini, lambda v, c: v >= 1 and at(c, BATCH) % v == 0, lambda c: f"a divisor of {BATCH}={at(c, BATCH)}"),
        divisible(mini, "rollout.n", lambda c: copies(c, engine), "data-parallel ranks"),
        divisible(GPUS, "trainer.nnodes", lambda c: split(c, engine)[0], f"devices that share the model of {engine}"),
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
    """Whether ``rollout_is_threshold`` leaves a token of weight 1 in the loss as it is.

    Raises verl's error for one that verl refuses.
    """
    upper, lower = _parse_rollout_is_threshold(threshold)
    # One bound caps the weights; of two, tokens outside are masked.
    return (lower or 0) <= 1 <= upper


def rejections(names: str | None) -> list[str]:
    """The criteria in ``rollout_rs``, each once, as verl reads them."""
    return [*dict.fromkeys(filter(None, map(str.strip, (names or "").split(","))))]


def accepts_on_policy_samples(names: str, threshold: Any) -> bool:
    """Whether the criteria of ``rollout_rs`` leave a sample of ratio 1 alone, for this ``rollout_rs_threshold``.

    Raises verl's error for a threshold that verl refuses.
    """
    bounds = _parse_rollout_rs_thresholds(rejections(names), threshold)
    # Criteria without a lower bound compare what is 0 for a ratio of 1.
    return all(each["lower"] is None or each["lower"] <= 1 <= (each["upper"] or 0) for each in bounds.values())
