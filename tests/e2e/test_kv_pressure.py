"""What a real engine does when KV blocks run out: whoever was dispatched last makes room, whenever it arrived."""

import asyncio
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.rollout.slots import ReplicaSlots
from verl_ext.vllm_plugin import preemptions_of

# What it shows are vLLM's own preemptions, which change with its release.
pytestmark = pytest.mark.nightly

PROMPT, BLOCK = [4, 7, 8, 9, 10, 11], 32
SAMPLES, SEATS, ROOM = 64, 48, 100
"""what waits, ``max_num_seqs``, KV blocks (one of them the engine's own)"""
LONGEST, ROOM_TOKENS = 400, (ROOM - 1) * BLOCK
YOUNG, RESPONSE = 40, 100
"""samples beside one that was dispatched earlier; each comes to need four blocks"""


@pytest.fixture(scope="module")
def scarce(on_engine):
    """One engine with more seats than KV blocks: with more samples than fit, in either order; with all seats as slots, and
    with as many as the rule says."""

    async def body(engine):
        from recipe.partial_rollout.engine.replica import kv_tokens_of

        await engine.get_supported_tasks()
        found = SimpleNamespace(tokens=kv_tokens_of(engine.vllm_config))
        found.ended = {by: await order_of_ends(engine, by) for by in ("dispatch", "arrival")}
        found.slots = ReplicaSlots(SEATS, given=False, kv_tokens=found.tokens, prompt=len(PROMPT), response=LONGEST)
        found.of_all_seats = await preempted(engine, "all", SEATS)
        found.of_the_rule = await preempted(engine, "rule", found.slots.per_replica)
        return found

    return on_engine(
        body,
        scheduling_policy="priority",
        num_gpu_blocks_override=ROOM,
        block_size=BLOCK,
        max_num_seqs=SEATS,
        max_model_len=512,
        watermark=0.05,
        enable_prefix_caching=False,
    )


async def run_one(engine, name, length, priority):
    """Run one sample of ``length`` tokens."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length)
    prompt = TokensPrompt(prompt_token_ids=PROMPT)
    async for output in engine.generate(prompt=prompt, sampling_params=params, request_id=name, priority=priority):
        last = output
    assert len(last.outputs[0].token_ids) == length


async def order_of_ends(engine, by):
    """Who ends when, first to last: young samples, and an old one that comes back after they have started."""
    ended = []

    async def run(name, priority):
        await run_one(engine, f"{by}-{name}", RESPONSE, priority if by == "dispatch" else 0)
        ended.append(name)

    young = [asyncio.ensure_future(run(i, priority=2 + i)) for i in range(YOUNG)]
    await asyncio.sleep(0)
    await asyncio.gather(run("old", priority=1), *young)
    return ended


async def preempted(engine, name, slots):
    """Run ``SAMPLES`` samples with a long tail, ``slots`` at once; how often one was preempted."""
    before, free = await preemptions_of(engine), asyncio.Semaphore(slots)

    async def run(i):
        async with free:
            await run_one(engine, f"{name}-{i}", LONGEST if i % 4 == 0 else 100 + i, priority=i)

    await asyncio.gather(*[run(i) for i in range(SAMPLES)])
    return await preemptions_of(engine) - before


def test_sample_that_was_dispatched_last_makes_room(scarce):
    assert scarce.ended["dispatch"][-1] == YOUNG - 1 and "old" in scarce.ended["dispatch"][:-10]
    assert scarce.ended["arrival"][-1] == "old"


def test_slots_by_the_kv_cache_are_seldom_preempted_where_all_seats_are_often(scarce):
    assert ROOM_TOKENS <= scarce.tokens <= ROOM_TOKENS + BLOCK
    assert 1 < scarce.slots.per_replica < SEATS / 2
    # Once 7 for 64 samples, against 44.
    assert scarce.of_all_seats > SAMPLES / 3
    assert scarce.of_the_rule < SAMPLES / 5 and 3 * scarce.of_the_rule < scarce.of_all_seats
