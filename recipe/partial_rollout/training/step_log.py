"""What becomes of a logged step besides verl's record: more figures, one line, warnings, pictures."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from tqdm import tqdm

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.records.trace import RoundRecord
from recipe.partial_rollout.training.dashboard import Dashboard
from recipe.partial_rollout.training.policy_drift import PolicyDrift, not_finite
from recipe.partial_rollout.training.step_line import StepLine

_LOG_S = "partial_rollout/timing/log_s"


class StepLog:
    """The log of one run, of either arm.

    Args:
        config: the whole configuration.
        directory: of the run.
        total_steps: steps of the training.
    """

    def __init__(self, config: DictConfig, settings: PartialRolloutConfig, directory: Path, total_steps: int) -> None:
        self._partial = settings.enable
        self._dashboard = Dashboard(config, settings, directory)
        self._line = StepLine(total_steps, separate=settings.separate)
        self._drift = PolicyDrift()
        self._began, self._last_s = 0.0, 0.0

    def open(self, *, resumes: bool) -> dict[str, Any] | None:
        """See ``Dashboard.open``."""
        return self._dashboard.open(resumes=resumes)

    def extend(self, data: dict[str, Any], step: int) -> dict[str, Any]:
        """Metrics of ``step`` with the dashboard's figures and the seconds of the last log; prints the line, warns."""
        self._began = time.perf_counter()
        data = {**self._dashboard.figures(data), **data, _LOG_S: self._last_s}
        self._line.show(data, step)
        if warning := self._drift.observe(data, step) if self._partial else not_finite(data, step):
            tqdm.write(warning)
        return data

    def close(self, step: int, round_: RoundRecord | None) -> None:
        """Draw the pictures of ``step``, which verl has recorded."""
        self._dashboard.draw(step, round_)
        self._last_s = time.perf_counter() - self._began
