"""Where a worker's samples wait for their slots."""

from __future__ import annotations

import asyncio


class GrantTimeoutError(TimeoutError):
    """A sample waited too long for its slot."""


class GrantGate:
    """Holds a worker's samples until the manager grants each of them a slot."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._granted: dict[str, asyncio.Event] = {}
        self._open = asyncio.Event()

    def open(self) -> None:
        """A round has begun: samples that hold a slot may call the engine."""
        self._open.set()

    def close(self) -> None:
        """The round is being interrupted: no new engine call."""
        self._open.clear()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def admit(self, sample_id: str) -> None:
        """``sample_id`` holds a slot."""
        self._granted.setdefault(sample_id, asyncio.Event()).set()

    def revoke(self, sample_id: str) -> None:
        """``sample_id`` has given its slot back."""
        self._granted.setdefault(sample_id, asyncio.Event()).clear()

    def forget(self, sample_id: str) -> None:
        """``sample_id`` has ended."""
        self._granted.pop(sample_id, None)

    def holds(self, sample_id: str) -> bool:
        """Whether ``sample_id`` is live here, with or without a slot."""
        return sample_id in self._granted

    async def wait(self, sample_id: str) -> None:
        """Return once ``sample_id`` holds a slot.

        Raises:
            GrantTimeoutError: not granted within the deadline.
        """
        try:
            await asyncio.wait_for(self._granted[sample_id].wait(), self._deadline_s)
        except TimeoutError as error:
            raise GrantTimeoutError(
                f"sample {sample_id} was not granted a slot within {self._deadline_s:g} s "
                f"(partial_rollout.deadlines.grant_s); is the trainer still stepping?"
            ) from error
