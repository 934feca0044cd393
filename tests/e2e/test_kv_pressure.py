"""What a real engine does when KV blocks run out: whoever was dispatched last makes room, whenever it arrived.

``test_training.py`` counts the preemptions of a training whose slots follow its scarce blocks.
"""

import asyncio

import pytest

# What it shows are vLLM's own preemptions, which change with its release.
pytestmark = pytest.mark.nightly

PROMPT, BLOCK = [4, 7, 8, 9, 10, 11], 32
SEATS, ROOM = 48, 100
"""``max_num_seqs``, KV blocks (one of them the engine's own)"""
YOUNG, RESPONSE = 40, 100
"""samples beside one that was dispatched earlier; each comes to need four blocks"""


@pytest.fixture(scope="module")
def ended(on_engine):
    """One engine with more seats than KV blocks: who ends when, with priorities by dispatch and by arrival."""

    async def body(engine):
        await engine.get_supported_tasks()
        return {by: await order_of_ends(engine, by) for by in ("dispatch", "arrival")}

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


async def order_of_ends(engine, by):
    """Who ends when, first to last: young samples, and an old one that comes back after they have started."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    ended = []

    async def run(name, priority):
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=RESPONSE)
        request = {"request_id": f"{by}-{name}", "priority": priority if by == "dispatch" else 0}
        async for output in engine.generate(TokensPrompt(prompt_token_ids=PROMPT), params, **request):
            last = output
        assert len(last.outputs[0].token_ids) == RESPONSE
        ended.append(name)

    young = [asyncio.ensure_future(run(i, priority=2 + i)) for i in range(YOUNG)]
    await asyncio.sleep(0)
    await asyncio.gather(run("old", priority=1), *young)
    return ended


def test_sample_that_was_dispatched_last_makes_room(ended):
    assert ended["dispatch"][-1] == YOUNG - 1 and "old" in ended["dispatch"][:-10]
    assert ended["arrival"][-1] == "old"
