"""The scripted replica keeps to its curve in real time, and gives back what it has when it is interrupted."""

import asyncio
import time

import pytest

from recipe.partial_rollout.planner.engine_curve import EngineCurve
from tests.bench.scripted_engine import ScriptedReplica

CURVE = EngineCurve(step_s=0.01, sample_s=0.0)


def test_calls_take_as_long_as_their_steps():
    async def body():
        replica = ScriptedReplica(CURVE)
        replica.start()
        began = time.monotonic()
        made = await asyncio.gather(replica.decode("a", 0, 5), replica.decode("b", 7, 20))
        return made, time.monotonic() - began, replica.decoded

    made, seconds, decoded = asyncio.run(body())
    assert made == [5, 20] and decoded == 25
    assert seconds > 0.19


def test_interrupted_call_ends_with_what_it_has_and_goes_on_from_there():
    async def body():
        replica = ScriptedReplica(CURVE)
        replica.start()
        call = asyncio.ensure_future(replica.decode("a", 0, 1000))
        await asyncio.sleep(0.1)
        replica.interrupt()
        first = await call
        replica.start()
        second = await replica.decode("a", first, 3)
        return first, second, len(replica), replica.decoded

    first, second, left, decoded = asyncio.run(body())
    assert 5 <= first < 1000 and second == 3 and left == 0 and decoded == first + 3


@pytest.mark.parametrize("calls", [0, 3])
def test_interruption_of_an_idle_replica_is_nothing(calls):
    async def body():
        replica = ScriptedReplica(CURVE)
        replica.start()
        for i in range(calls):
            assert await replica.decode(f"s{i}", 0, 1) == 1
        replica.interrupt()
        return replica.decoded

    assert asyncio.run(body()) == calls
