"""One line about a round that goes on, in both arms: on a terminal renewed every second, elsewhere a line now and then.

The manager and the replicas are asked beside the round's own wait, and an answer that fails to come is left out: what
fails for good surfaces where the round awaits it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.manager.messages import Standing
from recipe.partial_rollout.waits import one_line

Load = dict[str, tuple[int, int]]
"""address of a replica to the requests that it runs and the tokens decoded since its start"""

logger = logging.getLogger(__name__)

_EACH_UP_TO = 8
"""replicas that the line names one by one; of more it says the range"""
_TERMINAL_S, _LOG_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Glimpse:
    """An open round at one moment.

    >>> Glimpse(7, 64, 143.2, Standing(37, 240, 2), {"a": (118, 0), "b": (122, 0)}, 5310.4).line
    'step 7 | 37 of 64 groups ready | running 118 + 122 | 5,310 tok/s | oldest 2 versions | 143 s'
    """

    step: int
    batch_groups: int
    seconds: float
    """since the round opened"""
    standing: Standing | None
    """None under noPR, and if the manager did not answer"""
    load: Load
    tokens_per_s: float | None
    """since the last glimpse; None if the replicas did not answer"""

    @property
    def line(self) -> str:
        parts = [f"step {self.step}"]
        if self.standing is not None:
            parts.append(f"{self.standing.ready_groups} of {self.batch_groups} groups ready")
        if self.load:
            parts.append(f"running {self._running}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tok/s")
        if self.standing is not None:
            parts.append(f"oldest {self.standing.oldest} version{'' if self.standing.oldest == 1 else 's'}")
        return " | ".join([*parts, f"{self.seconds:.0f} s"])

    @property
    def _running(self) -> str:
        counts = [running for running, _ in self.load.values()]
        if len(counts) <= _EACH_UP_TO:
            return " + ".join(map(str, counts))
        return f"{sum(counts)} on {len(counts)} replicas ({min(counts)} to {max(counts)})"


class LiveLine:
    """Where the line goes."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self.every_s = _TERMINAL_S if self._terminal else _LOG_S
        self._bar: Any = None

    def show(self, line: str) -> None:
        """Show ``line``: below verl's progress bar on a terminal, else printed."""
        if not self._terminal:
            tqdm.write(line)
            return
        if self._bar is None:
            self._bar = tqdm(total=0, position=1, leave=False, bar_format="{desc}", dynamic_ncols=True)
        self._bar.set_description_str(line)

    def clear(self) -> None:
        """Take the line off the terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class ProgressLine:
    """Shows rounds while they go on.

    Args:
        control: of the replicas (``ServerControl``).
        standing: asks the manager; None under noPR.
    """

    def __init__(
        self,
        settings: PartialRolloutConfig,
        control: Any,
        standing: Callable[[], Awaitable[Standing]] | None = None,
    ) -> None:
        self._batch_groups = settings.batch_groups
        self._control = control
        self._standing = standing
        self._line = LiveLine()

    async def show(self, step: int, began: float) -> None:
        """Show the round of ``step``, for ever; ``began``: when, ``time.monotonic``."""
        before, last = time.monotonic(), await self._load()
        try:
            while True:
                await asyncio.sleep(self._line.every_s)
                standing = await _answer(self._standing) if self._standing is not None else None
                load, now = await self._load(), time.monotonic()
                rate = decoded_between(last, load) / (now - before) if last and load else None
                self._line.show(Glimpse(step, self._batch_groups, now - began, standing, load, rate).line)
                before, last = now, load
        finally:
            self._line.clear()

    async def _load(self) -> Load:
        return await _answer(lambda: self._control.load()) or {}


def decoded_between(before: Load, after: Load) -> int:
    """Tokens that the replicas decoded between two answers; one that died or came back in between counts as 0.

    >>> decoded_between({"a": (3, 100), "b": (3, 900)}, {"a": (2, 160), "c": (4, 10)})
    60
    """
    return sum(max(0, tokens - before[address][1]) for address, (_, tokens) in after.items() if address in before)


async def _answer(ask: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await ask()
    except Exception as error:
        logger.debug("no answer about the round: %s", one_line(error))
        return None
