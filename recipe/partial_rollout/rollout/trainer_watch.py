"""Notices the death of a trainer while nobody calls it, so that a round does not go on for a batch that cannot be trained.

Trainers idle during a round, and a round may take an hour. In all other phases the driver awaits their answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NoReturn

from ray.exceptions import RayActorError

from recipe.partial_rollout.waits import is_out_of_reach, one_line, result_of

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

    async def look(self, what: str) -> NoReturn:
        """Ask them, for ever.

        Raises:
            TrainerLostError: one died; the message says during ``what``.
        """
        while True:
            await asyncio.gather(*[self._ask(rank, what) for rank in range(len(self._trainers))])
            await asyncio.sleep(self._every_s)

    async def _ask(self, rank: int, what: str) -> None:
        try:
            await result_of(self._trainers[rank].__ray_ready__.remote())
        except RayActorError as error:
            if is_out_of_reach(error):
                return
            raise TrainerLostError(
                f"trainer {rank} of {len(self._trainers)} died during {what}: {one_line(error)}"
            ) from error
