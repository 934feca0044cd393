"""What a run adds to its dashboard: the ten figures, SwanLab's page, pictures of rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.records.figures import overview
from recipe.partial_rollout.records.trace import Arm, RoundRecord
from recipe.partial_rollout.rollout.gauges import Gauges
from recipe.partial_rollout.training import swanlab_run
from verl_ext import swanlab_board

PICTURES = "1_pictures"
"""section of the pictures"""
PICTURES_EVERY = 10
"""steps from one pair of pictures (timeline of the round, response lengths) to the next"""


class Dashboard:
    """The dashboard of one run, of either arm.

    Args:
        config: the whole configuration.
        directory: of the run.
    """

    def __init__(self, config: DictConfig, settings: PartialRolloutConfig, directory: Path) -> None:
        self._config, self._settings, self._directory = config, settings, directory
        self._gauges = Gauges.of(config)
        self._pictures_every = PICTURES_EVERY if self._on_swanlab else 0

    @property
    def _on_swanlab(self) -> bool:
        return swanlab_run.SWANLAB in self._config.trainer.logger

    def open(self, *, resumes: bool) -> dict[str, Any] | None:
        """Prepare SwanLab for the run; returns its config table, None without SwanLab.

        Args:
            resumes: whether a checkpoint of this recipe is resumed; verl's own are found here.
        """
        if not self._on_swanlab:
            return None
        self._directory.mkdir(parents=True, exist_ok=True)
        swanlab_board.install()
        swanlab_run.name_run(self._directory, resumes=resumes or self._verl_resumes)
        arm = Arm.PR if self._settings.enable else Arm.NOPR
        swanlab_run.colour_run(str(self._config.trainer.experiment_name), arm)
        return swanlab_run.config_table(self._config)

    @property
    def _verl_resumes(self) -> bool:
        """Whether verl resumes, under noPR, a checkpoint of its own."""
        mode, found = self._config.trainer.resume_mode, self._directory / "latest_checkpointed_iteration.txt"
        return not self._settings.enable and (mode == "resume_path" or (mode == "auto" and found.exists()))

    def figures(self, data: dict[str, Any]) -> dict[str, float]:
        """The ten figures of a step that logs ``data``, as far as it has them; Prometheus gets them too, if asked for."""
        figures = overview(data, partial=self._settings.enable)
        if self._gauges is not None:
            self._gauges.set(figures)
        return figures

    def draw(self, step: int, round_: RoundRecord | None) -> None:
        """Send pictures of ``round_`` if it is that of ``step`` and the step's turn."""
        if not self._pictures_every or round_ is None or round_.step != step or (step - 1) % self._pictures_every:
            return
        import swanlab

        from recipe.partial_rollout.training.round_pictures import length_histogram, timeline

        pictures = {"timeline": timeline(round_), "lengths": length_histogram(round_)}
        swanlab.log({f"{PICTURES}/{name}": swanlab.Image(pixels) for name, pixels in pictures.items()}, step=step)
