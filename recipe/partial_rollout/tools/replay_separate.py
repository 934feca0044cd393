"""Replays a run with separate placement: engines by its own calls, the trainer by the seconds of its own steps."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.planner.engine_curve import Cluster
from recipe.partial_rollout.planner.samples import TrainedBatch, of_run
from recipe.partial_rollout.planner.separate import SeparateSimulation, TrainerRate, WeightUpdate
from recipe.partial_rollout.records.run import RunRecord
from recipe.partial_rollout.records.trace import PhaseName
from recipe.partial_rollout.tools.report.lanes import seconds, within


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """From batch to batch: entry i is what happened between the batches of steps i and i + 1; seconds."""

    whole_s: list[float]
    """without validations and the stops for checkpoints, which the model does not know"""
    train_s: list[float]
    """in which the trainer worked on the batch"""
    trained_tokens: list[int]
    """of the batch that it worked on"""
    update: WeightUpdate
    """means"""


def measured_steps(run: RunRecord) -> MeasuredSteps:
    """The steps of ``run``, which has at least two."""
    spans = {name: [(phase.start, phase.end) for phase in run.phases if phase.name == name] for name in PhaseName}
    taken = [round_.phase.end for round_ in run.rounds]
    between = list(itertools.pairwise(taken))

    def inside(*names: PhaseName) -> list[float]:
        found = [span for name in names for span in spans[name]]
        return [seconds(within(found, *step)) for step in between]

    unknown, waited = inside(PhaseName.VALIDATE, PhaseName.FLUSH), inside(PhaseName.WAIT)
    staged, held = inside(PhaseName.STAGE), inside(PhaseName.HOLD)
    whole = [seconds([step]) - left_out for step, left_out in zip(between, unknown, strict=True)]
    return MeasuredSteps(
        whole_s=whole,
        train_s=[max(0.0, all_s - sum(rest)) for all_s, *rest in zip(whole, waited, staged, held, strict=True)],
        trained_tokens=[sum(step.lengths) for step in run.steps[:-1]],
        update=WeightUpdate(statistics.fmean(staged), statistics.fmean(held)),
    )


def trainer_of(steps: MeasuredSteps) -> Callable[[int], float]:
    """Seconds that the trainer takes for a batch of so many tokens, by least squares."""
    tokens = np.array(steps.trained_tokens, dtype=float)
    (fixed_s, token_s), _ = nnls(np.stack([np.ones_like(tokens), tokens], axis=1), np.array(steps.train_s))
    rate = TrainerRate(float(fixed_s), float(token_s))
    return lambda batch_tokens: rate.seconds(batch_tokens, devices=1)


def play_separate(
    run: RunRecord, admission: Admission, scheduling: Scheduling, cluster: Cluster, groups: int | None
) -> tuple[float, float, list[TrainedBatch]]:
    """Seconds from the first batch to the last, measured and simulated, and the simulated batches after the first.

    Args:
        groups: in the data; None: endless.
    """
    measured = measured_steps(run)
    simulation = SeparateSimulation(
        admission, scheduling, cluster, of_run(run), trainer_of(measured), measured.update, seed=None, groups=groups
    )
    first, *later = simulation.steps(len(run.steps))
    # A simulated step begins with the wait for its batch, a measured one ends with that for the next.
    simulated_s = sum(step.seconds for step in (first, *later[:-1])) - first.waiting_s + later[-1].waiting_s
    return sum(measured.whole_s), simulated_s, [step.batch for step in later]
