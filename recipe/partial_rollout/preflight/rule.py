"""How a check of the configuration is written: a key, what holds of its value, what is allowed, and where that applies."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.keys import fail

ACTOR, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
Test = Callable[[DictConfig], Any]
Count = Callable[[DictConfig], int]


def always(config: DictConfig) -> bool:
    return True


class Rule(NamedTuple):
    """What must hold of a key's value, where the rule applies."""

    key: str
    holds: Callable[[Any, DictConfig], Any]
    """of value and config"""
    allowed: str | Callable[[DictConfig], str]
    when: Test = always

    def broken(self, config: DictConfig) -> bool:
        return bool(self.when(config)) and not self.holds(at(config, self.key), config)


def check_rules(rules: Iterable[Rule], config: DictConfig) -> None:
    """Raise ``ConfigError`` for the first of ``rules`` that is broken."""
    for rule in rules:
        if rule.broken(config):
            allowed = rule.allowed if isinstance(rule.allowed, str) else rule.allowed(config)
            raise fail(rule.key, at(config, rule.key), allowed)


def at(config: DictConfig, key: str) -> Any:
    """The value of ``key``; None if it is not there."""
    return OmegaConf.select(config, key)


def one_of(key: str, words: Collection[str], when: Test = always, why: str = "") -> Rule:
    return Rule(key, lambda value, _: value in words, lambda _: "one of " + ", ".join(sorted(words)) + why, when)


def least(key: str, bound: float, *, or_null: bool = False, why: str = "") -> Rule:
    words = f"at least {bound:g}" + (", or null" if or_null else "") + why
    return Rule(key, lambda value, _: (or_null and value is None) or value >= bound, words)


def unset(key: str, why: str) -> Rule:
    return Rule(key, lambda value, _: not value, f"null: {why}")


def off(key: str, why: str) -> Rule:
    return Rule(key, lambda on, _: not on, f"False: {why}")


def shared(key: str, count: Count, by: Count, times: str, what: str, when: Test = always) -> Rule:
    """``count``, which is ``key`` times another key, must be divisible by ``by``."""
    return Rule(
        key,
        lambda _, c: count(c) % by(c) == 0,
        lambda c: f"times {times}={at(c, times)} it must be divisible by {by(c)} {what}",
        when,
    )


def share(key: str) -> Rule:
    return Rule(key, lambda value, _: 0 < value <= 1, "above 0, at most 1")


def writable(folder: Any) -> bool:
    """Whether files can be made at ``folder``, or in the folder above it where it is not there yet."""
    try:
        path = Path(str(folder)).expanduser().absolute()
        there = next(each for each in (path, *path.parents) if each.exists())
        with tempfile.TemporaryDirectory(dir=there):
            return True
    except OSError:
        return False


def folder(key: str) -> Rule:
    return Rule(key, lambda path, _: path is None or writable(path), "a directory that this user can write")
