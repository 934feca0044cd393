"""While nothing is reported of a round, engines that make tokens keep it from being a stall."""

import asyncio
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.config.choices import Mode
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.messages import Report, RolloutFailedError
from recipe.partial_rollout.rollout.engine_watch import watch_engines, while_decoding


@pytest.mark.parametrize(
    ("readings", "progress"),
    [
        # Tokens of the requests that run: those of a new round, more of them, none more, fewer as requests end, none left.
        ([{"a": 5, "b": 0}], 1),
        ([{"a": 5, "b": 0}, {"a": 5, "b": 1}], 2),
        ([{"a": 5}, {"a": 5}, {"a": 5}], 1),
        ([{"a": 5}, {"a": 3}, {"a": 0}, {"a": 0}], 3),
        ([{"a": 0, "b": 0}, {}], 0),
        # b does not answer once, and has made nothing meanwhile.
        ([{"a": 1, "b": 4}, {"a": 1}, {"a": 1, "b": 4}], 1),
    ],
)
def test_engines_that_make_tokens_are_noted_and_those_that_make_none_are_not(readings, progress):
    noted, left = [], list(readings)

    async def running_tokens():
        if not left:
            raise asyncio.CancelledError
        return left.pop(0)

    async def note():
        noted.append(len(readings) - len(left))

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch_engines(running_tokens, 0.001, note))
    assert len(noted) == progress


class Remote:
    """An actor handle without Ray."""

    def __init__(self, actor):
        self.actor = actor

    def __getattr__(self, verb):
        return SimpleNamespace(remote=getattr(self.actor, verb))


class Engines:
    """Replicas of which one makes a token whenever it is asked, ``tokens`` in all."""

    def __init__(self, tokens):
        self.left, self.made = tokens, 0

    async def running_tokens(self):
        self.left, self.made = self.left - 1, self.made + (self.left > 0)
        return {"a": self.made, "b": 0}


async def round_of_one_sample(prompts, engines):
    """The driver's wait for a round whose one sample reports nothing; the manager, the wait, the sample."""
    actor = ManagerActor(Admission(Mode.WINDOW, 1, 1, 0.0, 2, 1, 4), Scheduling(), stall_s=0.4)
    await actor.register_worker("w0", 4)
    await actor.prepare_round(0, prompts(1), False)
    (grant,) = await actor.claim("w0")
    waiting = while_decoding(actor.wait_round(), Remote(actor), engines.running_tokens, stall_s=0.4)
    return actor, asyncio.ensure_future(waiting), grant.sample_id


def test_round_with_one_long_response_goes_on_for_as_long_as_it_is_decoded(prompts, output):
    async def life():
        actor, waiting, sample_id = await round_of_one_sample(prompts, Engines(tokens=1000))
        await asyncio.sleep(1.2)
        in_time = not waiting.done()
        await actor.report(Report("w0", finished=((sample_id, output()),)))
        return in_time, await asyncio.wait_for(waiting, 5)

    in_time, ended = asyncio.run(life())
    assert in_time and ended.admitted == ("0/0",)


def test_round_in_which_the_engines_stop_decoding_ends_by_its_deadline(prompts):
    async def life():
        _, waiting, _ = await round_of_one_sample(prompts, Engines(tokens=3))
        await asyncio.wait_for(waiting, 5)

    with pytest.raises(RolloutFailedError, match="no sample reported and no engine made a token for"):
        asyncio.run(life())
