"""Check the columns of the data before Ray starts.

Rows must have those that agent loops and reward managers read, and none that verl's worker or a checkpoint cannot take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import datasets
from omegaconf import DictConfig
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.reward_score import default_compute_score

from recipe.partial_rollout.config.keys import fail, refusing
from recipe.partial_rollout.preflight.rule import at
from recipe.partial_rollout.preflight.user_code import agent_loops

LOOP = "agent_name"
"""column that names a row's agent loop"""
VERLS_LOOPS = {"single_turn_agent", "tool_agent"}
_TAKEN = "self", "sampling_params", "trace", "trajectory"
"""parameters of verl's ``_run_agent_loop``, which gets the columns of a row by their names"""
_UNSAVED = "timestamp", "date", "time", "duration", "decimal"
"""how the names of the types begin whose values no checkpoint can hold (``checkpoint/plain_state.py``)"""
UNSAVED_REMEDY = "(store it as text, or train without checkpoints: trainer.save_freq=-1)"


def check_columns(config: DictConfig, dataset: Any, key: str) -> None:
    """Refuse rows that name an unknown agent loop, lack a column that verl's reward managers read, or have one too many.

    verl would notice none of it before a sample is made. If a user's own dataset class makes the rows, only the first
    one is looked at: it may have other columns than the files.
    """
    table, value = table_of(dataset), at(config, key)
    if table is not None:
        given: Mapping[str, Any] = table.features
    else:
        with refusing(key, value, "files of which the class in data.custom_cls makes rows"):
            given = dataset[0] if len(dataset) else {}
    if not given:
        return
    if taken := sorted({*given} & {*_TAKEN}):
        words = (
            f"rows without a column {taken[0]}: it is the name of a parameter of verl's agent-loop worker; rename it"
        )
        raise fail(key, value, words)
    default = config.actor_rollout_ref.rollout.agent.default_agent_loop
    loops = {*_values(table, given, LOOP)} if LOOP in given else {default}
    if LOOP in given and (unknown := loops - (known := agent_loops(config))):
        words = f"{LOOP} of each row must be one of {', '.join(sorted(known))}"
        raise fail(key, value, f"{words}; rows name {', '.join(map(str, unknown))}, which is not registered")
    # A loop of the user's own may score its samples itself.
    own_loops = config.actor_rollout_ref.rollout.agent.agent_loop_config_path or loops - VERLS_LOOPS
    reward = config.reward
    # A reward model alone reads no row.
    by_model = reward.reward_model.enable and not reward.custom_reward_function.path
    if own_loops or by_model or reward.reward_manager.source != "register":
        return
    columns = {
        *given,
        *(f"{name}.{field}" for name, each in given.items() if isinstance(each, Mapping) for field in each),
    }
    for column in ("data_source", "reward_model.ground_truth"):
        if column not in columns:
            words = "rows with data_source and reward_model.ground_truth, which reward manager"
            raise fail(key, value, f"{words} {reward.reward_manager.name} reads; these rows have no {column}")
    if not reward.custom_reward_function.path:
        with refusing(key, value, "rows whose data_source is text", NotImplementedError):
            sources = _values(table, given, "data_source")
        _check_sources(key, sources)


def table_of(dataset: Any) -> datasets.Dataset | None:
    """The table whose rows ``dataset`` gives with all their columns; None if a user's own class makes the rows."""
    table = getattr(dataset, "dataframe", None)
    as_verl = getattr(type(dataset), "__getitem__", None) is RLHFDataset.__getitem__
    return table if as_verl and isinstance(table, datasets.Dataset) else None


def _values(table: datasets.Dataset | None, given: Mapping[str, Any], column: str) -> Iterable[Any]:
    """Values of ``column`` in all rows of ``table``, or in the row ``given``."""
    return [given[column]] if table is None else table.unique(column)


def _check_sources(key: str, sources: Iterable[Any]) -> None:
    """Raise ``ConfigError`` for a ``data_source`` that verl has no reward function for."""
    for source in sources:
        try:
            # A scorer that exists raises something else, because it gets nothing to score; one of them prints.
            with redirect_stdout(StringIO()):
                default_compute_score(source, None, None)
        except NotImplementedError as error:
            words = f"a file with your reward function; verl has none for data_source={source} of {key}"
            raise fail("reward.custom_reward_function.path", None, words) from error
        except Exception:
            continue


def check_types(config: DictConfig, dataset: Any, key: str) -> None:
    """Refuse a column of a type whose values no checkpoint can hold, however few rows have a value."""
    table = table_of(dataset)
    # The dataset does not put these into a row.
    media = {config.data.get(f"{kind}_key") or f"{kind}s" for kind in ("image", "video", "audio")}
    for name, feature in table.features.items() if table is not None else ():
        for path, kind in _types(name, feature):
            if name not in media and kind.startswith(_UNSAVED):
                words = f"rows that a checkpoint can hold: column {path} has the type {kind} {UNSAVED_REMEDY}"
                raise fail(key, at(config, key), words)


def _types(path: str, feature: Any) -> Iterator[tuple[str, str]]:
    """Path and type of each plain value in a column."""
    if isinstance(feature, Mapping):
        for name, each in feature.items():
            yield from _types(f"{path}.{name}", each)
    elif isinstance(feature, datasets.Value):
        yield path, feature.dtype
    else:
        inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
        if inner is not None:
            yield from _types(path, inner)
