"""Slots of a replica: its seats, its KV cache, or what the user says; then what the rounds measure."""

import asyncio
import math
import re
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.config.sections import Deadlines
from recipe.partial_rollout.records.calls import EngineCall
from recipe.partial_rollout.rollout.context import RolloutContext
from recipe.partial_rollout.rollout.slots import KV_SHARE, ReplicaSlots, SampleSizes
from recipe.partial_rollout.rollout.workers import WorkerShares


def slots(most=128, *, given=False, kv=21_504, prompt=64, response=1024):
    return ReplicaSlots(most, given=given, kv_tokens=kv, sizes=SampleSizes(prompt, response))


def call(tokens, context):
    return EngineCall("r", 0.0, 1.0, tokens, 0, context_tokens=context)


@pytest.mark.parametrize(
    ("chosen", "per_replica", "said"),
    [
        (slots(), 37, "KV cache holds 21,504 tokens, a sample is estimated at 576"),
        (slots(kv=10_000_000), 128, "max_num_seqs=128"),
        (slots(kv=100), 1, "KV cache holds 100 tokens"),
        # They are given.
        (slots(40, given=True), 40, "WARNING.*it holds 37 such samples"),
        (slots(30, given=True), 30, "^(?!.*WARNING)"),
        # The engine has all its seats.
        (slots(kv=None), 128, "does not say"),
    ],
)
def test_scarce_kv_bounds_the_slots_that_are_not_given_and_the_line_says_why(chosen, per_replica, said):
    assert chosen.per_replica == per_replica
    assert re.search(said, chosen.describe()) and "\n" not in chosen.describe()
    if said in ("does not say", "WARNING.*it holds 37 such samples"):
        chosen.reckon([call(100, 64)])
        assert chosen.per_replica == per_replica


def test_slots_follow_the_context_that_is_measured(capsys):
    chosen = slots()
    for nothing in ([], [call(0, 64)], [call(100, None)]):
        chosen.reckon(nothing)
    assert chosen.per_replica == 37
    # A token of the first call is decoded beside 114 others on average, one of the second beside 264.
    chosen.reckon([call(100, 64), call(300, 114)])
    mean = (100 * 114 + 300 * 264) / 400
    assert chosen.per_replica == int(KV_SHARE * 21_504 / mean) == 75
    assert capsys.readouterr().out.startswith("slots per replica: 75 from here on")
    chosen.reckon([call(102, 64), call(306, 114)])
    assert chosen.per_replica == 75, "small changes are not made"
    chosen.reckon([call(4000, 64)])
    assert chosen.per_replica == 8
    chosen.reckon([call(1, 1)])
    assert chosen.per_replica == 128


class Control:
    """``ServerControl`` of two replicas."""

    preemptions: int | None = 4

    def __len__(self):
        return 2

    async def new_preemptions(self):
        return self.preemptions


def test_workers_get_their_part_of_the_slots_that_were_reckoned_anew():
    sent, chosen = [], slots()

    async def resize(capacity):
        sent.append(capacity)

    settings = SimpleNamespace(batch_samples=96, deadlines=Deadlines())
    context = RolloutContext(settings, Control(), chosen, *[None] * 5, steps_per_epoch=1, last_step=1)
    workers = WorkerShares(chosen, 2, 3, SimpleNamespace(resize_workers=SimpleNamespace(remote=resize)), 5.0)
    assert context.full_concurrency == 74 and workers.per_worker == math.ceil(74 / 3)
    assert asyncio.run(context.engine_metrics()) == {"rollout/slots_per_replica": 37, "rollout/preemptions": 4}
    for _ in range(2):
        asyncio.run(workers.reckon((call(100, 64), call(300, 114))))
        assert sent == [50] == [workers.per_worker], "two replicas with 75 slots, three workers"
    assert context.full_concurrency == 96, "a batch has no more"
    context.control.preemptions = None
    assert asyncio.run(context.engine_metrics()) == {"rollout/slots_per_replica": 75}
