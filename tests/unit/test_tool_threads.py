"""Synchronous tools that hang take their threads with them, and no other call's."""

import asyncio
import threading
from contextvars import ContextVar

import pytest

from recipe.partial_rollout.worker.tool_journal import ToolThreads

WHO = ContextVar("who")


async def give_up(threads, call):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(threads.run(call), 0.05)


def test_calls_that_hang_do_not_keep_others_from_their_threads():
    release = threading.Event()

    async def body():
        threads = ToolThreads(size=2)
        try:
            for _ in range(5):
                await give_up(threads, lambda: release.wait(30))
            return await asyncio.wait_for(threads.run(lambda: "answered"), 5)
        finally:
            release.set()

    assert asyncio.run(body()) == "answered"


def test_call_that_waits_for_a_thread_when_it_is_given_up_is_never_made():
    release, made = threading.Event(), []

    async def body():
        threads = ToolThreads(size=1)
        try:
            first = asyncio.ensure_future(threads.run(lambda: release.wait(30)))
            await give_up(threads, lambda: made.append("too late"))
            # The thread that is busy is not lost: the next call waits for it.
            after = asyncio.ensure_future(threads.run(lambda: "after"))
            release.set()
            return await asyncio.wait_for(asyncio.gather(first, after), 5)
        finally:
            release.set()

    assert asyncio.run(body()) == [True, "after"] and made == []


async def test_call_that_is_under_way_when_another_is_given_up_is_answered():
    release = threading.Event()
    threads = ToolThreads(size=2)
    try:
        slow = asyncio.ensure_future(threads.run(lambda: release.wait(30)))
        await give_up(threads, lambda: release.wait(30))
    finally:
        release.set()
    assert await asyncio.wait_for(slow, 5)


async def test_call_has_the_context_and_the_error_of_its_own():
    def call():
        raise LookupError(WHO.get())

    with pytest.raises(LookupError, match="sample 0/0#0"):
        WHO.set("sample 0/0#0")
        await ToolThreads().run(call)
