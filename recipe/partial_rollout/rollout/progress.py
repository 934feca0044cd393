"""One line about a round that goes on, in both arms: on a terminal renewed every second, elsewhere a line now and then.

The manager and the replicas are asked beside the round's own wait, and an answer that fails to come is left out: what
fails for good surfaces where the round awaits it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tqdm import tqdm

from recipe.partial_rollout.manager.types import Standing
from recipe.partial_rollout.rollout.replicas import Load, decoded_between
from recipe.partial_rollout.waits import one_line

logger = logging.getLogger(__name__)

_EACH_UP_TO = 8
"""replicas that the line names one by one; of more it says the range"""
_TERMINAL_S, _LOG_S = 1.0, 60.0


def round_line(
    step: int, seconds: float, batch_groups: int, standing: Standing | None, load: Load, tokens_per_s: float | None
) -> str:
    """An open round at one moment; what is None or empty did not answer (noPR has no manager).

    >>> round_line(7, 143.2, 64, Standing(37, 240, 2), {"a": (118, 0), "b": (122, 0)}, 5310.4)
    'step 7 | 37 of 64 groups ready | running 118 + 122 | 5,310 tok/s | oldest 2 versions | 143 s'
    """
    running = [count for count, _ in load.values()]
    parts = [f"step {step}"]
    if standing is not None:
        parts.append(f"{standing.ready_groups} of {batch_groups} groups ready")
    if len(running) > _EACH_UP_TO:
        parts.append(f"running {sum(running)} on {len(running)} replicas ({min(running)} to {max(running)})")
    elif running:
        parts.append(f"running {' + '.join(map(str, running))}")
    if tokens_per_s is not None:
        parts.append(f"{tokens_per_s:,.0f} tok/s")
    if standing is not None:
        parts.append(f"oldest {standing.oldest} version{'' if standing.oldest == 1 else 's'}")
    return " | ".join([*parts, f"{seconds:.0f} s"])


async def show_round(
    step: int,
    began: float,
    batch_groups: int,
    load: Callable[[], Awaitable[Load]],
    standing: Callable[[], Awaitable[Standing]] | None = None,
) -> None:
    """Show the round of ``step``, for ever: below verl's progress bar on a terminal, else printed.

    Args:
        began: when, ``time.monotonic``.
        load: asks the replicas (``ServerControl.load``).
        standing: asks the manager; None under noPR.
    """
    before, last = time.monotonic(), await _answer(load) or {}
    # tqdm switches it off where there is no terminal.
    with tqdm(total=0, position=1, leave=False, bar_format="{desc}", dynamic_ncols=True, disable=None) as bar:
        while True:
            await asyncio.sleep(_LOG_S if bar.disable else _TERMINAL_S)
            stands = await _answer(standing) if standing is not None else None
            loads, now = await _answer(load) or {}, time.monotonic()
            rate = decoded_between(last, loads) / (now - before) if last and loads else None
            line = round_line(step, now - began, batch_groups, stands, loads, rate)
            if bar.disable:
                tqdm.write(line)
            else:
                bar.set_description_str(line)
            before, last = now, loads


async def _answer(ask: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await ask()
    except Exception as error:
        logger.debug("no answer about the round: %s", one_line(error))
        return None
