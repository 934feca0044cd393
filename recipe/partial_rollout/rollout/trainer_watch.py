"""Notices the death of a trainer while nobody calls it, so that a round does not go on for a batch that cannot be trained.

Trainers idle during a round, and a round may take an hour. In all other phases the driver awaits their answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, NoReturn, TypeVar

from ray.exceptions import ActorDiedError, ActorUnavailableError

from recipe.partial_rollout.waits import one_line, result_of

T = TypeVar("T")

LOOK_EVERY_S = 2.0


class TrainerLostError(RuntimeError):
    """A trainer died; the message names it."""


class TrainerWatch:
    """Asks the trainers for a sign of life.

    Args:
        trainers: handles of verl's trainer workers, in the order of their ranks.
        every_s: seconds between two questions.
    """

    def __init__(self, trainers: Sequence[Any], every_s: float = LOOK_EVERY_S) -> None:
        self._trainers = trainers
        self._every_s = every_s

    async def alive_during(self, awaitable: Awaitable[T], what: str) -> T:
        """``awaitable``'s result; it is cancelled if a trainer dies meanwhile.

        Raises:
            TrainerLostError: one died; the message says during ``what``.
        """
        main = asyncio.ensure_future(awaitable)
        looking = asyncio.ensure_future(self._look(what))
        try:
            await asyncio.wait({main, looking}, return_when=asyncio.FIRST_COMPLETED)
            return main.result() if main.done() else looking.result()
        finally:
            main.cancel()
            looking.cancel()

    async def _look(self, what: str) -> NoReturn:
        while True:
            await asyncio.gather(*[self._ask(rank, what) for rank in range(len(self._trainers))])
            await asyncio.sleep(self._every_s)

    async def _ask(self, rank: int, what: str) -> None:
        try:
            await result_of(self._trainers[rank].__ray_ready__.remote())
        except ActorUnavailableError:
            # Ray cannot reach it, and decides within seconds whether it is dead: the next answer says so.
            return
        except ActorDiedError as error:
            raise TrainerLostError(
                f"trainer {rank} of {len(self._trainers)} died during {what}: {one_line(error)}"
            ) from error
