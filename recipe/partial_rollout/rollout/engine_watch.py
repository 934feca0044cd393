"""Engines that decode are no stall: while nothing is reported of a round, the manager is told that tokens are made.

A worker reports a sample when it finishes or is interrupted, which a response of 60,000 tokens may not do for longer than
``deadlines.stall_s``. The engines are asked a few times in that span, never for a token or a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

ASKED_IN_A_STALL = 4
"""times that the engines are asked in ``stall_s``: a stall is noticed that share of it late at most"""


async def watch_engines(
    running_tokens: Callable[[], Awaitable[dict[str, int]]], every_s: float, note: Callable[[], Awaitable[object]]
) -> None:
    """Call ``note`` after each ``every_s`` seconds in which an engine has made a token; for ever.

    Args:
        running_tokens: ``ServerControl.running_tokens``. No request runs in any engine yet.
    """
    before: dict[str, int] = {}
    while True:
        await asyncio.sleep(every_s)
        now = await running_tokens()
        if any(tokens != before.get(address, 0) for address, tokens in now.items()):
            await note()
        before |= now
