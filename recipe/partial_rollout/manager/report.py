"""Figures of the manager's state: gauges and totals, the length bias, and the unfinished samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from recipe.partial_rollout.manager.groups import Counters, Groups
from recipe.partial_rollout.manager.messages import Standing
from recipe.partial_rollout.manager.state import ManagerState
from recipe.partial_rollout.manager.types import Sample


def length_bias(groups: Groups) -> dict[str, float]:
    """Mean response length of what was trained over that of as many groups in dispatch order, which short ones overtake.

    ``length/bias`` is of the whole run, ``length/batch_bias`` of the batch that the trainer has, which counts as trained in
    both. Both are 1 if prompts train in the order of the data. A group that has not ended counts with its length so far. A
    figure is missing before the first batch, and while none of the groups below its line has a token.
    """
    counters, taken = groups.counters, groups.taken.values()
    batch = sum(group.finished_length for group in taken)
    so_far = _so_far(groups)
    in_order = groups.lengths.total_of_next(len(taken), counters.trained_groups, so_far)
    first = groups.lengths.total_of_first(counters.trained_groups, so_far) + in_order
    biases = {}
    if first:
        biases["length/bias"] = (counters.trained_tokens + batch) / first
    if in_order:
        biases["length/batch_bias"] = batch / in_order
    return biases


def _so_far(groups: Groups) -> Callable[[int], int]:
    """Response tokens of a group in flight, by its dispatch order."""
    return lambda order: sum(sample.length for sample in groups.by_order[order].samples)


def gauges(state: ManagerState, unfinished_samples: int, samples_per_group: int) -> dict[str, float]:
    """Gauges and totals without the ``partial_rollout/`` prefix; groups and samples are counts.

    What is not defined yet is left out: SwanLab gives up a chart whose first value is nan.
    """
    groups, counters = state.groups, state.groups.counters
    return {
        "inflight/groups": groups.in_flight,
        "inflight/samples": unfinished_samples,
        "buffer/carried_groups": groups.carried,
        "buffer/ready_groups": len(groups.ready_queue),
        "buffer/interrupted_total": counters.interrupted,
        "buffer/resumed_total": counters.resumed,
        "admission/admitted_total": counters.admitted_groups,
        "admission/paced": state.paced,
        "failures/failed_total": counters.failed,
        "failures/retried_total": counters.retried,
        "failures/masked_total": counters.masked,
        "lost_samples": groups.lost * samples_per_group,
        **length_bias(groups),
    }


def filter_gauges(counters: Counters) -> dict[str, float]:
    """Totals of dynamic sampling: groups and tokens consumed untrained, and groups of equal score trained nevertheless."""
    return {
        "filter/groups_total": counters.filtered_groups,
        "filter/tokens_total": counters.filtered_tokens,
        "filter/spared_total": counters.spared_groups,
    }


def standing(state: ManagerState, running: int) -> Standing:
    """How far the round is; constant time but for the few birth versions in flight. ``running``: slots in use."""
    groups = state.groups
    births = [birth for birth in groups.unfinished if birth is not None] + list(groups.ready_queue.by_birth)
    return Standing(len(groups.ready_queue), running, state.version - min(births, default=state.version))


def unfinished_report(samples: Iterable[Sample], now: float, limit: int) -> str:
    """One line for an error: the unfinished samples, longest unchanged first; ``now`` is the manager's clock."""
    live = sorted(samples, key=lambda sample: sample.since)
    rows = [
        f"{s.id} {s.state} on {s.worker or 'no worker'} for {now - s.since:.0f} s ({s.cached_tokens} tokens cached"
        + (f"; failed {s.failures} times, last: {s.error})" if s.error is not None else ")")
        for s in live[:limit]
    ]
    more = f" and {len(live) - limit} more" if len(live) > limit else ""
    return f"{len(live)} unfinished samples: " + "; ".join(rows) + more
