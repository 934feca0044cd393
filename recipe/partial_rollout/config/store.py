"""Hydra's access to the recipe's keys: conf/partial_rollout.yaml takes them, with their defaults, from its store."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore

from recipe.partial_rollout.config.keys import defaults_of
from recipe.partial_rollout.config.settings import ROOT, PartialRolloutConfig


def register_keys() -> None:
    """Make ``partial_rollout_keys`` known to hydra; called by every program before it composes a config of conf/."""
    ConfigStore.instance().store("partial_rollout_keys", defaults_of(PartialRolloutConfig), package=ROOT)
