"""One run, read back from its directory.

A step counts if it has both its round (``run.jsonl``) and its timers (``metrics.jsonl``): a run that crashed between the
two has not trained that step. If a resumed run repeats steps, the last attempt counts. A warning names everything that is
left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from recipe.partial_rollout.records.run_log import METRICS, Phase, RolloutPhase, Round, RunSettings, TrainedGroup
from recipe.partial_rollout.tools.reading.columns import CallColumns
from recipe.partial_rollout.tools.reading.lineage import Lineage
from recipe.partial_rollout.tools.reading.run_log import RunRecordError, iter_lines, read_log


class StepMetrics(Struct, frozen=True):
    """A line of verl's file logger: a training step (with ``training/global_step``), or the validation before the first."""

    step: int
    values: dict[str, Any] = msgspec.field(name="data")
    """metrics by verl's key; NaN, which verl logs as null, is left out"""


def read_metrics(path: Path, warnings: list[str]) -> list[StepMetrics]:
    """The lines in order.

    Args:
        warnings: gets a line if the last one is torn.

    Raises:
        RunRecordError: the file cannot be read, or a line holds no metrics; names it.
    """
    found = []
    for _, line in iter_lines(path, StepMetrics, warnings):
        numbers = {key: float(value) for key, value in line.values.items() if isinstance(value, int | float)}
        found.append(structs.replace(line, values=numbers))
    return found


@dataclass(frozen=True, slots=True)
class Step:
    """One training step: its round and what verl logged for it."""

    round: Round
    metrics: dict[str, float] = field(repr=False)
    decoding: RolloutPhase = field(repr=False)
    """engine calls between start and end of its round; under separate placement also parts of other rounds' calls"""

    @property
    def number(self) -> int:
        return self.round.step

    def seconds(self, phase: str) -> float:
        """verl's timer of that name; 0 if the step has no such phase."""
        return self.metrics.get(f"timing_s/{phase}", 0.0)

    @property
    def staleness(self) -> list[int]:
        """staleness of each trained sample of the step, in versions"""
        return [age for group in self.round.trained for age in group.staleness]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run. ``steps`` are ascending, at least one, each number once."""

    directory: str
    settings: RunSettings
    """of the process that began last"""
    complete: bool
    """whether the training reached its end"""
    cold: set[int]
    """the first step of each process"""
    steps: list[Step]
    phases: list[Phase]
    warnings: list[str]

    @property
    def rounds(self) -> list[Round]:
        return [step.round for step in self.steps]

    @property
    def start(self) -> float:
        """Unix seconds, of the first round."""
        return self.steps[0].round.phase.start

    @property
    def end(self) -> float:
        """Unix seconds at which the training of the last step ends."""
        last = self.steps[-1]
        trained = last.round.phase.end
        if not self.settings.separate:
            trained += last.seconds("step") - last.seconds("gen")
        return max([trained, *(phase.end for phase in self.phases if phase.step == last.number)])

    @property
    def warm_steps(self) -> list[Step]:
        """Steps without the first of each process, in which its engines compile; all if there are no others."""
        return [step for step in self.steps if step.number not in self.cold] or self.steps

    @property
    def only_cold(self) -> bool:
        """Whether each step is the first of a process."""
        return all(step.number in self.cold for step in self.steps)

    @property
    def calls(self) -> CallColumns:
        """Engine calls of all rounds; joined anew each time."""
        return CallColumns.joined(round_.phase.calls for round_ in self.rounds)

    @property
    def trained_groups(self) -> list[TrainedGroup]:
        """Groups in training order."""
        return [group for step in self.steps for group in step.round.trained]


def load_run(directory: Path) -> RunRecord:
    """The run in ``directory``.

    Raises:
        RunRecordError: a file is missing or cannot be read, or no step is complete; names the file and line.
    """
    if not directory.is_dir():
        raise RunRecordError(
            f"{directory}: no such directory; give the directory that a run wrote (trainer.default_local_dir)"
        )
    warnings: list[str] = []
    phases: list[Phase] = []
    cold = set[int]()
    rounds = Lineage[Round](keep=lambda round_: round_)
    for event in read_log(directory, warnings):
        rounds.take(event)
        if isinstance(event, Phase):
            phases.append(event)
        elif isinstance(event, RunSettings):
            cold = {step for step in cold if step <= event.resumed} | {event.resumed + 1}
    settings, complete = rounds.settings, rounds.ended is not None and rounds.ended.complete
    if undone := {round_.step for round_ in rounds.undone}:
        warnings.append(f"{directory}: {_span(undone)} trained again after a resume; the last attempt counts")
    # Later lines override earlier ones: a resumed run may validate a step again.
    metrics: dict[int, dict[str, float]] = {}
    for line in read_metrics(directory / METRICS, warnings):
        metrics.setdefault(line.step, {}).update(line.values)
    steps = _join(directory, rounds.standing(), metrics, warnings, separate=settings.separate)
    return RunRecord(str(directory), settings, complete, cold, steps, phases, warnings)


def _join(
    directory: Path,
    rounds: list[Round],
    metrics: dict[int, dict[str, float]],
    warnings: list[str],
    *,
    separate: bool,
) -> list[Step]:
    timed = {step for step, values in metrics.items() if "timing_s/step" in values}
    counted = [round_ for round_ in rounds if round_.step in timed]
    if not counted:
        raise RunRecordError(
            f"{directory}: no step has both a round in run.jsonl and timing_s/step in metrics.jsonl; "
            "let the run finish a step, and keep 'file' in trainer.logger"
        )
    traced = {round_.step for round_ in rounds}
    if untimed := traced - timed:
        warnings.append(f"{directory}: {_span(untimed)} with a round but no timers in metrics.jsonl, left out")
    if untraced := timed - traced:
        warnings.append(f"{directory}: {_span(untraced)} with timers but no round in run.jsonl, left out")
    phases = [round_.phase for round_ in counted]
    if separate:
        calls = CallColumns.joined(phase.calls for phase in phases)
        phases = [structs.replace(each, calls=calls.within(each.start, each.end)) for each in phases]
    return [Step(each, metrics[each.step], phase) for each, phase in zip(counted, phases, strict=True)]


def _span(steps: set[int]) -> str:
    return f"{len(steps)} steps ({min(steps)} to {max(steps)})"
