"""Which policy version made which tokens of a request that was held while the weights changed.

verl's server names one version for a request, the one in force when it ends. So the server notes at each hold how many
tokens every request has, and the version that made the last of them. ``version_marks`` of an answer are these pairs:

    a request of 12 tokens, held after 5 under version 3, and after 9 under version 4, ends under version 5:
    [(5, 3), (9, 4)]  ->  tokens 0-4 by version 3, 5-8 by version 4, 9-11 by version 5
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

UNKNOWN = -1
"""version of a server that was not told any"""


class Mark(NamedTuple):
    """The first ``tokens`` tokens of a request were made by ``version``, but for those of earlier marks."""

    tokens: int
    version: int


class Span(NamedTuple):
    """Tokens ``start`` to ``stop`` (exclusive) of a request were made by ``version``."""

    start: int
    stop: int
    version: int


class VersionMarks:
    """The marks of the requests that a server answers.

    >>> marks = VersionMarks()
    >>> marks.begin("a")
    >>> marks.note({"a": 5, "not begun": 7}, version=3)
    >>> marks.note({"a": 5}, version=4)
    >>> marks.take("a"), marks.take("a")
    ([Mark(tokens=5, version=3)], [])
    """

    def __init__(self) -> None:
        self._of: dict[str, list[Mark]] = {}

    def begin(self, request_id: str) -> None:
        """Note marks for ``request_id`` until they are taken."""
        self._of[request_id] = []

    def note(self, made: Mapping[str, int], version: int | None) -> None:
        """``version`` has been in force since the last call; ``made`` are the tokens of each request so far."""
        for request_id, tokens in made.items():
            marks = self._of.get(request_id)
            if marks is not None and tokens > (marks[-1].tokens if marks else 0):
                marks.append(Mark(tokens, UNKNOWN if version is None else version))

    def take(self, request_id: str) -> list[Mark]:
        """The marks of ``request_id``, which has ended; in ascending order, each with at least one token of its own."""
        return self._of.pop(request_id, [])


def spans(tokens: int, marks: Sequence[tuple[int, int]], version: int) -> list[Span]:
    """A request's tokens by the versions that made them, in order: at least one span, empty only without any token.

    >>> spans(12, [(5, 3), (9, 4)], version=5)
    [Span(start=0, stop=5, version=3), Span(start=5, stop=9, version=4), Span(start=9, stop=12, version=5)]
    >>> spans(5, [(5, 3)], version=4)
    [Span(start=0, stop=5, version=3)]

    Args:
        tokens: of the request. marks: see ``VersionMarks.take``. version: in force when it ended.

    Raises:
        RuntimeError: the marks do not ascend, or count more tokens than there are.
    """
    found: list[Span] = []
    for stop, made_by in [*marks, (tokens, version)]:
        start = found[-1].stop if found else 0
        if not start <= stop <= tokens:
            raise RuntimeError(f"version marks {list(marks)} do not fit a request of {tokens} tokens")
        if found and found[-1].version == made_by:
            found[-1] = Span(found[-1].start, stop, made_by)
        elif stop > start:
            found.append(Span(start, stop, made_by))
    return found or [Span(0, tokens, version)]
