"""What a real engine does when KV blocks run out: whoever was dispatched last makes room, whenever it arrived."""

import asyncio

import pytest

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
