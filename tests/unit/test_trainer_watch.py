"""A trainer that dies while nobody calls it ends the round by name."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from recipe.partial_rollout.rollout.trainer_watch import TrainerLostError, TrainerWatch


class Trainer:
    """Actor handle whose answers follow ``script``: an error to raise, or None; the last one for ever."""

    def __init__(self, *script):
        self._script = list(script)
        self.asked = 0

    @property
    def __ray_ready__(self):
        return self

    async def remote(self):
        self.asked += 1
        answer = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        if answer is not None:
            raise answer


def unavailable():
    return ActorUnavailableError("connection refused", None)


def test_round_ends_when_a_trainer_dies():
    trainers = [Trainer(None), Trainer(None, ActorDiedError())]

    async def play():
        await TrainerWatch(trainers, every_s=0.01).alive_during(asyncio.sleep(30), "the round")

    with pytest.raises(TrainerLostError, match=r"trainer 1 of 2 died during the round: ActorDiedError"):
        asyncio.run(play())


def test_trainer_that_is_out_of_reach_for_a_moment_ends_nothing():
    trainer = Trainer(unavailable(), None)

    async def play():
        return await TrainerWatch([trainer], every_s=0.01).alive_during(asyncio.sleep(0.2, "ready"), "the round")

    assert asyncio.run(play()) == "ready"
    assert trainer.asked > 2


def test_failure_of_what_is_awaited_is_its_own():
    async def fails():
        raise ValueError("no prompt")

    async def play():
        await TrainerWatch([Trainer(None)], every_s=0.01).alive_during(fails(), "the round")

    with pytest.raises(ValueError, match="no prompt"):
        asyncio.run(play())


def test_nothing_goes_on_after_the_trainers_death():
    cancelled = []

    async def rollout():
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def play():
        with pytest.raises(TrainerLostError):
            await TrainerWatch([Trainer(ActorDiedError())], every_s=0.01).alive_during(rollout(), "the round")
        await asyncio.sleep(0)

    asyncio.run(play())
    assert cancelled == [True]
