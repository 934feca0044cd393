"""The states of samples: a table of verbs, and the class that alone writes ``Sample.state``.

Each verb checks the present state first, so a message that comes twice or late is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from recipe.partial_rollout.manager.groups import Counters
from recipe.partial_rollout.manager.types import Sample, SampleState

_BY_JOURNAL = None
"""INTERRUPTED if the sample has a journal, from which any worker may continue; else WAITING"""

VERBS: dict[str, tuple[Sequence[SampleState], SampleState | None]] = {
    "admit": ((SampleState.WAITING,), _BY_JOURNAL),
    "claim": ((SampleState.WAITING, SampleState.INTERRUPTED), SampleState.RUNNING),
    "leave": ((SampleState.RUNNING,), SampleState.AWAY),
    "interrupt": ((SampleState.RUNNING, SampleState.AWAY), SampleState.INTERRUPTED),
    "finish": ((SampleState.RUNNING, SampleState.AWAY), SampleState.FINISHED),
    "fail": ((SampleState.RUNNING, SampleState.AWAY), SampleState.FAILED),
    "mask": ((SampleState.FAILED,), SampleState.FINISHED),
    "retry": ((SampleState.FAILED,), _BY_JOURNAL),
    "release_worker": ((SampleState.RUNNING, SampleState.INTERRUPTED, SampleState.AWAY), _BY_JOURNAL),
}
"""by verb: the states that a sample may leave by it, and the one that it enters"""


class Samples:
    """The samples that have not finished.

    >>> from recipe.partial_rollout.manager.types import Prompt, PromptGroup
    >>> samples = Samples(Counters(), clock=lambda: 0.0)
    >>> samples.unfinished["0/0#0"] = Sample("0/0#0", PromptGroup(Prompt("0/0", {}), order=0))
    >>> [str(samples.move("0/0#0", verb).state) for verb in ("claim", "leave", "interrupt")]
    ['running', 'away', 'interrupted']
    >>> samples.move("0/0#0", "finish")
    Traceback (most recent call last):
    RuntimeError: finish: sample 0/0#0 is interrupted, not running or away

    Args:
        counters: their seconds without a slot are counted here.
        clock: seconds; stamped on state changes for stall reports.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float]) -> None:
        self._counters = counters
        self._clock = clock
        self.unfinished: dict[str, Sample] = {}
        """by id"""

    def move(self, sample_id: str, verb: str) -> Sample:
        """Have a sample leave its state and enter another, as ``VERBS`` says; returns it.

        Raises:
            RuntimeError: ``verb`` does not leave its state, or it has finished.
        """
        leaves, enters = VERBS[verb]
        sample, now = self.in_state(sample_id, verb, leaves), self._clock()
        if sample.state is SampleState.AWAY:
            self._counters.away_s += now - sample.since
        if enters is None:
            enters = SampleState.INTERRUPTED if sample.has_journal else SampleState.WAITING
        sample.state, sample.since = enters, now
        return sample

    def in_state(self, sample_id: str, verb: str, states: Sequence[SampleState]) -> Sample:
        """The sample; RuntimeError, which names ``verb``, unless it is in one of ``states``."""
        sample = self.unfinished.get(sample_id)
        if sample is None or sample.state not in states:
            actual = "unknown or finished" if sample is None else sample.state
            raise RuntimeError(f"{verb}: sample {sample_id} is {actual}, not {' or '.join(states)}")
        return sample

    def report(self, limit: int = 8) -> str:
        """One line for an error: the unfinished samples, longest unchanged first."""
        live, now = sorted(self.unfinished.values(), key=lambda sample: sample.since), self._clock()
        rows = [
            f"{s.id} {s.state} on {s.worker or 'no worker'} for {now - s.since:.0f} s ({s.cached_tokens} tokens cached"
            + (f"; failed {s.failures} times, last: {s.error})" if s.error is not None else ")")
            for s in live[:limit]
        ]
        more = f" and {len(live) - limit} more" if len(live) > limit else ""
        return f"{len(live)} unfinished samples: " + "; ".join(rows) + more
