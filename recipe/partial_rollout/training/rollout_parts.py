"""Makes the parts that rollout phases need, once verl has made its replicas and workers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl.utils.ray_utils import auto_await

from recipe.partial_rollout.records.run_trace import RunTrace
from recipe.partial_rollout.rollout.context import RolloutContext
from recipe.partial_rollout.rollout.replicas import ServerControl
from recipe.partial_rollout.rollout.slots import ReplicaSlots, SampleSizes
from recipe.partial_rollout.training.run_files import name_metrics_file, open_ledger, run_settings
from recipe.partial_rollout.training.training_steps import step_of

if TYPE_CHECKING:
    from recipe.partial_rollout.training.ray_trainer import PartialRolloutRayPPOTrainer


def rollout_context(trainer: PartialRolloutRayPPOTrainer) -> RolloutContext:
    """The parts of ``trainer``; opens the run's trace, and under PR its ledger. Called after verl's ``init_workers``."""
    settings, config = trainer.settings, trainer.config
    servers: Any = trainer.llm_server_manager
    control = ServerControl(
        servers.get_replicas(),
        settings.deadlines.interrupt_s,
        restarts=settings.failures.replica_restarts,
        start_deadline_s=settings.deadlines.start_s,
    )
    rollout = config.actor_rollout_ref.rollout
    sizes = SampleSizes(rollout.prompt_length, rollout.response_length)
    slots = ReplicaSlots.of(settings, auto_await(control.kv_tokens)(), sizes)  # type: ignore[arg-type]
    print(slots.describe())
    settings = replace(settings, slots_per_replica=slots.per_replica)
    resumed_step, starts_over = step_of(trainer.resume_from), config.trainer.resume_mode == "disable"
    name_metrics_file(trainer.run_dir, resumed_step)
    facts = run_settings(settings, config.trainer.experiment_name, len(control))
    every = settings.dashboard.trace_every
    trace = RunTrace(trainer.run_dir, control.addresses, facts, resumed_step, append=not starts_over, every=every)
    steps, ledger = trainer.steps, None
    if settings.enable:
        ledger = open_ledger(trainer.run_dir, settings, steps, resumed_step, start_over=starts_over)
    return RolloutContext(
        settings=settings,
        control=control,
        slots=slots,
        trace=trace,
        source=trainer.prompt_source,
        ledger=ledger,
        stop=trainer.stop,
        trainers=trainer.actor_rollout_wg.workers,
        steps_per_epoch=steps.per_epoch,
        last_step=steps.last,
    )
