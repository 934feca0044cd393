"""The gate at which a worker's samples wait: each for its slot, all of them for the round."""

from __future__ import annotations

import asyncio


class GrantTimeoutError(TimeoutError):
    """A sample waited too long for its slot."""


class GrantGate:
    """Lets samples that hold a slot pass once the round is open.

    Slots are granted before the round opens, while the trainer updates, so the samples already wait when it opens.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._granted: dict[str, asyncio.Event] = {}
        self._open = asyncio.Event()

    def open(self) -> None:
        """Open the round: samples that hold a slot may call the engine."""
        self._open.set()

    def close(self) -> None:
        """Close the round: no new engine calls."""
        self._open.clear()

    @property
    def is_open(self) -> bool:
        """Whether a round is open."""
        return self._open.is_set()

    def grant(self, sample_id: str) -> None:
        """Give ``sample_id`` a slot."""
        self._granted.setdefault(sample_id, asyncio.Event()).set()

    def revoke(self, sample_id: str) -> None:
        """Take the slot of ``sample_id``."""
        self._granted.setdefault(sample_id, asyncio.Event()).clear()

    def forget(self, sample_id: str) -> None:
        """Forget ``sample_id``, which has ended."""
        self._granted.pop(sample_id, None)

    def granted(self, sample_id: str) -> bool:
        """Whether ``sample_id`` holds a slot."""
        return sample_id in self._granted and self._granted[sample_id].is_set()

    def holds(self, sample_id: str) -> bool:
        """Whether ``sample_id`` is live here, with or without a slot."""
        return sample_id in self._granted

    async def wait(self, sample_id: str) -> None:
        """Return once ``sample_id`` holds a slot in an open round.

        Raises:
            GrantTimeoutError: it got none within the deadline.
        """
        granted = self._granted[sample_id]
        try:
            async with asyncio.timeout(self._deadline_s):
                await granted.wait()
                # The gate may close again before a sample that it woke runs.
                while not self._open.is_set():
                    await self._open.wait()
        except TimeoutError as error:
            raise GrantTimeoutError(
                f"sample {sample_id} was not granted a slot in an open round within {self._deadline_s:g} s "
                f"(partial_rollout.deadlines.grant_s); is the trainer still stepping?"
            ) from error
