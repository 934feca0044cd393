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
    new = request_id_of("0/4", None)
    first, sibling, other = salts(new, request_id_of("0/4", None), request_id_of("0/5", None))
    assert first == sibling != other
    resumed, late = salts(request_id_of("0/4", 3), request_id_of("0/4", None), version=4)
    assert resumed == first != late, "a resumed sample finds the blocks of the weights that it began with"
    assert salts(request_id_of("0/4", 4), version=5) == [late]


def test_other_requests_find_blocks_of_the_same_weights_only():
    assert salts("a", "b", version=3) == salts("c", "d", version=3) != salts("a", "b", version=4)
    assert salt_of("a", None) != salt_of("a", 0)


@pytest.mark.parametrize(
    ("resume_kv", "asked"),
    [("recompute", [("abort", True, True), "clear"]), ("keep", [("abort", False, True), "mm", "encoder"])],
)
async def test_interruption_and_weight_sync_empty_the_cache_unless_it_is_kept(server, monkeypatch, resume_kv, asked):
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    noted = []

    async def abort(self, reset_prefix_cache=True, reject_request=False):
        noted.append(("abort", reset_prefix_cache, reject_request))

    async def note(name):
        noted.append(name)

    monkeypatch.setattr(vLLMHttpServer, "abort_all_requests", abort)
    monkeypatch.setattr(vLLMHttpServer, "clear_kv_cache", lambda self: note("clear"))
    engine = SimpleNamespace(reset_mm_cache=lambda: note("mm"), reset_encoder_cache=lambda: note("encoder"))
    built = server(engine, resume_kv=resume_kv)
    await built.abort_all_requests(reject_request=True)
    await built.clear_kv_cache()
    assert noted == asked


@pytest.mark.parametrize(
    ("versions", "behaviour", "proximal", "figures"),
    [
        (
            [[1, 2, 2, -1], [2, 2, 2, 2]],
            [[-1.0, -2.0, -3.0, 0.0], [-9.0, -9.0, -9.0, -9.0]],
            [[-7.0, -2.5, -3.1, -5.0], [-1.0, -1.0, -1.0, -1.0]],
            {"tokens": 2, "mean": 0.3, "max": 0.5},
        ),
        ([[2, 2]], [[-1.0, -1.0]], [[-2.0, -2.0]], {"tokens": 0}),
    ],
)
def test_gap_is_of_the_newest_tokens_of_older_samples(versions, behaviour, proximal, figures):
    columns = {"rollout_versions": torch.tensor(versions), "rollout_log_probs": torch.tensor(behaviour)}
    found = kv_gap(TensorDict(columns, len(versions)), torch.tensor(proximal), 2)
    assert found == pytest.approx({f"mismatch/kv_gap_{name}": value for name, value in figures.items()})
