"""Tells the manager that engines still decode, so that a long silence of the workers does not count as a stall.

A worker reports a sample when it finishes or is interrupted. A response of 60,000 tokens may do neither for longer than
``deadlines.stall_s``. So the engines are asked a few times in that span, not for each token or step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

RunningTokens = Callable[[], Awaitable[dict[str, int]]]
"""``ServerControl.running_tokens``"""

ASKED_IN_A_STALL = 4
"""times that the engines are asked within ``stall_s``; a stall is noticed at most ``stall_s`` over this number late"""


async def watch_engines(running_tokens: RunningTokens, stall_s: float, note: Callable[[], Awaitable[object]]) -> None:
    """A few times in ``stall_s`` seconds, for ever: call ``note`` if an engine has made a token since the last time.

    Args:
        running_tokens: ``ServerControl.running_tokens``. Requests that run already count as progress once.
    """
    before: dict[str, int] = {}
    while True:
        await asyncio.sleep(stall_s / ASKED_IN_A_STALL)
        now = await running_tokens()
        if any(tokens != before.get(address, 0) for address, tokens in now.items()):
            await note()
        before |= now
