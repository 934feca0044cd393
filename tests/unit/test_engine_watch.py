"""Engines that make tokens are noted; `test_guard.py` has what that is for."""

import asyncio

import pytest

from recipe.partial_rollout.rollout.engine_watch import watch_engines


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
        asyncio.run(watch_engines(running_tokens, 0.004, note))
    assert len(noted) == progress
