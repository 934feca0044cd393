"""Opens the files of a run directory: afresh, or continued from a checkpoint."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.records.ledger import NAME as LEDGER
from recipe.partial_rollout.records.ledger import Ledger
from recipe.partial_rollout.records.ledger_events import RunSizes
from recipe.partial_rollout.records.run_settings import Arm, RunSettings
from recipe.partial_rollout.training.training_steps import TrainingSteps


def name_metrics_file(directory: Path, resumed_step: int) -> None:
    """Give a resumed run a metrics file of its own: verl's file logger empties the file that it opens."""
    if resumed_step and os.environ.get("VERL_FILE_LOGGER_PATH") == str(directory / "metrics.jsonl"):
        os.environ["VERL_FILE_LOGGER_PATH"] = str(directory / f"metrics_from_{resumed_step + 1}.jsonl")


def open_ledger(
    directory: Path, settings: PartialRolloutConfig, steps: TrainingSteps, resumed_step: int, *, start_over: bool
) -> Ledger:
    """Open the ledger: a new one for a training that starts over; one that may resume appends to the ledger it finds."""
    path = directory / LEDGER
    if start_over:
        path.unlink(missing_ok=True)
    goes_on = path.exists()
    ledger = Ledger(directory)
    ledger.run(
        RunSizes(
            arm=Arm.PR,
            samples_per_group=settings.samples_per_group,
            batch_groups=settings.batch_groups,
            max_staleness=settings.max_staleness,
            epoch_prompts=steps.per_epoch * settings.batch_groups,
            total=steps.total * settings.batch_groups,
            offered=steps.offered * settings.batch_groups,
            filters=steps.filters,
            drains=steps.drains,
        )
    )
    if goes_on:
        ledger.resumed(resumed_step)
    return ledger


def run_settings(settings: PartialRolloutConfig, experiment: str, replicas: int) -> RunSettings:
    """The settings of a run, of either arm, for the report."""
    return RunSettings(
        arm=Arm.PR if settings.enable else Arm.NOPR,
        experiment=experiment,
        batch_groups=settings.batch_groups,
        samples_per_group=settings.samples_per_group,
        replicas=replicas,
        slots_per_replica=settings.slots_per_replica,
        max_staleness=settings.max_staleness if settings.enable else 0,
        mode=str(settings.mode) if settings.enable else "sync",
        policy=str(settings.policy) if settings.enable else "none",
        verl=version("verl"),
        vllm=version("vllm"),
        overtake=settings.scheduling.overtake if settings.enable else None,
        placement=str(settings.placement),
    )
