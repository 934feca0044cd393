"""A real engine is held while it decodes: no token is lost or made twice, and each is of the version that its mark says."""

import asyncio
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

HERE = Path(__file__).parent
REQUESTS, RESPONSE = 16, 100
PROMPTS = [[4, 7, 8, 9, 10, 11 + i] for i in range(REQUESTS)]
HOLDS = (1, 30, 31, 70)
"""tokens that each request has made, at least, when the engine is held; the first hold is before any"""
STEP_S = 0.01
"""that a step takes at least: a hold comes within a few tokens of where it is meant to, on any machine"""
FACTOR = 0.5
"""between old and new weights: enough that a token's log-prob tells them apart"""

serve = runpy.run_path(str(HERE / "bare_server.py"))["serve"]


def respond(server, name, **sampling):
    """A running request for each prompt, greedy by default."""
    sampling = {"temperature": 0.0, "ignore_eos": True, "logprobs": True, "detokenize": False, **sampling}
    return [
        asyncio.ensure_future(server.generate(prompt, dict(sampling), f"{name}-{i}"))
        for i, prompt in enumerate(PROMPTS)
    ]


async def until(server, tokens):
    """Wait until ``REQUESTS`` requests have made ``tokens`` each on average; the engine may be within a step."""
    from recipe.partial_rollout.engine.hold import tokens_made

    async with asyncio.timeout(60):
        while sum(tokens_made(server.engine).values()) < tokens * REQUESTS:
            await asyncio.sleep(0.001)


async def held_often(server, name):
    """Every greedy request's output, with a hold at each of ``HOLDS``."""
    running = respond(server, name)
    for version, at in enumerate(HOLDS, 1):
        await until(server, at - 1)
        await asyncio.sleep(0.05)
        await server.hold()
        await server.clear_kv_cache()
        server.global_steps = version
        await server.resume_generation()
    outputs = await asyncio.wait_for(asyncio.gather(*running), 60)
    server.global_steps = 0
    return outputs


async def log_probs_of(engine, outputs, name):
    """[tokens] for each output: what the engine's present weights say of its tokens."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    async def score(i, prompt, tokens):
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        whole = TokensPrompt(prompt_token_ids=[*prompt, *tokens])
        async for output in engine.generate(prompt=whole, sampling_params=params, request_id=f"{name}-{i}"):
            rows = output.prompt_logprobs
        return np.array([rows[len(prompt) + j][token].logprob for j, token in enumerate(tokens)])

    return await asyncio.gather(
        *[score(i, prompt, list(out.token_ids)) for i, (prompt, out) in enumerate(zip(PROMPTS, outputs, strict=True))]
    )


async def held_for_new_weights(engine, server):
    """Sampled requests that were held once, for new weights; and their tokens' log-probs under the old and the new ones."""
    running = respond(server, "weights", temperature=1.0, seed=7)
    await until(server, RESPONSE / 2)
    await server.hold()
    norms = await engine.collective_rpc("scale_norms", args=(FACTOR,))
    assert norms[0] > 2
    await server.clear_kv_cache()
    server.global_steps = 1
    await server.resume_generation()
    outputs = await asyncio.wait_for(asyncio.gather(*running), 60)
    new = await log_probs_of(engine, outputs, "new")
    await engine.collective_rpc("scale_norms", args=(1 / FACTOR,))
    old = await log_probs_of(engine, outputs, "old")
    return SimpleNamespace(outputs=outputs, new=new, old=old)


@pytest.fixture(scope="module")
def held(on_engine):
    """One engine, held by the recipe's server with either ``resume_kv``, then for new weights."""

    async def body(engine):
        from recipe.partial_rollout.engine.replica import RecipeVLLMServer

        await engine.collective_rpc("slow_steps", args=(STEP_S,))
        servers = {kv: serve(engine, RecipeVLLMServer, RESPONSE, kv) for kv in ("recompute", "keep")}
        found = SimpleNamespace(plain=await asyncio.gather(*respond(servers["keep"], "plain")))
        for kv, server in servers.items():
            setattr(found, kv, await held_often(server, kv))
        found.weights = await held_for_new_weights(engine, servers["recompute"])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        return on_engine(
            body,
            max_num_seqs=REQUESTS,
            enable_prefix_caching=True,
            worker_extension_cls="new_weights.NewWeights",
        )


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_greedy_responses_are_the_same_however_often_the_engine_was_held(held, kv):
    for output, plain in zip(getattr(held, kv), held.plain, strict=True):
        assert list(output.token_ids) == list(plain.token_ids) and len(output.token_ids) == RESPONSE
        np.testing.assert_allclose(output.log_probs, plain.log_probs, atol=1e-4)
        assert output.stop_reason == "completed"


def test_tokens_before_the_mark_are_of_the_old_weights_and_later_ones_new(held):
    for output, old, new in zip(held.weights.outputs, held.weights.old, held.weights.new, strict=True):
        ((tokens, version),) = output.extra_fields["version_marks"]
        assert version == 0 and RESPONSE / 4 < tokens < RESPONSE
        said = np.array(output.log_probs)
        np.testing.assert_allclose(said[:tokens], old[:tokens], atol=1e-3)
        np.testing.assert_allclose(said[tokens:], new[tokens:], atol=1e-3)
        assert np.abs(old - new)[[tokens - 1, tokens]].max() > 1e-2, "or the boundary would not be tested"
