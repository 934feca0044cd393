"""Slots of a replica: its seats, its KV cache, or what the user says; then what the rounds measure."""

import asyncio
import math
from types import SimpleNamespace

from recipe.partial_rollout.config.sections import Deadlines
from recipe.partial_rollout.records.calls import EngineCall
from recipe.partial_rollout.rollout.context import RolloutContext
from recipe.partial_rollout.rollout.slots import KV_SHARE, ReplicaSlots, SampleSizes
from recipe.partial_rollout.rollout.workers import WorkerShares


def slots(most=128, *, given=False, kv=21_504, prompt=64, response=1024):
    return ReplicaSlots(most, given=given, kv_tokens=kv, sizes=SampleSizes(prompt, response))


def call(tokens, context):
    return EngineCall("r", 0.0, 1.0, tokens, 0, context_tokens=context)


def test_scarce_kv_bounds_the_slots_and_the_line_says_why():
    chosen = slots()
    assert [chosen.per_replica, slots(kv=10_000_000).per_replica, slots(kv=100).per_replica] == [37, 128, 1]
    assert chosen.describe() == (
        "slots per replica: 37 (KV cache holds 21,504 tokens, a sample is estimated at 576 = prompt_length 64 + "
        "response_length 1,024 / 2 until rounds are measured; rollout.max_num_seqs=128)"
    )


def test_slots_that_are_given_stay_with_a_warning_where_kv_cannot_hold_them():
    scarce, ample = slots(40, given=True), slots(30, given=True)
    assert (scarce.per_replica, ample.per_replica) == (40, 30)
    assert "WARNING" in scarce.describe() and "it holds 37 such samples" in scarce.describe()
    assert "WARNING" not in ample.describe() and "\n" not in scarce.describe()
    scarce.reckon([call(100, 64)])
    assert scarce.per_replica == 40


def test_engine_that_does_not_say_has_all_its_seats():
    unknown = slots(kv=None)
    assert unknown.per_replica == 128 and "does not say" in unknown.describe()
    unknown.reckon([call(100, 64)])
    assert unknown.per_replica == 128


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
