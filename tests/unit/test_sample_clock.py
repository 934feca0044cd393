"""An agent loop that takes too long between two engine calls ends its sample; its waits elsewhere do not count.

``test_worker`` has a loop that hangs.
"""

import asyncio
import contextlib

import pytest

from recipe.partial_rollout.worker.live_sample import SampleClock


def run(loop, *, deadline_s=0.1):
    """``loop(clock)`` under a clock."""

    async def body():
        clock = SampleClock("sample 0/0#0", deadline_s)
        return await asyncio.wait_for(clock.run(loop(clock)), 5)

    return asyncio.run(body())


def test_clock_is_stopped_until_the_last_of_overlapping_waits_ends_and_then_starts_anew():
    async def wait(clock, seconds):
        with clock.stopped():
            await asyncio.sleep(seconds)

    async def loop(clock):
        for _ in range(3):
            await asyncio.gather(wait(clock, 0.01), wait(clock, 0.3))
            await asyncio.sleep(0.1)
        return "done"

    assert run(loop, deadline_s=0.25) == "done"


@pytest.mark.parametrize("caught", [Exception, BaseException], ids=["catches errors", "catches its cancellation"])
def test_loop_ends_with_the_error_that_ended_it_whatever_it_catches(caught):
    async def loop(clock):
        clock.end(ValueError("no answer"))
        with contextlib.suppress(caught):
            await asyncio.sleep(60)
        return "trained all the same"

    with pytest.raises(ValueError, match="no answer"):
        run(loop, deadline_s=None)


async def test_timeout_of_the_loops_own_stays_what_it_is_and_an_error_after_the_end_is_nobodys():
    async def loop():
        raise TimeoutError("the sandbox is gone")

    clock = SampleClock("sample 0/0#0", 60.0)
    with pytest.raises(TimeoutError, match="the sandbox is gone") as caught:
        await clock.run(loop())
    assert type(caught.value) is TimeoutError
    clock.end(ValueError("late"))
