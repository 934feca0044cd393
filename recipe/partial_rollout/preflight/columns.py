"""Check the columns of the data before Ray starts: rows must have those that agent loops and reward managers read."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from omegaconf import DictConfig
from verl.utils.reward_score import default_compute_score

from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.preflight.rule import at
from recipe.partial_rollout.preflight.user_code import agent_loops

LOOP = "agent_name"
"""column that names a row's agent loop"""
VERLS_LOOPS = {"single_turn_agent", "tool_agent"}


def check_columns(config: DictConfig, dataset: Any, key: str) -> None:
    """Refuse rows that name an unknown agent loop, or lack a column that verl's reward managers read.

    verl would notice neither before a sample is made. Nothing is checked if a user's own dataset class keeps no table.
    """
    table, value = getattr(dataset, "dataframe", None), at(config, key)
    if table is None:
        return
    columns, loops = table.features.flatten(), [config.actor_rollout_ref.rollout.agent.default_agent_loop]
    if LOOP in columns:
        loops, known = table.unique(LOOP), agent_loops(config)
        if unknown := {*loops} - known:
            words = f"{LOOP} of each row must be one of {', '.join(sorted(known))}"
            raise fail(key, value, f"{words}; rows name {', '.join(map(str, unknown))}, which is not registered")
    # A loop of the user's own may score its samples itself.
    own_loops = config.actor_rollout_ref.rollout.agent.agent_loop_config_path or {*loops} - VERLS_LOOPS
    reward = config.reward
    # A reward model alone reads no row.
    by_model = reward.reward_model.enable and not reward.custom_reward_function.path
    if own_loops or by_model or reward.reward_manager.source != "register":
        return
    for column in ("data_source", "reward_model.ground_truth"):
        if column not in columns:
            words = "rows with data_source and reward_model.ground_truth, which reward manager"
            raise fail(key, value, f"{words} {reward.reward_manager.name} reads; these rows have no {column}")
    if not reward.custom_reward_function.path:
        _check_sources(key, table)


def _check_sources(key: str, table: Any) -> None:
    """Raise ``ConfigError`` for a ``data_source`` that verl has no reward function for."""
    for source in table.unique("data_source"):
        try:
            # A scorer that exists raises something else, because it gets nothing to score; one of them prints.
            with redirect_stdout(StringIO()):
                default_compute_score(source, None, None)
        except NotImplementedError as error:
            words = f"a file with your reward function; verl has none for data_source={source} of {key}"
            raise fail("reward.custom_reward_function.path", None, words) from error
        except Exception:
            continue
