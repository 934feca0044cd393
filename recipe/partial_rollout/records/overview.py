"""The ten figures that a dashboard opens with, under the same keys in both arms.

They are copies of figures that a step logs anyway, in a section of their own. The digit puts the section first wherever
sections are sorted by name (wandb, TensorBoard); SwanLab sorts them by their first appearance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

SECTION = "0_overview"
"""what the keys start with, before the slash"""

_HELD_OUT = re.compile(r"val-core/.*/mean@\d+")
"""verl's mean validation reward (accuracy, if the reward function gives one) of a data source"""

_COPIES = {
    "step_s": "timing_s/step",
    "rollout_s": "timing_s/gen",
    "efficiency": "partial_rollout/rollout/efficiency",
    "bubble": "partial_rollout/rollout/bubble_fraction",
    "tokens_per_s": "partial_rollout/rollout/tokens_per_s",
    "staleness_mean": "partial_rollout/staleness/mean",
    "staleness_max": "partial_rollout/staleness/max",
    "off_policy_share": "partial_rollout/off_policy_token_fraction",
    "length_bias": "partial_rollout/length/bias",
}
"""figure to the key that it copies"""

_SYNCHRONOUS = {"staleness_mean": 0.0, "staleness_max": 0.0, "off_policy_share": 0.0, "length_bias": 1.0}
"""what these are under noPR, by definition: a batch is dispatched, decoded and trained under one version"""

FIGURES = ("held_out_reward", *_COPIES)
"""names of the ten figures, in the order in which a dashboard shows them"""


def held_out_rewards(steps: Iterable[Mapping[str, Any]]) -> list[float]:
    """Mean rewards of the validations among ``steps`` (verl's metrics of each), in their order."""
    return [float(value) for step in steps for key, value in step.items() if _HELD_OUT.fullmatch(key)]


def overview(data: Mapping[str, Any], *, partial: bool) -> dict[str, float]:
    """The figures that ``data``, the metrics of a step, allows; by their full keys, in the order of ``FIGURES``.

    Args:
        data: by verl's keys; a validation without a training step has few of them.
        partial: False under noPR, whose staleness, off-policy share and length bias are known.

    >>> overview({"val-core/gsm8k/acc/mean@4": 0.5, "val-core/math/acc/mean@4": 0.7}, partial=True)
    {'0_overview/held_out_reward': 0.6}
    >>> list(overview({"training/global_step": 1, "timing_s/gen": 3.0}, partial=False).items())[:2]
    [('0_overview/rollout_s', 3.0), ('0_overview/staleness_mean', 0.0)]
    """
    found: dict[str, float] = {}
    if rewards := held_out_rewards([data]):
        found["held_out_reward"] = float(np.mean(rewards))
    known = {} if partial or "training/global_step" not in data else _SYNCHRONOUS
    for figure, source in _COPIES.items():
        if figure in known:
            found[figure] = known[figure]
        elif source in data:
            found[figure] = float(data[source])
    return {f"{SECTION}/{figure}": value for figure, value in found.items()}
