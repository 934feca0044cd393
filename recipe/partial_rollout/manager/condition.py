"""Waiting for the manager: one condition, deadlines, and the first failure that anyone reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from recipe.partial_rollout.manager.messages import RolloutFailedError

T = TypeVar("T")


class ManagerCondition:
    """Guards the manager's state (``async with``); whoever waits is woken by every change, and by a failure."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._failure: str | None = None

    async def __aenter__(self) -> None:
        await self._changed.acquire()

    async def __aexit__(self, *error: object) -> None:
        self._changed.release()

    async def change(self, verb: Callable[[], T]) -> T:
        """Run ``verb`` under the condition, then wake everyone who waits."""
        async with self:
            result = verb()
            self.notify()
        return result

    def notify(self) -> None:
        """Wake everyone who waits; the caller holds the condition."""
        self._changed.notify_all()

    async def wait(self, timeout_s: float) -> None:
        """Wait until something changes or ``timeout_s`` pass; the caller holds the condition."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return

    def fail(self, reason: str) -> None:
        """Make everyone who waits, now or later, fail with ``reason``; only the first reason counts."""
        self._failure = self._failure or reason

    def raise_failure(self) -> None:
        """Raise ``RolloutFailedError`` with the first reason, if there is one."""
        if self._failure is not None:
            raise RolloutFailedError(self._failure)
