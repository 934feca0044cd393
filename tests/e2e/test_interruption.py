"""Interruption of a real engine with a long queue: verl's own server decodes the queue first, ours aborts it at once."""

import asyncio
import json
import runpy
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

SEATS, QUEUED, RESPONSE = 4, 100, 100
STEP_S = 0.01
"""Added to an engine's step: the test's own loop, which shares the machine with it, never comes too late to interrupt."""
PROMPT = [4, 7, 8, 9, 10, 11]
ENDS, LEAST = [7, 8, 9], 40
"""end tokens of the model's generation config; no sample that ends by them is shorter than ``LEAST``"""

HERE = Path(__file__).parent
serve = runpy.run_path(str(HERE / "bare_server.py"))["serve"]


def start(server, count, name, **sampling):
    """``count`` requests that end at their budget, the first of them first in priority."""
    sampling = {"temperature": 1.0, "ignore_eos": True, "logprobs": True, "detokenize": False, **sampling}
    return [
        asyncio.ensure_future(server.generate(PROMPT, dict(sampling), f"{name}-{i}", priority=i)) for i in range(count)
    ]


async def interrupt_in_full_run(server, name):
    """Interrupt once all seats decode and the rest is queued; (seconds that it took, every request's output)."""
    requests = start(server, SEATS + QUEUED, name)
    states = server.engine.output_processor.request_states
    async with asyncio.timeout(60):
        while sum(not state.is_prefilling for state in states.values()) < SEATS or len(states) < SEATS + QUEUED:
            await asyncio.sleep(0.002)
    began = time.monotonic()
    await server.abort_all_requests(reject_request=True)
    took = time.monotonic() - began
    done = [request.done() for request in requests]
    outputs = await asyncio.wait_for(asyncio.gather(*requests), 60)
    assert all(done), "every request had come back when the interruption had"
    return took, outputs


async def resume_to_the_end(server):
    """Requests that an end token ends, interrupted on their way and resumed; (tokens before, tokens after) of each."""
    from recipe.partial_rollout.engine.hold import tokens_made
    from recipe.partial_rollout.worker.llm_client import sampling_of_call

    await server.resume_generation()
    sampling = {"temperature": 1.0, "min_tokens": LEAST, "logprobs": True}
    requests = start(server, 4 * SEATS, "cut", **sampling, ignore_eos=False)
    async with asyncio.timeout(60):
        while sum(tokens_made(server.engine).values()) < SEATS * LEAST // 4:
            await asyncio.sleep(0.002)
    await server.abort_all_requests()
    cut = [list(output.token_ids) for output in await asyncio.wait_for(asyncio.gather(*requests), 60)]
    await server.resume_generation()
    resumed = [
        server.generate([*PROMPT, *made], sampling_of_call(sampling, RESPONSE, len(made)), f"resumed-{i}")
        for i, made in enumerate(cut)
    ]
    ended = await asyncio.wait_for(asyncio.gather(*resumed), 60)
    return [(made, list(output.token_ids)) for made, output in zip(cut, ended, strict=True)]


@pytest.fixture(scope="module")
def interruptions(on_engine, tmp_path_factory):
    """Of verl's own server, of ours, and of ours again right after it resumed; then requests that go on to their ends."""

    async def body(engine):
        from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

        from recipe.partial_rollout.engine.replica import RecipeVLLMServer

        await engine.get_supported_tasks()
        verls, ours = serve(engine, vLLMHttpServer), serve(engine, RecipeVLLMServer)
        taken = SimpleNamespace()
        taken.verls = await interrupt_in_full_run(verls, "verls")
        await verls.resume_generation()
        await engine.collective_rpc("slow_steps", args=(STEP_S,))
        taken.ours = await interrupt_in_full_run(ours, "ours")
        await ours.resume_generation()
        taken.again = await interrupt_in_full_run(ours, "again")
        taken.ended = await resume_to_the_end(ours)
        taken.left = len(engine.output_processor.request_states)
        return taken

    generation = tmp_path_factory.mktemp("generation")
    (generation / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        return on_engine(
            body,
            generation_config=str(generation),
            max_num_seqs=SEATS,
            disable_log_stats=False,
            scheduling_policy="priority",
            enable_prefix_caching=False,
            worker_extension_cls="new_weights.NewWeights",
        )


def test_verls_own_interruption_decodes_its_queue(interruptions):
    """Fails once verl mends it: ``AdmittingEngine`` may then go."""
    _, outputs = interruptions.verls
    assert all(output.token_ids for output in outputs)
    assert sum(output.stop_reason == "completed" for output in outputs) >= QUEUED


@pytest.mark.parametrize("which", ["ours", "again"])
def test_queued_requests_come_back_at_once_without_a_token(interruptions, which):
    took, outputs = getattr(interruptions, which)
    assert took < interruptions.verls[0] / 4
    assert {output.stop_reason for output in outputs} == {"aborted"}
    running = [output for output in outputs if output.token_ids]
    queued = [output for output in outputs if not output.token_ids]
    assert (len(running), len(queued)) == (SEATS, QUEUED)
    for output in running:
        assert 0 < len(output.token_ids) < RESPONSE and len(output.log_probs) == len(output.token_ids)
        assert all(log_prob < 0 for log_prob in output.log_probs)
    assert not any(output.log_probs for output in queued)
    # Of those in the queue it is all their time: the first waited longer than who got a seat before it.
    queued_s = [[output.extra_fields["queued_s"] for output in part] for part in (running, queued)]
    assert min(queued_s[0]) >= 0 and max(queued_s[0]) < max(queued_s[1])


def test_every_end_token_ends_a_resumed_sample_after_its_least_tokens(interruptions):
    assert any(before and after for before, after in interruptions.ended)
    for before, after in interruptions.ended:
        tokens = before + after
        assert LEAST <= len(tokens) <= RESPONSE and not set(ENDS) & set(tokens[:-1])
        assert tokens[-1] in ENDS or len(tokens) == RESPONSE
    assert interruptions.left == 0, "something is left in the engine"
