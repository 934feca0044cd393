"""Kept KV blocks serve the sample they are of and nobody else, and what they change is measured."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from recipe.partial_rollout.engine.kept_kv import SaltedEngine, kv_gap, request_id_of, salt_of


class Engine:
    """Notes the prompts of its requests."""

    model_config = "its own"

    def __init__(self):
        self.prompts = []

    async def generate(self, *, prompt, request_id, sampling_params):
        self.prompts.append(prompt)
        yield sampling_params


def salts(*request_ids, version=3):
    engine = Engine()

    async def run():
        salted = SaltedEngine(engine, lambda: version)
        for request_id in request_ids:
            async for answer in salted.generate(
                prompt={"prompt_token_ids": [1]}, request_id=request_id, sampling_params="params"
            ):
                assert answer == "params"

    asyncio.run(run())
    assert all(prompt["prompt_token_ids"] == [1] for prompt in engine.prompts)
    return [prompt["cache_salt"] for prompt in engine.prompts]


def test_siblings_that_start_under_the_same_weights_share_their_blocks_with_no_other_group():
    first, sibling, other = salts(request_id_of("0/4", None), request_id_of("0/4", None), request_id_of("0/5", None))
    assert first == sibling != other


def test_resumed_sample_finds_the_blocks_of_the_weights_that_it_began_with():
    begun = salts(request_id_of("0/4", None), version=0)
    assert salts(request_id_of("0/4", 0), version=1) == salts(request_id_of("0/4", 0), version=2) == begun


def test_sibling_that_starts_later_finds_no_blocks_of_older_weights():
    resumed, late, late_too = salts(
        request_id_of("0/4", 3), request_id_of("0/4", None), request_id_of("0/4", None), version=4
    )
    assert resumed != late == late_too
    assert salts(request_id_of("0/4", 4), version=5) == [late], "and then its own"


def test_other_requests_find_blocks_of_the_same_weights_only():
    assert salts("a", "b", version=3) == salts("c", "d", version=3)
    assert salts("a", version=3) != salts("a", version=4)
    assert salt_of("a", None) != salt_of("a", 0)


def test_request_ids_of_a_group_differ():
    assert request_id_of("0/4", 0) != request_id_of("0/4", 0)


def test_everything_else_is_the_engines_own():
    assert SaltedEngine(Engine(), lambda: 0).model_config == "its own"


def gap(versions, behaviour, proximal, version=2):
    batch = TensorDict(
        {"rollout_versions": torch.tensor(versions), "rollout_log_probs": torch.tensor(behaviour)}, len(versions)
    )
    return kv_gap(batch, torch.tensor(proximal), version)


def test_gap_is_of_the_newest_tokens_of_older_samples():
    figures = gap(
        versions=[[1, 2, 2, -1], [2, 2, 2, 2]],
        behaviour=[[-1.0, -2.0, -3.0, 0.0], [-9.0, -9.0, -9.0, -9.0]],
        proximal=[[-7.0, -2.5, -3.1, -5.0], [-1.0, -1.0, -1.0, -1.0]],
    )
    assert figures["mismatch/kv_gap_tokens"] == 2
    assert figures["mismatch/kv_gap_mean"] == pytest.approx(0.3)
    assert figures["mismatch/kv_gap_max"] == pytest.approx(0.5)


def test_batch_without_resumed_samples_has_no_gap():
    assert gap([[2, 2]], [[-1.0, -1.0]], [[-2.0, -2.0]]) == {"mismatch/kv_gap_tokens": 0}


@pytest.fixture
def server(monkeypatch):
    """A ``RecipeVLLMServer`` without an engine process; notes what verl's methods are asked."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    from recipe.partial_rollout.engine.replica import RecipeVLLMServer

    def build(resume_kv):
        server = object.__new__(RecipeVLLMServer)
        server.config = SimpleNamespace(custom={"resume_kv": resume_kv})
        server.node_rank, server.asked = 0, []

        async def abort(self, reset_prefix_cache=True, reject_request=False):
            server.asked.append(("abort", reset_prefix_cache, reject_request))

        async def clear(self):
            server.asked.append(("clear",))

        async def note(name):
            server.asked.append((name,))

        monkeypatch.setattr(vLLMHttpServer, "abort_all_requests", abort)
        monkeypatch.setattr(vLLMHttpServer, "clear_kv_cache", clear)
        server.engine = SimpleNamespace(reset_mm_cache=lambda: note("mm"), reset_encoder_cache=lambda: note("encoder"))
        return server

    return build


@pytest.mark.parametrize(
    ("resume_kv", "asked"),
    [
        ("recompute", [("abort", True, True), ("clear",)]),
        ("keep", [("abort", False, True), ("mm",), ("encoder",)]),
    ],
)
def test_interruption_and_weight_sync_empty_the_cache_unless_it_is_kept(server, resume_kv, asked):
    built = server(resume_kv)

    async def run():
        await built.abort_all_requests(reject_request=True)
        await built.clear_kv_cache()

    asyncio.run(run())
    assert built.asked == asked
