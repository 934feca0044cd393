"""Replays a finished run: its own lengths, in the order of its data, on a curve fitted to its own calls.

Any remaining difference is the simulation's: how rounds fill, end and carry over, and what the model leaves out.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import DictConfig, OmegaConf
from scipy.optimize import nnls

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.records.run_log import PhaseName
from recipe.partial_rollout.tools.lengths import of_run
from recipe.partial_rollout.tools.planner.engine_curve import Cluster, fit
from recipe.partial_rollout.tools.planner.rounds import SeparateTrainer, Simulation, WeightUpdate, baseline
from recipe.partial_rollout.tools.planner.samples import TrainedBatch
from recipe.partial_rollout.tools.report.lanes import seconds, within
from recipe.partial_rollout.tools.run_record import RunRecord
from recipe.partial_rollout.tools.table import Table


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
    return lambda batch_tokens: float(fixed_s) + float(token_s) * batch_tokens


def play_separate(
    run: RunRecord, settings: PartialRolloutConfig, cluster: Cluster, groups: int | None
) -> tuple[float, float, list[TrainedBatch]]:
    """Seconds from the first batch to the last, measured and simulated, and the simulated batches after the first.

    Args:
        groups: in the data; None: endless.
    """
    measured = measured_steps(run)
    trainer = SeparateTrainer(trainer_of(measured), measured.update)
    simulation = Simulation(settings, cluster, of_run(run), trainer, seed=None, groups=groups)
    first, *later = simulation.rounds(len(run.steps))
    # A simulated step begins with the wait for its batch, a measured one ends with that for the next.
    simulated_s = sum(step.seconds for step in (first, *later[:-1])) - first.waiting_s + later[-1].waiting_s
    return sum(measured.whole_s), simulated_s, [step.batch for step in later]


@dataclass(frozen=True, slots=True)
class Replay:
    """A run and its forecast; milliseconds per 1,000 trained tokens, of rollout or, under separate placement, of wall time;
    staleness in versions."""

    name: str
    measured_ms: float
    forecast_ms: float
    measured_staleness: float
    forecast_staleness: float
    measured_staleness_max: int
    forecast_staleness_max: int

    @property
    def ratio(self) -> float:
        """Forecast over measured time."""
        return self.forecast_ms / self.measured_ms


def replay(run: RunRecord) -> Replay:
    """Replay all rounds of ``run``, whose overlap must be fixed; figures exclude the first, in which engines compile.

    Raises:
        ValueError: its directory has no ``config.yaml`` that says how it was scheduled.
        CurveError: its calls show no engine curve.
    """
    path = Path(run.directory) / "config.yaml"
    if not path.exists():
        raise ValueError(f"{path} is missing: it says how the run was scheduled")
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    # Keys that did not exist yet at the time of the run have their defaults.
    settings = PartialRolloutConfig.from_config(config)
    replicas = run.settings.replicas
    if not settings.enable:
        settings = baseline(settings)
    elif settings.group_filter is not None:
        raise ValueError(f"{path}: algorithm.filter_groups.enable=True: the trace lacks the groups it filtered")
    curve = fit(call for round_ in run.rounds for call in round_.phase.calls)
    release_after_s = settings.tools.release_after_s if settings.enable else 0.0
    cluster = Cluster(curve, replicas, settings.slots_per_replica, settings.resume_kv == "keep", release_after_s)
    # If the run did not drain, its groups repeat past their end, so that the last rounds are as full as all others.
    groups = len(run.trained_groups) if settings.drain else None
    if run.settings.separate:
        measured_s, forecast_s, batches = play_separate(run, settings, cluster, groups)
    else:
        simulation = Simulation(settings, cluster, of_run(run), seed=None, groups=groups)
        played = list(simulation.rounds(len(run.steps)))[1:]
        measured_s = sum(step.round.phase.seconds for step in run.steps[1:])
        forecast_s, batches = sum(round_.seconds for round_ in played), [round_.batch for round_ in played]
    steps = run.steps[1:]
    ages = np.concatenate([batch.staleness.ravel() for batch in batches])
    measured = np.array([age for step in steps for age in step.staleness])
    return Replay(
        name="/".join(Path(run.directory).absolute().parts[-2:]),
        measured_ms=1e6 * measured_s / sum(group.tokens for step in steps for group in step.round.trained),
        forecast_ms=1e6 * forecast_s / sum(int(batch.lengths.sum()) for batch in batches),
        measured_staleness=float(measured.mean()),
        forecast_staleness=float(ages.mean()),
        measured_staleness_max=int(measured.max()),
        forecast_staleness_max=int(ages.max()),
    )


def replay_table(replays: list[Replay]) -> Table:
    """Measured and forecast figures, a row for each run."""
    rows = [
        [
            r.name,
            f"{r.measured_ms:.0f}",
            f"{r.forecast_ms:.0f}",
            f"{r.ratio:.2f}",
            f"{r.measured_staleness:.2f} / {r.measured_staleness_max}",
            f"{r.forecast_staleness:.2f} / {r.forecast_staleness_max}",
        ]
        for r in replays
    ]
    header = ["run", "ms per 1,000 tokens", "forecast", "ratio", "staleness mean / max", "forecast"]
    return Table("Runs, and what the simulation says of them", header, rows)
