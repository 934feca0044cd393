"""The ten figures of a dashboard as Prometheus gauges, beside vLLM's own metrics.

Ray exports what its processes gauge, on each node's metrics port; Prometheus finds these ports in the file that
``actor_rollout_ref.rollout.prometheus.enable=True`` has verl write, which lists the replicas' addresses too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.records.figures import FIGURES, SECTION

PREFIX = "partial_rollout"
"""of the gauges' names; Ray puts ``ray_`` before it"""
_ENABLE = "actor_rollout_ref.rollout.prometheus.enable"


class Gauges:
    """One gauge a figure, labelled with the run's project and experiment.

    Args:
        make: makes a gauge (``ray.util.metrics.Gauge``).
    """

    def __init__(self, make: Any, labels: Mapping[str, str]) -> None:
        self._gauges = {}
        for figure in FIGURES:
            gauge = make(
                f"{PREFIX}_{figure}", description=f"{SECTION}/{figure} of the last step", tag_keys=tuple(labels)
            )
            gauge.set_default_tags(dict(labels))
            self._gauges[f"{SECTION}/{figure}"] = gauge

    @classmethod
    def of(cls, config: DictConfig) -> Gauges | None:
        """The gauges of a run; None unless its config enables Prometheus."""
        if not OmegaConf.select(config, _ENABLE):
            return None
        from ray.util.metrics import Gauge

        trainer = config.trainer
        return cls(Gauge, {"project": str(trainer.project_name), "experiment": str(trainer.experiment_name)})

    def set(self, figures: Mapping[str, float]) -> None:
        """Note the figures of a step, by their full keys."""
        for key, value in figures.items():
            self._gauges[key].set(value)
