"""What a real engine does when KV blocks run out: whoever was dispatched last makes room, whenever it arrived."""

import asyncio
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.rollout.kv_slots import ReplicaSlots, SampleSizes
from verl_ext.vllm_preemptions import preemptions_of

PROMPT, RESPONSE, BLOCK = [4, 7, 8, 9, 10, 11], 100, 32
BLOCKS = 7
"""one of them the engine's own: two responses of four blocks do not fit"""


@pytest.mark.parametrize(("policy", "first_to_end"), [("priority", "old"), ("fcfs", "young")])
def test_prompt_that_was_dispatched_last_makes_room(on_engine, policy, first_to_end):
    async def body(engine):
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        ended = []

        async def run(name, priority):
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=RESPONSE)
            prompt = TokensPrompt(prompt_token_ids=PROMPT)
            async for _ in engine.generate(
                prompt=prompt, sampling_params=params, request_id=name, priority=priority if policy == "priority" else 0
            ):
                pass
            ended.append(name)

        # A resumed sample comes back after younger ones have started; its priority is its dispatch order.
        young = asyncio.ensure_future(run("young", priority=2))
        await asyncio.sleep(0)
        await asyncio.gather(young, run("old", priority=1))
        return ended

    ended = on_engine(
        body,
        scheduling_policy=policy,
        num_gpu_blocks_override=BLOCKS,
        block_size=BLOCK,
        enable_prefix_caching=False,
    )
    assert ended[0] == first_to_end and len(ended) == 2


SAMPLES, SEATS, ROOM = 64, 48, 100
"""of the runs with many samples: what waits, ``max_num_seqs``, KV blocks"""
LONGEST, ROOM_TOKENS = 400, (ROOM - 1) * BLOCK


@pytest.fixture(scope="module")
def scarce(on_engine):
    """One engine with more seats than KV blocks: run with all seats as slots, then with as many as the rule says."""

    async def body(engine):
        from recipe.partial_rollout.engine.replica import kv_tokens_of

        found = SimpleNamespace(tokens=kv_tokens_of(engine.vllm_config))
        found.slots = ReplicaSlots(SEATS, given=False, kv_tokens=found.tokens, sizes=SampleSizes(len(PROMPT), LONGEST))
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


async def preempted(engine, name, slots):
    """Run ``SAMPLES`` samples with a long tail, ``slots`` at once; how often one was preempted."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    before, free = await preemptions_of(engine), asyncio.Semaphore(slots)

    async def run(i):
        length = LONGEST if i % 4 == 0 else 100 + i
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length)
        async with free:
            async for output in engine.generate(
                prompt=TokensPrompt(prompt_token_ids=PROMPT),
                sampling_params=params,
                request_id=f"{name}-{i}",
                priority=i,
            ):
                last = output
        assert len(last.outputs[0].token_ids) == length

    await asyncio.gather(*[run(i) for i in range(SAMPLES)])
    return await preemptions_of(engine) - before


def test_engine_says_what_its_kv_cache_holds(scarce):
    assert ROOM_TOKENS <= scarce.tokens <= ROOM_TOKENS + BLOCK
    assert 1 < scarce.slots.per_replica < SEATS / 2


def test_slots_by_the_kv_cache_are_seldom_preempted_where_all_seats_are_often(scarce):
    # Once 7 for 64 samples, against 44.
    assert scarce.of_all_seats > SAMPLES / 3
    assert scarce.of_the_rule < SAMPLES / 5 and 3 * scarce.of_the_rule < scarce.of_all_seats
