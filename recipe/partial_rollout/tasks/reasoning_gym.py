"""The tasks of the package ``reasoning-gym`` (extra ``tasks``): problems made from a seed, scored by the library itself.

``tools data reasoning_gym --task chain_sum --out DIR`` writes them, ``conf/task/reasoning_gym.yaml`` trains on them. A
row's ground truth is the ``repr`` of (task, options of the task, the library's entry). It has all three because some
tasks need their options to score, and some would make another entry in another process. It is not JSON, which would
turn tuples into lists.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from recipe.partial_rollout.preflight.inputs import INSTALL_REASONING_GYM


def problems(task: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Question and ground truth of one problem after another, without end.

    Raises:
        ValueError: package or task are missing, the options do not hold, or an entry cannot be written; in one line.
    """
    data = _data(task, json.dumps(options))
    for index in itertools.count():
        entry = _plain(data[index])
        truth = repr((task, dict(options), entry))
        if not _is_literal(truth, entry):
            raise ValueError(
                f"--task={task}: its entries hold values that a dataset row cannot keep; choose another task"
            )
        yield entry["question"], truth


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    untagged: bool = False,
    **kwargs: Any,
) -> dict[str, float]:
    """verl's ``custom_reward_function``: ``score_answer`` of the text in the last ``<answer>``, with its partial credit.

    Args:
        untagged: a response without the tag is an answer as it stands; for models that do not learn to write it.

    Returns:
        ``score``, 0 to 1, and ``acc``, 1 for a whole answer. An answer that the library fails on scores 0.
    """
    task, options, entry = ast.literal_eval(ground_truth)
    data = _data(task, json.dumps(options))
    answer = import_module("reasoning_gym.utils").extract_answer(solution_str)
    if answer is None and untagged:
        answer = solution_str.strip()
    try:
        score = float(data.score_answer(answer, entry))
    except (Exception, SystemExit):
        # Some tasks parse the model's text with no guard, a few with `eval`.
        score = 0.0
    return {"score": score, "acc": float(score >= 1)}


@functools.lru_cache(maxsize=64)
def _data(task: str, options: str) -> Any:
    try:
        library, factory = import_module("reasoning_gym"), import_module("reasoning_gym.factory")
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: `{INSTALL_REASONING_GYM}` brings it") from error
    if task not in factory.DATASETS:
        raise ValueError(f"--task={task}: must be one of {', '.join(sorted(factory.DATASETS))}")
    try:
        return library.create_dataset(task, **json.loads(options))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"--config={options}: must be options that {task} takes ({error})") from error


def _plain(value: Any) -> Any:
    """``value`` with Python's own numbers and strings in place of numpy's."""
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _is_literal(text: str, entry: Any) -> bool:
    try:
        return ast.literal_eval(text)[2] == entry
    except (ValueError, SyntaxError):
        return False
