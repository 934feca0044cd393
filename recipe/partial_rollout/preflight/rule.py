"""How a check of the configuration is written: a key, what holds of its value, what is allowed, and where and why.

A key of ``actor_rollout_ref`` is written without that, such as ``rollout.n``. What is allowed may quote a value of the
configuration, such as ``{rollout.n}``, or a function of ``facts``, such as ``{replica_devices}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from omegaconf import DictConfig
from verl.trainer.ppo.utils import need_reference_policy

from recipe.partial_rollout.config.keys import ConfigError, fail
from recipe.partial_rollout.preflight import facts
from recipe.partial_rollout.preflight.facts import at, full

_BATCH, _GPUS = "data.train_batch_size", "trainer.n_gpus_per_node"
_QUOTED = re.compile(r"(?<!\$)\{([\w.]+)\}")


class When(NamedTuple):
    """Where a rule applies."""

    applies: Callable[[DictConfig], Any]
    words: str = ""
    """what the message says of it"""


ALWAYS = When(lambda config: True)


def on(key: str, value: Any = True, also: When = ALWAYS) -> When:
    """Where ``key`` has ``value``, and ``also`` applies."""
    return When(lambda config: at(config, key) == value and also.applies(config), f"with {full(key)}={value}")


class Rule(NamedTuple):
    """What must hold of a key's value, where the rule applies."""

    key: str
    holds: Callable[[Any, DictConfig], Any]
    """of value and config; a value that it cannot read does not hold"""
    allowed: str | Callable[[DictConfig], str]
    why: str = ""
    when: When = ALWAYS

    def refusal(self, config: DictConfig) -> ConfigError | None:
        value = at(config, self.key)
        if not self.when.applies(config) or self._is_held_by(value, config):
            return None
        allowed = self.allowed if isinstance(self.allowed, str) else self.allowed(config)
        words = _QUOTED.sub(lambda found: _quoted(config, found[1]), f"{allowed} {self.when.words}".rstrip())
        return fail(full(self.key), value, words + (f": {self.why}" if self.why else ""))

    def _is_held_by(self, value: Any, config: DictConfig) -> Any:
        try:
            return self.holds(value, config)
        except (AttributeError, TypeError, ValueError):
            # The value is of another kind than the rule reads.
            return False


def _quoted(config: DictConfig, name: str) -> str:
    fact = getattr(facts, name, None)
    value = fact(config) if fact else at(config, name)
    return ", ".join(sorted(value)) if isinstance(value, Collection) and not isinstance(value, str) else str(value)


def where(when: When, *rules: Rule) -> list[Rule]:
    return [rule._replace(when=when) for rule in rules]


def broken(rules: Iterable[Rule], config: DictConfig) -> Iterator[ConfigError]:
    """Yield an error for each of ``rules`` that ``config`` breaks."""
    return filter(None, (rule.refusal(config) for rule in rules))


# -- rules of a kind ---------------------------------------------------------------------------------------------------


def only(key: str, wanted: Any, why: str = "") -> Rule:
    """One value; null counts as False."""
    words = "null" if wanted is None else str(wanted)
    return Rule(key, lambda value, _: (value or False) == (wanted or False), words, why)


def other_than(key: str, refused: Any, why: str = "") -> Rule:
    return Rule(key, lambda value, _: value != refused, "any other", why)


def one_of(key: str, names: Collection[Any], why: str = "") -> Rule:
    def words(_: DictConfig) -> str:
        # Composed late, because a registry of verl's may grow after the import.
        return "one of " + ", ".join(sorted("null" if name is None else str(name) for name in names))

    return Rule(key, lambda value, _: value in names, words, why)


def least(key: str, bound: float, why: str = "") -> Rule:
    return Rule(key, lambda value, _: value >= bound, f"at least {bound:g}", why)


def same(key: str, other: str, why: str = "") -> Rule:
    return Rule(key, lambda value, c: value == at(c, other), f"as {full(other)}={{{other}}}", why)


def or_null(rule: Rule) -> Rule:
    return rule._replace(
        holds=lambda value, c: value is None or rule.holds(value, c), allowed=f"{rule.allowed}, or null"
    )


def divisible(key: str, times: str, by: Callable[[DictConfig], int], what: str, why: str = "") -> Rule:
    """The product of two keys must be divisible by a number of ``what``."""
    return Rule(
        key,
        lambda value, c: value * at(c, times) % by(c) == 0,
        lambda c: f"times {full(times)}={at(c, times)} it must be divisible by {by(c)} {what}",
        why,
    )


def budget(key: str, engine: str, when: When = ALWAYS) -> Rule:
    """Tokens of a micro-batch, which cannot split a sample."""

    def words(config: DictConfig) -> str:
        sharing, tokens = facts.split(config, engine)[1], facts.longest(config)
        shared = f" on each of the {sharing} devices that share it" if sharing > 1 else ""
        sample = "the tokens of the longest sample (rollout.prompt_length + rollout.response_length)"
        return f"at least {-(-tokens // sharing):,}, {sample}{shared}"

    return Rule(key, lambda v, c: v * facts.split(c, engine)[1] >= facts.longest(c), words, when=when)


def passes() -> Iterator[Rule]:
    """Update, log-probs and reference, where their micro-batches are made by tokens."""
    for node, name, flag, engine, when in (
        ("actor", "ppo", "use_dynamic_bsz", "actor", ALWAYS),
        ("rollout", "log_prob", "log_prob_use_dynamic_bsz", "actor", ALWAYS),
        ("ref", "log_prob", "log_prob_use_dynamic_bsz", "ref", When(need_reference_policy)),
    ):
        yield budget(f"{node}.{name}_max_token_len_per_gpu", engine, on(f"{node}.{flag}", True, when))


def divided(engine: str) -> Iterator[Rule]:
    """Batch, mini-batch and devices of ``engine``."""
    mini = f"{engine}.ppo_mini_batch_size"
    yield Rule(mini, lambda v, c: v >= 1 and at(c, _BATCH) % v == 0, f"a divisor of {_BATCH}={{{_BATCH}}}")
    yield divisible(mini, "rollout.n", lambda c: facts.copies(c, engine), "device(s)")
    yield divisible(_GPUS, "trainer.nnodes", lambda c: facts.split(c, engine)[0], f"devices that share {engine}")
