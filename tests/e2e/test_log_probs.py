"""An interrupted sample carries exactly the engine's log-probs: a real vLLM engine, interrupted at every token."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from verl.workers.rollout.replica import TokenOutput

from recipe.partial_rollout.kept_kv import SaltedEngine, request_id_of
from recipe.partial_rollout.live_sample import LIVE_SAMPLE, LiveSample
from recipe.partial_rollout.llm_client import PartialRolloutLLMClient

PROMPT, RESPONSE, BLOCK = [4, 7, 8, 9, 10, 11], 48, 32
ROLLOUT = SimpleNamespace(response_length=RESPONSE, prompt_length=16, scheduling_policy="fcfs", name="vllm")


class Keeper:
    """Grants at once."""

    @contextlib.asynccontextmanager
    async def engine_call(self, sample):
        yield

    def hand_in(self, sample):
        pass


class Server:
    """A replica's ``generate`` on ``engine``; aborts each request once it has made ``interrupt_after`` tokens."""

    def __init__(self, engine, interrupt_after):
        self.generate = SimpleNamespace(remote=self._generate)
        self._engine = engine
        self._interrupt_after = interrupt_after

    async def _generate(self, request_id, prompt_ids, sampling_params, **options):
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**{**sampling_params, "logprobs": 0}, output_kind=RequestOutputKind.DELTA)
        tokens, log_probs, stop_reason = [], [], "completed"
        prompt = TokensPrompt(prompt_token_ids=prompt_ids)
        async for output in self._engine.generate(prompt=prompt, sampling_params=params, request_id=request_id):
            part = output.outputs[0]
            tokens += part.token_ids
            log_probs += [row[token].logprob for token, row in zip(part.token_ids, part.logprobs, strict=True)]
            if len(tokens) >= self._interrupt_after and not output.finished:
                await self._engine.abort(request_id)
                stop_reason = "aborted"
                break
        return TokenOutput(
            token_ids=tokens,
            log_probs=log_probs,
            stop_reason=stop_reason,
            extra_fields={"global_steps": 0, "num_cached_tokens": output.num_cached_tokens},
        )


async def response_of(engine, interrupt_after):
    """(tokens, log-probs, segments, tokens read again) of one greedy response through the recipe's client."""
    client = PartialRolloutLLMClient(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=ROLLOUT)))
    client.use_replicas({"replica": Server(engine, interrupt_after)})
    sample = LiveSample(f"s{interrupt_after}", Keeper(), priority=0)
    LIVE_SAMPLE.set(sample)
    output = await client.generate(
        "r", prompt_ids=PROMPT, sampling_params={"temperature": 0.0, "logprobs": True, "ignore_eos": True}
    )
    read_again = sum(call.resumed_tokens for call in client.take_calls())
    return np.array(output.token_ids), np.array(output.log_probs), sample.segments, read_again


@pytest.fixture(scope="module")
def responses(on_engine):
    """By the number of tokens after which every call is interrupted; None: not interrupted."""

    async def body(engine):
        return {every: await response_of(engine, every or RESPONSE) for every in (None, 1, 7)}

    return on_engine(body, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def kept(on_engine):
    """A response interrupted after every 7 tokens whose KV blocks are kept; who finds how many of them."""

    async def body(engine):
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        salted = SaltedEngine(engine, lambda: 0)
        response = await response_of(salted, 7)
        found = {}
        for name, request_id in (("its own", request_id_of("s7")), ("another", request_id_of("s8")), ("none", "r")):
            prompt = TokensPrompt(prompt_token_ids=[*PROMPT, *response[0].tolist()])
            async for output in salted.generate(
                prompt=prompt, sampling_params=SamplingParams(max_tokens=1), request_id=request_id
            ):
                found[name] = output.num_cached_tokens
        return response, found

    return on_engine(body, enable_prefix_caching=True, block_size=BLOCK)


def test_kept_blocks_are_not_read_again(responses, kept):
    tokens, log_probs, _, _ = responses[None]
    (kept_tokens, kept_log_probs, segments, read_again), _ = kept
    np.testing.assert_array_equal(kept_tokens, tokens)
    np.testing.assert_allclose(kept_log_probs, log_probs, rtol=0, atol=1e-5)
    lengths = len(PROMPT) + np.cumsum([len(segment) for segment in segments])[:-1]
    # Of the last full block at least one token is read again: the one whose logits come next.
    assert read_again == sum(length - (length - 1) // BLOCK * BLOCK for length in lengths) < responses[7][3]


def test_kept_blocks_serve_no_other_sample(kept):
    assert kept[1] == {"its own": BLOCK, "another": 0, "none": 0}


@pytest.mark.parametrize("every", [1, 7])
def test_interrupted_response_is_the_uninterrupted_one(responses, every):
    tokens, log_probs, whole, _ = responses[None]
    resumed_tokens, resumed_log_probs, segments, _ = responses[every]
    assert len(whole) == 1 and len(tokens) == RESPONSE
    # An abort may find one more token made than it was sent for.
    assert RESPONSE / (every + 1) <= len(segments) <= -(-RESPONSE // every)
    np.testing.assert_array_equal(resumed_tokens, tokens)
    np.testing.assert_allclose(resumed_log_probs, log_probs, rtol=0, atol=1e-5)


def test_segments_are_the_response_in_order(responses):
    tokens, log_probs, segments, _ = responses[1]
    np.testing.assert_array_equal(np.concatenate([segment.token_ids for segment in segments]), tokens)
    np.testing.assert_array_equal(
        np.concatenate([segment.log_probs for segment in segments]), log_probs.astype(np.float32)
    )


def test_log_probs_are_those_of_the_models_forward_pass(responses, task):
    tokens, log_probs, _, _ = responses[1]
    model = AutoModelForCausalLM.from_pretrained(task / "task" / "model", dtype=torch.float32).eval()
    ids = torch.tensor([[*PROMPT, *tokens.tolist()]])
    with torch.no_grad():
        scores = model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = scores[torch.arange(RESPONSE), torch.tensor(tokens)]
    np.testing.assert_allclose(log_probs, expected.numpy(), rtol=0, atol=1e-5)
