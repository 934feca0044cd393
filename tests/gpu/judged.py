"""Figures of a run of PR at learning rate 0, which the acceptance judges.

The weights never change, so a token of any age was sampled from the weights that train it: what divides engine and
trainer is arithmetic alone, and grows neither with steps nor with age.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pandas as pd

from recipe.partial_rollout.tools.run_record import RunRecord, Step

_FREED = re.compile(r"Sleep mode freed ([\d.]+) GiB")
_REGION = "partial_rollout/trust_region"


def masked_shares(steps: list[Step]) -> tuple[float, float]:
    """Shares of tokens outside the trust region, of the newest version's tokens and of all older ones.

    Raises:
        KeyError: the run does not log them.
    """
    older = sum(step.metrics["partial_rollout/off_policy_token_fraction"] for step in steps)
    masked = sum(step.metrics[f"{_REGION}/masked"] for step in steps)
    newest = sum(step.metrics[f"{_REGION}/masked_age_0"] for step in steps)
    return newest / max(len(steps) - older, 1e-9), (masked - newest) / max(older, 1e-9)


def wrong_lengths(run: RunRecord, data: Path) -> int:
    """Responses of another length than their row's budget in the parquet file ``data``."""
    budget = {info["index"]: info["response_budget"] for info in pd.read_parquet(data).extra_info}
    # A prompt begins with its row.
    rows = [(int(group.prompt.partition("-")[0]), group.lengths) for group in run.trained_groups]
    return sum(length != budget[row] for row, lengths in rows for length in lengths)


def resumed(run: RunRecord) -> int:
    """Responses that were interrupted and resumed."""
    return sum(count > 1 for group in run.trained_groups for count in group.segments)


def token_s(run: RunRecord) -> float:
    """Median seconds in which the engine decodes a token of every request."""
    calls = [call for step in run.steps for call in step.round.phase.calls if call.tokens > 1]
    return median((call.end - call.start - call.queued_s) / call.tokens for call in calls)


def slept(terminal: str) -> list[float]:
    """GiB that each sleep of an engine freed, from what the run printed."""
    return [float(value) for value in _FREED.findall(terminal)]
