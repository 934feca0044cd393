"""Figures of the manager's state: gauges and totals, the length bias, and the unfinished samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from recipe.partial_rollout.manager.groups import Counters, Groups
from recipe.partial_rollout.manager.messages import Standing
from recipe.partial_rollout.manager.state import ManagerState
from recipe.partial_rollout.manager.types import Sample


def length_bias(groups: Groups, samples_per_group: int) -> tuple[float, float]:
    """Mean response length (tokens) of the groups trained, and of as many groups in dispatch order.

    Their ratio is 1 if training is unbiased. The batch that the trainer has counts as trained. A group that has not ended
    counts with its length so far. (nan, nan) before the first batch.
    """
    counters, (taken, dispatched) = groups.counters, _batch_tokens(groups)
    samples = (counters.trained_groups + len(groups.taken)) * samples_per_group
    if not samples:
        return float("nan"), float("nan")
    earlier = groups.lengths.total_of_first(counters.trained_groups, _so_far(groups))
    return (counters.trained_tokens + taken) / samples, (earlier + dispatched) / samples


def batch_bias(groups: Groups) -> float:
    """Mean response length of the batch that the trainer has, over that of the batch that dispatch order would give.

    The latter are as many groups that follow the first ``trained_groups`` dispatched. One that has not ended counts with
    its length so far. 1 in every step if prompts train in the order of the data; nan if none of the latter has a token.
    """
    taken, dispatched = _batch_tokens(groups)
    return taken / dispatched if dispatched else float("nan")


def _batch_tokens(groups: Groups) -> tuple[int, int]:
    """Tokens of the batch that the trainer has, and of the one that dispatch order would give; see ``batch_bias``."""
    taken = groups.taken.values()
    dispatched = groups.lengths.total_of_next(len(taken), groups.counters.trained_groups, _so_far(groups))
    return sum(group.finished_length for group in taken), dispatched


def _so_far(groups: Groups) -> Callable[[int], int]:
    """Response tokens of a group in flight, by its dispatch order."""
    return lambda order: sum(sample.length for sample in groups.by_order[order].samples)


def gauges(state: ManagerState, unfinished_samples: int, samples_per_group: int) -> dict[str, float]:
    """Gauges and totals without the ``partial_rollout/`` prefix; groups and samples are counts, lengths are tokens.

    What is not defined yet is left out: SwanLab gives up a chart whose first value is nan.
    """
    groups, counters = state.groups, state.groups.counters
    trained, dispatched = length_bias(groups, samples_per_group)
    figures = {
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
        "length/trained_mean": trained,
        "length/dispatched_mean": dispatched,
        "length/bias": trained / dispatched if dispatched else float("nan"),
        "lost_samples": groups.lost * samples_per_group,
        "length/batch_bias": batch_bias(groups) if groups.taken else float("nan"),
    }
    return {name: figure for name, figure in figures.items() if not math.isnan(figure)}


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
