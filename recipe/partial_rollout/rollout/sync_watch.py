"""Waiting for a weight sync: with a deadline, and with an eye on the replicas.

verl's sender waits for the receiver's answer without looking at the receiver's error, so a sync that fails in an engine
would hang whoever sends to it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ray.exceptions import RayActorError

from recipe.partial_rollout.waits import is_out_of_reach, one_line, result_of

if TYPE_CHECKING:
    from verl.workers.rollout.replica import RolloutReplica

T = TypeVar("T")

_LOOK_EVERY_S = 1.0
"""interval at which replicas are asked whether the sync failed on their side; a sync that succeeds never waits for it"""
_ANSWER_S = 10.0


class WeightSyncError(RuntimeError):
    """New weights did not reach the replicas."""


async def watched(awaitable: Awaitable[T], replicas: Sequence[RolloutReplica], deadline_s: float, what: str) -> T:
    """``awaitable``'s result, while ``replicas`` are asked for the error of their side.

    Args:
        awaitable: raises ``WeightSyncError`` by itself if its own side fails.
        replicas: that take part; none: only the deadline is watched.
        what: the phase and its version, for messages: "staging of version 3".

    Raises:
        WeightSyncError: it failed, or took longer than ``deadline_s``; the message names who.
    """
    running = asyncio.ensure_future(result_of(awaitable))
    started = time.monotonic()
    try:
        while not (await asyncio.wait({running}, timeout=min(_LOOK_EVERY_S, deadline_s)))[0]:
            await _look(replicas, what)
            if time.monotonic() - started > deadline_s:
                names = ", ".join(replica.server_address for replica in replicas)
                raise WeightSyncError(
                    f"{what}{f' to vLLM replicas {names}' if names else ' by the trainer'} took more than {deadline_s:g} s "
                    "(partial_rollout.deadlines.weight_sync_s)"
                )
        return running.result()
    finally:
        running.cancel()


async def _look(replicas: Sequence[RolloutReplica], what: str) -> None:
    for replica in replicas:
        try:
            error = await asyncio.wait_for(result_of(replica.server_handle.weight_sync_error.remote()), _ANSWER_S)
        except TimeoutError:
            error = None
        except RayActorError as died:
            error = None if is_out_of_reach(died) else f"the server died: {one_line(died)}"
        if error is not None:
            raise WeightSyncError(f"{what} failed in vLLM replica {replica.server_address}: {error}")
