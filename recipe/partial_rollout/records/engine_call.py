"""One request to an engine: noted by a worker's client, kept in the trace, read by the planner and the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from recipe.partial_rollout.records.fields import RunRecordError


@dataclass(frozen=True, slots=True)
class EngineCall:
    """One request to a replica, as its client saw it.

    >>> call = EngineCall("10.0.0.1:8000", start=0.0, end=10.0, tokens=40, version=3, queued_s=2.0)
    >>> call.busy_from, call.tokens_within(0.0, 6.0)
    (2.0, 20.0)
    """

    replica: str | int
    """the load balancer's server id; in a trace, the replica's index"""
    start: float
    """unix seconds"""
    end: float
    tokens: int
    """decoded by this call"""
    version: int
    """policy version that the replica held; -1 if it did not say"""
    resumed_tokens: int = 0
    """prompt and response tokens that it prefilled again because the sample was interrupted; cached ones do not count"""
    context_tokens: int | None = None
    """prompt and response tokens that it started from; None if not noted"""
    queued_s: float = 0.0
    """seconds that it waited in the engine before it was first scheduled; 0 if the replica does not say"""
    sample: str = ""
    """the sample: ``epoch/position#index`` under PR, verl's request id under noPR; "" if not noted"""
    interrupted: bool = False
    """whether the engine aborted it, so that the sample resumes with another call"""

    @property
    def busy_from(self) -> float:
        """When it began to run in its engine (unix seconds); while it queues it makes no token and its slot is empty."""
        return min(self.start + self.queued_s, self.end)

    def tokens_within(self, start: float, end: float) -> float:
        """Tokens made between ``start`` and ``end`` (unix seconds), assuming that it made them evenly once it ran."""
        inside = min(self.end, end) - max(self.busy_from, start)
        return self.tokens * max(0.0, inside) / (self.end - self.busy_from) if self.end > self.busy_from else 0.0

    def to_json(self) -> list[Any]:
        """A row of the trace: the fields in their order."""
        return [
            self.replica,
            self.start,
            self.end,
            self.tokens,
            self.version,
            self.resumed_tokens,
            self.context_tokens,
            self.queued_s,
            self.sample,
            self.interrupted,
        ]

    @classmethod
    def from_json(cls, values: object, place: str, replicas: int | None) -> Self:
        """The inverse of ``to_json``; older traces have shorter rows.

        Args:
            place: of the row, for the error. replicas: number of the run's replicas; None if any index is valid.

        Raises:
            RunRecordError: ``values`` is not such a row, or names a replica that the run does not have.
        """
        match values:
            case [int(replica), int() | float() as start, int() | float() as end, int(tokens), int(version), *rest]:
                if replica < 0 or (replicas is not None and replica >= replicas):
                    raise RunRecordError(
                        f"{place}: a call names replica {replica}, but run.json says {replicas} replicas"
                    )
                if end < start:
                    raise RunRecordError(f"{place}: a call ends ({end}) before it starts ({start})")
                match rest:
                    case (
                        []
                        | [int()]
                        | [int(), int() | None]
                        | [int(), int() | None, int() | float()]
                        | [int(), int() | None, int() | float(), str(), bool()]
                    ):
                        return cls(replica, float(start), float(end), tokens, version, *rest)
        raise RunRecordError(
            f"{place}: a call should be [replica, start, end, tokens, version, resumed tokens, context tokens, "
            f"queued seconds, sample, interrupted], got {values!r:.60}"
        )
