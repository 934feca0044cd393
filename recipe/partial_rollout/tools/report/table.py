"""The report as text: markdown for the file, aligned columns for the console."""

from collections.abc import Callable, Sequence

from recipe.partial_rollout.tools.report import units
from recipe.partial_rollout.tools.report.comparison import Comparison, Side
from recipe.partial_rollout.tools.report.summary import LengthBias, Spread, Summary, Wait, full_tokens_per_s, ratio
from recipe.partial_rollout.tools.table import Table

PHASE_LABELS = {
    "gen": "rollout",
    "reward": "reward",
    "old_log_prob": "log-probs before the update",
    "adv": "advantage",
    "update_actor": "actor update",
    "update_weights": "weight sync",
    "save_checkpoint": "checkpoint",
    "other": "other",
    "testing": "validation (outside the step)",
}


def report_markdown(comparison: Comparison, findings: Sequence[str], pictures: Sequence[str]) -> str:
    """`findings` are sentences; `pictures` are file names beside the report, the first stands above the tables."""
    parts = ["# Partial rollout: two runs compared", *findings, _picture(pictures[0])]
    parts += [table.markdown() for table in tables(comparison)]
    if comparison.warnings:
        parts.append("## Warnings\n\n" + "\n".join(f"- {warning}" for warning in comparison.warnings))
    parts += [_picture(name) for name in pictures[1:]]
    return "\n\n".join(parts) + "\n"


def _picture(name: str) -> str:
    return f"![{name.removesuffix('.png')}]({name})"


def report_console(comparison: Comparison, findings: Sequence[str]) -> str:
    parts = ["\n".join(findings), *(table.console() for table in tables(comparison))]
    if comparison.warnings:
        parts.append("\n".join(f"warning: {warning}" for warning in comparison.warnings))
    return "\n\n".join(parts)


def tables(comparison: Comparison) -> list[Table]:
    return [_figures(comparison), _phases(comparison), _work(comparison), _settings(comparison)]


def _figures(comparison: Comparison) -> Table:
    base, other = comparison.sides
    rows = []
    for label, show, ratio_name in FIGURE_ROWS:
        against = units.decimal(comparison.ratios[ratio_name]) if ratio_name else ""
        rows.append([label, show(base.summary), show(other.summary), against])
    kept_full = [units.count(full_tokens_per_s([side.run])) for side in comparison.sides]
    rows.append(["tokens/s when kept full", *kept_full, ""])
    return Table("Figures", ["", base.name, other.name, f"{other.name} / {base.name}"], rows)


def _spread(spread: Spread | None) -> str:
    return f"{spread.mean:.2f} / {spread.p95:.0f} / {spread.max:.0f}" if spread else units.UNKNOWN


def _wait(wait: Wait | None) -> str:
    return f"{units.seconds(wait.median)} / {units.seconds(wait.max)}" if wait else units.UNKNOWN


def _bias(bias: LengthBias | None) -> str:
    if bias is None:
        return units.UNKNOWN
    return f"{bias.ratio:.2f}" + (f" ({bias.unfinished_groups} unfinished)" if bias.unfinished_groups else "")


def _kilotoken(seconds: float, summary: Summary) -> str:
    return units.seconds(ratio(1000 * seconds, summary.trained_tokens))


FIGURE_ROWS: tuple[tuple[str, Callable[[Summary], str], str | None], ...] = (
    ("steps", lambda s: units.count(s.steps), None),
    ("trained groups", lambda s: units.count(s.trained_groups), None),
    ("trained tokens", lambda s: units.count(s.trained_tokens), "trained_tokens"),
    ("decoded tokens", lambda s: units.count(s.decoded_tokens), "decoded_tokens"),
    ("rollout per 1,000 trained tokens", lambda s: _kilotoken(s.rollout_s, s), "rollout_s_per_trained_token"),
    ("training per 1,000 trained tokens", lambda s: _kilotoken(s.train_s, s), "train_s_per_trained_token"),
    ("step per 1,000 trained tokens", lambda s: _kilotoken(s.step_s, s), "step_s_per_trained_token"),
    ("decoded tokens/s in rollout", lambda s: units.count(s.decoded_tokens_per_s), "decoded_tokens_per_s"),
    ("rollout efficiency", lambda s: units.share(s.efficiency), "efficiency"),
    ("empty slots in rollout (bubble)", lambda s: units.share(s.bubble_fraction), None),
    ("staleness, mean / p95 / max", lambda s: _spread(s.staleness), None),
    ("off-policy tokens", lambda s: units.share(s.off_policy_token_fraction), None),
    ("segments a sample, mean / p95 / max", lambda s: _spread(s.segments_per_sample), None),
    ("mean trained length", lambda s: units.count(s.mean_trained_length), "mean_trained_length"),
    ("trained / dispatched length, step 1", lambda s: _bias(s.length_bias_first["step_1"]), None),
    ("trained / dispatched length, steps 1-5", lambda s: _bias(s.length_bias_first["steps_1_to_5"]), None),
    ("trained / dispatched length, run", lambda s: _bias(s.length_bias), None),
    ("reward, first 3 steps", lambda s: units.precise(s.reward_first), None),
    ("reward, last 3 steps", lambda s: units.precise(s.reward_last), None),
    ("interrupt, median / max", lambda s: _wait(s.interrupt_s), None),
    ("resume, median / max", lambda s: _wait(s.resume_s), None),
    ("carried groups a round, mean / p95 / max", lambda s: _spread(s.carried_groups), None),
    ("lost samples", lambda s: units.count(s.lost_samples), None),
)
"""Label, how a run's summary shows it, and which ratio stands beside it."""


def _phases(comparison: Comparison) -> Table:
    base, other = comparison.sides
    header = ["", base.name, "of step", other.name, "of step", f"{other.name} / {base.name}"]
    rows = []
    for name, label in PHASE_LABELS.items():
        spent = [side.summary.phases_s[name] for side in comparison.sides]
        if any(spent):
            cells = [_share_of_step(name, seconds, side) for seconds, side in zip(spent, comparison.sides, strict=True)]
            rows.append([label, *cells[0], *cells[1], units.decimal(ratio(spent[1], spent[0]))])
    steps = [side.summary.step_s for side in comparison.sides]
    total = ["step", units.seconds(steps[0]), "", units.seconds(steps[1]), "", units.decimal(ratio(steps[1], steps[0]))]
    return Table("Time per phase, whole run", header, [*rows, total])


def _share_of_step(name: str, seconds: float, side: Side) -> tuple[str, str]:
    inside = name != "testing"
    return units.seconds(seconds), units.share(ratio(seconds, side.summary.step_s)) if inside else ""


def _work(comparison: Comparison) -> Table:
    work = comparison.equal_work
    answers = {
        "equally many trained groups": work.trained_groups_equal,
        "the same prompts in the same epochs": work.same_prompts,
        **{f"{name}: each prompt once in an epoch": once for name, once in work.each_prompt_once.items()},
    }
    rows = [[label, "yes" if yes else "NO"] for label, yes in answers.items()]
    return Table("Equal work", ["", "holds"], rows + [[f"- {difference}", ""] for difference in work.differences])


def _settings(comparison: Comparison) -> Table:
    names = [
        "experiment", "arm", "mode", "policy", "max_staleness", "batch_groups", "samples_per_group", "replicas",
        "slots_per_replica", "full_concurrency", "verl", "vllm", "complete",
    ]  # fmt: skip
    rows = [[name, *(str(getattr(side.run.settings, name)) for side in comparison.sides)] for name in names]
    return Table("Runs", ["", *(side.name for side in comparison.sides)], rows)
