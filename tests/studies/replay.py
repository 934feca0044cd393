"""``python -m tests.studies.replay RUN...``: how far the planner's forecasts are from finished runs.

A run is replayed with its own lengths, in the order of its data, on a curve fitted to its own calls. Any remaining
difference is the simulation's: how rounds fill, end and carry over, and what the model leaves out. Exit code 1: a forecast
is off by more than ``TOLERANCE``; 2: a run cannot be replayed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import DictConfig, OmegaConf

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.tools.planner.engine_curve import Cluster, fit
from recipe.partial_rollout.tools.planner.lengths import LengthTrace
from recipe.partial_rollout.tools.planner.rounds import Simulation, baseline
from recipe.partial_rollout.tools.run_record import RunRecord, load_run
from recipe.partial_rollout.tools.table import Table

TOLERANCE = 0.15
"""largest relative error of a forecast"""


@dataclass(frozen=True, slots=True)
class Replay:
    """A run and its forecast; milliseconds of rollout per 1,000 trained tokens, staleness in versions."""

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
        ValueError: it had separate placement, dynamic sampling, tools, or keys that have gone since; or no ``config.yaml``
            says how it was scheduled.
        ValueError: its calls show no engine curve.
    """
    if run.settings.separate:
        raise ValueError(f"{run.directory}: placement=separate: the simulation plays engines and trainer in turns")
    path = Path(run.directory) / "config.yaml"
    if not path.exists():
        raise ValueError(f"{path} is missing: it says how the run was scheduled")
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    # Keys that did not exist yet at the time of the run have their defaults.
    settings = PartialRolloutConfig.from_config(config)
    if not settings.enable:
        settings = baseline(settings)
    elif settings.group_filter is not None:
        raise ValueError(f"{path}: algorithm.filter_groups.enable=True: the trace lacks the groups it filtered")
    curve = fit(run.calls)
    cluster = Cluster(curve, run.settings.replicas, settings.slots_per_replica, settings.resume_kv == "keep")
    # If the run did not drain, its groups repeat past their end, so that the last rounds are as full as all others.
    groups = len(run.trained_groups) if settings.drain else None
    simulation = Simulation(settings, cluster, LengthTrace.of_run(run), seed=None, groups=groups)
    played, steps = list(simulation.rounds(len(run.steps)))[1:], run.steps[1:]
    measured_s = sum(step.round.phase.seconds for step in steps)
    forecast_s = sum(round_.seconds for round_ in played)
    ages = np.concatenate([round_.staleness.ravel() for round_ in played])
    measured = np.array([age for step in steps for age in step.staleness])
    return Replay(
        name="/".join(Path(run.directory).absolute().parts[-2:]),
        measured_ms=1e6 * measured_s / sum(group.tokens for step in steps for group in step.round.trained),
        forecast_ms=1e6 * forecast_s / sum(round_.tokens for round_ in played),
        measured_staleness=float(measured.mean()),
        forecast_staleness=float(ages.mean()),
        measured_staleness_max=int(measured.max()),
        forecast_staleness_max=int(ages.max()),
    )


def replay_table(replays: list[Replay]) -> Table:
    """Measured and forecast figures, a row for each run."""
    columns = (
        ("run", lambda r: r.name),
        ("ms per 1,000 tokens", lambda r: f"{r.measured_ms:.0f}"),
        ("forecast", lambda r: f"{r.forecast_ms:.0f}"),
        ("ratio", lambda r: f"{r.ratio:.2f}"),
        ("staleness mean / max", lambda r: f"{r.measured_staleness:.2f} / {r.measured_staleness_max}"),
        ("forecast", lambda r: f"{r.forecast_staleness:.2f} / {r.forecast_staleness_max}"),
    )
    return Table.of("Runs, and what the simulation says of them", replays, columns)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; the exit code of the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.studies.replay", description="Play finished runs again.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a finished run")
    try:
        replays = [replay(load_run(directory)) for directory in parser.parse_args(arguments).runs]
    except ValueError as error:
        parser.error(str(error))
    print(replay_table(replays).console())
    return int(any(abs(each.ratio - 1) > TOLERANCE for each in replays))


if __name__ == "__main__":
    sys.exit(main())
