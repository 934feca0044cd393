"""What can be said of the manager's state: gauges and totals, the length bias, and who has not finished."""

from __future__ import annotations

from recipe.partial_rollout.manager.state import ManagerState


def length_bias(state: ManagerState, samples_per_group: int) -> tuple[float, float]:
    """Mean response length (tokens) of the groups trained, and of as many groups in dispatch order.

    Their ratio is 1 when training sees what was dispatched. A group that has not ended counts with its length so far.
    (nan, nan) before the first ``acknowledge``.
    """
    groups = state.counters.trained_groups
    if not groups:
        return float("nan"), float("nan")

    def so_far(order: int) -> int:
        return sum(sample.length for sample in state.by_order[order].samples)

    samples = groups * samples_per_group
    return state.counters.trained_tokens / samples, state.lengths.total_of_first(groups, so_far) / samples


def gauges(state: ManagerState, samples_per_group: int) -> dict[str, float]:
    """Groups and samples are counts, lengths are tokens; without the ``partial_rollout/`` prefix."""
    trained, dispatched = length_bias(state, samples_per_group)
    counters = state.counters
    return {
        "inflight/groups": len(state.groups),
        "inflight/samples": len(state.samples),
        "buffer/carried_groups": state.carried_groups,
        "buffer/ready_groups": len(state.ready),
        "buffer/interrupted_total": counters.interrupted,
        "buffer/resumed_total": counters.resumed,
        "admission/admitted_total": counters.admitted_groups,
        "admission/paced": state.paced,
        "failures/failed_total": counters.failed,
        "failures/retried_total": counters.retried,
        "failures/masked_total": counters.masked,
        "length/trained_mean": trained,
        "length/dispatched_mean": dispatched,
        "length/bias": trained / dispatched if dispatched else float("nan"),
        "lost_samples": state.lost_groups * samples_per_group,
    }


def filter_gauges(state: ManagerState) -> dict[str, float]:
    """Totals of dynamic sampling: groups and response tokens consumed untrained, and equal groups trained all the same."""
    counters = state.counters
    return {
        "filter/groups_total": counters.filtered_groups,
        "filter/tokens_total": counters.filtered_tokens,
        "filter/spared_total": counters.spared_groups,
    }


def unfinished_report(state: ManagerState, now: float, limit: int) -> str:
    """One line for an error: the unfinished samples, longest unchanged first; ``now`` as the manager's clock says."""
    live = sorted(state.samples.values(), key=lambda sample: sample.since)
    rows = [
        f"{s.id} {s.state} on {s.worker or 'no worker'} for {now - s.since:.0f} s ({s.cached_tokens} tokens cached"
        + (f"; failed {s.failures} times, last: {s.error})" if s.error is not None else ")")
        for s in live[:limit]
    ]
    more = f" and {len(live) - limit} more" if len(live) > limit else ""
    return f"{len(live)} unfinished samples: " + "; ".join(rows) + more
