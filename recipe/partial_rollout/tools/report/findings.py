"""Sum the figures up in a few sentences; every sentence is computed."""

from recipe.partial_rollout.tools.report import units
from recipe.partial_rollout.tools.report.comparison import Comparison, Other, Side
from recipe.partial_rollout.tools.report.summary import ratio


def headline(comparison: Comparison) -> list[str]:
    """Return a sentence, without its full stop, for each run but the base: its time per trained token against the
    base's.

    If the base is the only run, return one sentence about it.
    """
    if not comparison.others:
        return [_alone(comparison.base)]
    return [_against(other, by_wall=comparison.separate) for other in comparison.others]


def _alone(side: Side) -> str:
    summary = side.summary
    spent = "waiting for batches" if side.run.settings.separate else "rollout"
    share = units.share(ratio(summary.phases_s["gen"], summary.step_s))
    return (
        f"{side.name} trained {summary.trained_groups:,} groups in {summary.steps:,} steps of "
        f"{units.seconds(ratio(summary.step_s, summary.steps))}, {share} of it {spent}"
    )


def _against(other: Other, *, by_wall: bool) -> str:
    base, ratios = other.base, other.ratios
    work = f"The same {other.summary.trained_groups:,} groups" if not other.differences else "Not equal work"
    if by_wall:
        return (
            f"{work}: per trained token, {other.name} took {_part(ratios['wall_s_per_trained_token'])} "
            f"{base.name}'s wall time, first batch to last"
        )
    cold = base.run.only_cold or other.run.only_cold
    return (
        f"{work}: per trained token, {other.name} took {_part(ratios['rollout_s_per_trained_token'])} "
        f"{base.name}'s rollout time and {_part(ratios['step_s_per_trained_token'])} its step time"
        + ("" if cold else ", without the first step after each start, whose engines are cold")
    )


def cautions(comparison: Comparison) -> list[str]:
    """Return what a reader must know before any number: unfinished runs, cold engines, unequal work,
    different settings or engines."""
    return [
        *(
            f"{side.name} is not complete: {side.summary.steps:,} steps so far"
            for side in comparison.sides
            if not side.run.complete
        ),
        *(
            f"{side.name} has only first steps after a start, whose engines are cold: its times say little"
            for side in comparison.sides
            if side.run.only_cold
        ),
        *("The work differs: " + "; ".join(other.differences) for other in comparison.others if other.differences),
        *(line[0].upper() + line[1:] for line in comparison.unlike),
    ]


def _part(value: float | None) -> str:
    """0.48 as '0.48 of', 1.2 as '1.20 times'."""
    return f"{units.decimal(value)} {'times' if value and value > 1 else 'of'}"


def findings(comparison: Comparison) -> list[str]:
    """Return the headline, then for each run but the base a sentence on its staleness and reward."""
    return [*(f"{line}." for line in headline(comparison)), *map(_cost, comparison.others)]


def _cost(other: Other) -> str:
    summary, base = other.summary, other.base
    parts = []
    if summary.staleness:
        parts.append(
            f"{other.name} trained samples at most {summary.staleness.max:.0f} versions old "
            f"(mean {summary.staleness.mean:.2f}), "
            f"{units.share(summary.off_policy_token_fraction)} of its tokens off-policy"
        )
    if base.summary.reward_last is not None and summary.reward_last is not None:
        parts.append(f"reward of the last three steps {summary.reward_last:.3f} against {base.summary.reward_last:.3f}")
    return "; ".join(parts) + "." if parts else f"{other.name} trained nothing."
