"""Loads one run directory.

A step counts when it has both its round (`trace.jsonl`) and its timers (`metrics.jsonl`): a run that crashed between
the two has not trained that step. Where a resumed run repeats steps, the last attempt counts. A warning names whatever
is left out.
"""

from pathlib import Path

from recipe.partial_rollout.records.fields import RunRecordError, read_lines, read_object
from recipe.partial_rollout.records.parts import Arm, Phase, Probe, RunRecord, RunSettings, Step
from recipe.partial_rollout.records.round import Round

CLOCK_TOLERANCE = 0.05
"""verl's rollout timer and the trace may differ by this share before the report warns."""


def load_run(directory: Path) -> RunRecord:
    if not directory.is_dir():
        raise RunRecordError(
            f"{directory}: no such directory; give the directory that a run wrote (trainer.default_local_dir)"
        )
    settings = _read_settings(directory / "run.json")
    rounds, probes, phases, warnings = _read_trace(directory / "trace.jsonl", settings)
    resumed = sorted(directory.glob("metrics_from_*.jsonl"), key=lambda path: path.stat().st_mtime)
    metrics, metric_warnings = _read_metrics([directory / "metrics.jsonl", *resumed])
    steps, join_warnings = _join(directory, rounds, metrics)
    warnings += metric_warnings + join_warnings + _clock_warnings(directory, steps)
    if not settings.complete:
        warnings.insert(0, f"{directory}: the run did not finish (run.json says complete: false)")
    return RunRecord(str(directory), settings, steps, probes, phases, warnings)


def _read_settings(path: Path) -> RunSettings:
    fields = read_object(path)
    arm = fields.text("arm")
    if arm not in list(Arm):
        raise RunRecordError(f"{path}: 'arm' is {arm!r}; it should be one of {', '.join(Arm)}")
    return RunSettings(
        arm=Arm(arm),
        experiment=fields.text("experiment"),
        batch_groups=fields.integer("batch_groups", least=1),
        samples_per_group=fields.integer("samples_per_group", least=1),
        replicas=fields.integer("replicas", least=1),
        slots_per_replica=fields.integer("slots_per_replica", least=1),
        max_staleness=fields.optional_integer("max_staleness"),
        mode=fields.text("mode"),
        policy=fields.text("policy"),
        verl=fields.text("verl"),
        vllm=fields.text("vllm"),
        complete=fields.flag("complete"),
    )


def _read_trace(path: Path, settings: RunSettings) -> tuple[list[Round], list[Probe], list[Phase], list[str]]:
    lines, warnings = read_lines(path)
    rounds: dict[int, Round] = {}
    probes: list[Probe] = []
    phases: list[Phase] = []
    repeated: set[int] = set()
    for line in lines:
        match line.text("event"):
            case "probe":
                probes.append(Probe(line.number("tokens_per_s"), line.integer("concurrency")))
            case "phase":
                phases.append(Phase(line.integer("step"), line.text("name"), *line.span()))
            case "round":
                round_ = Round.from_json(line, settings.replicas)
                superseded = {step for step in rounds if step >= round_.step}
                repeated |= superseded
                rounds = {step: kept for step, kept in rounds.items() if step not in superseded}
                rounds[round_.step] = round_
    if repeated:
        warnings.append(f"{path}: steps {_ranges(repeated)} were begun again (a resumed run); the last attempt counts")
    return list(rounds.values()), probes, phases, warnings


def _read_metrics(paths: list[Path]) -> tuple[dict[int, dict[str, float]], list[str]]:
    """Metrics by step; later files, of resumed runs, override earlier ones. verl logs NaN as null: left out."""
    metrics: dict[int, dict[str, float]] = {}
    warnings: list[str] = []
    for path in paths:
        lines, cut = read_lines(path)
        warnings += cut
        for line in lines:
            data = line.values.get("data")
            if not isinstance(data, dict):
                raise RunRecordError(
                    f"{line.place}: 'data' is missing; it should hold the metrics that verl's file logger writes"
                )
            numbers = {key: float(value) for key, value in data.items() if isinstance(value, int | float)}
            metrics.setdefault(line.integer("step"), {}).update(numbers)
    return metrics, warnings


def _join(directory: Path, rounds: list[Round], metrics: dict[int, dict[str, float]]) -> tuple[list[Step], list[str]]:
    timed = {step for step, values in metrics.items() if "timing_s/step" in values}
    steps = [Step(round_, metrics[round_.step]) for round_ in rounds if round_.step in timed]
    if not steps:
        raise RunRecordError(
            f"{directory}: no step has both a round in trace.jsonl and timing_s/step in metrics.jsonl; "
            "let the run finish a step, and keep 'file' in trainer.logger"
        )
    traced = {round_.step for round_ in rounds}
    warnings = []
    if untimed := traced - timed:
        warnings.append(f"{directory}: steps {_ranges(untimed)} have a round but no timers in metrics.jsonl; left out")
    if untraced := timed - traced:
        warnings.append(f"{directory}: steps {_ranges(untraced)} have timers but no round in trace.jsonl; left out")
    return steps, warnings


def _clock_warnings(directory: Path, steps: list[Step]) -> list[str]:
    timer = sum(step.seconds("gen") for step in steps)
    traced = sum(step.round.phase.seconds for step in steps)
    if abs(timer - traced) <= CLOCK_TOLERANCE * max(timer, traced):
        return []
    return [f"{directory}: timing_s/gen adds up to {timer:,.1f} s but the rounds of trace.jsonl to {traced:,.1f} s"]


def _ranges(numbers: set[int]) -> str:
    """{1, 2, 3, 7} as '1-3, 7'."""
    ends: list[list[int]] = []
    for number in sorted(numbers):
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in ends)
