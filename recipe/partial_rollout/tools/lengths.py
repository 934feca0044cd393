"""Response lengths for a forecast: a run's own, or lognormal ones."""

from __future__ import annotations

import numpy as np

from recipe.partial_rollout.tools.planner.samples import LengthTrace, Waits
from recipe.partial_rollout.tools.reading.columns import CallColumns
from recipe.partial_rollout.tools.run_record import RunRecord


def of_run(run: RunRecord) -> LengthTrace:
    """Generated tokens of the trained samples of ``run``, in dispatch order; prompts as long as its first ones."""
    groups = sorted(run.trained_groups, key=lambda group: group.order)
    calls = next((round_.phase.calls for round_ in run.rounds if round_.phase.calls), ())
    # The first call of each sample; a trace that names none has single turns.
    prompts = {call.sample or at: call.context_tokens for at, call in reversed(list(enumerate(calls)))}
    # What tools wrote is part of a response, and is not decoded.
    generated = [np.array(group.lengths) * (group.tokens / max(1, sum(group.lengths))) for group in groups]
    lengths = np.maximum(1, np.rint(generated).astype(int))
    every = CallColumns.joined(round_.phase.calls for round_ in run.rounds)
    return LengthTrace(
        lengths, round(float(np.median(list(prompts.values())))) if prompts else 0, _waits(every, lengths)
    )


def _waits(calls: CallColumns, lengths: np.ndarray) -> tuple[Waits, ...]:
    """For each of ``lengths`` the waits of a conversation among ``calls``: that of the same rank by tokens.

    Ranks, because noPR's calls do not say which sample of which group they belong to.
    """
    left, begin, back = calls.between_turns()
    waited = dict(zip(left.tolist(), (back - begin).tolist(), strict=True))
    if not waited:
        return ()
    made: dict[str, int] = {}
    waits: dict[str, list[tuple[int, float]]] = {}
    tokens, names = (calls.column(name).tolist() for name in ("tokens", "sample"))
    for at in np.argsort(calls.column("start")).tolist():
        name = names[at]
        made[name] = made.get(name, 0) + tokens[at]
        if at in waited:
            waits.setdefault(name, []).append((made[name], waited[at]))
    ranked = sorted(made, key=made.__getitem__)
    found: list[Waits] = [()] * lengths.size
    for rank, at in enumerate(np.argsort(lengths.ravel(), kind="stable").tolist()):
        name = ranked[rank * len(ranked) // lengths.size]
        found[at] = tuple((by / max(1, made[name]), seconds) for by, seconds in waits.get(name, ()))
    return tuple(found)


def lognormal(
    *,
    median: float,
    mean: float,
    cap: int,
    samples_per_group: int,
    groups: int = 4096,
    prompt_tokens: int = 0,
) -> LengthTrace:
    """Lognormal lengths cut off at ``cap``; within a group their logarithms have a correlation of .5.

    Raises:
        ValueError: the mean is not above the median: a lognormal distribution has a long right tail.
    """
    if not 0 < median < mean:
        raise ValueError(f"lognormal lengths need 0 < median < mean, not median {median:g} and mean {mean:g}")
    sigma = np.sqrt(2 * np.log(mean / median))
    rng = np.random.default_rng(0)
    shared = rng.standard_normal((groups, 1)) * np.sqrt(0.5)
    own = rng.standard_normal((groups, samples_per_group)) * np.sqrt(0.5)
    drawn = median * np.exp(sigma * (shared + own))
    return LengthTrace(np.clip(np.rint(drawn), 1, cap).astype(int), prompt_tokens)
