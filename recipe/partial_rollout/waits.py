"""Waits with deadlines, and errors in one line: used in every process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from ray.exceptions import RayActorError

T = TypeVar("T")


def one_line(error: BaseException | None) -> str:
    """Type and last line of ``error``; Ray puts a remote traceback before that line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else '(no message)'}"


class ReplicaError(RuntimeError):
    """A vLLM replica did not answer a request.

    Args:
        dead: the replica will not answer any other request either.
    """

    def __init__(self, message: str, *, dead: bool) -> None:
        super().__init__(message)
        self.dead = dead


def means_death(error: BaseException) -> bool:
    """Whether ``error`` says that a replica's process or its engine has died."""
    return isinstance(error, RayActorError) or "EngineDead" in f"{type(error).__name__} {error}"


async def result_of(ref: Awaitable[T]) -> T:
    """A coroutine for a Ray reference."""
    return await ref


async def within(awaitable: Awaitable[T], deadline_s: float, what: str, key: str) -> T:
    """``awaitable``'s result.

    Raises:
        TimeoutError: nothing within ``deadline_s``; names ``what`` was awaited and the config ``key`` of the deadline.
    """
    try:
        # As a task: if the caller is cancelled, a ``gather`` that nobody asks any more would print a traceback.
        return await asyncio.wait_for(result_of(awaitable), deadline_s)
    except TimeoutError as error:
        raise TimeoutError(f"{what} took more than {deadline_s:g} s (partial_rollout.deadlines.{key})") from error
