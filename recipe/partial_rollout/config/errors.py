"""A user's mistake in the configuration, in one line: the key, its value, what is allowed."""

from __future__ import annotations


class ConfigError(ValueError):
    """A user's mistake in the configuration."""


def fail(key: str, value: object, allowed: str) -> ConfigError:
    """The one-line error for ``key``."""
    return ConfigError(f"{key}={value}: {allowed}")
