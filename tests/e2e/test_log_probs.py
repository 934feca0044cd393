"""An interrupted sample carries exactly the engine's log-probs: a real vLLM engine, interrupted at every token."""

import asyncio
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from verl.workers.rollout.replica import TokenOutput

from recipe.partial_rollout.engine.hold import request_id_of, salt_of
from recipe.partial_rollout.engine.replica import AdmittingEngine
from recipe.partial_rollout.tasks.clock10.tokenizer import VOCABULARY_SIZE, build_tokenizer
from recipe.partial_rollout.worker.llm_client import PartialRolloutLLMClient, ReplicaChoice
from tests.unit.shared import Claims, live_sample

PROMPT, RESPONSE, BLOCK = [4, 7, 8, 9, 10, 11], 48, 32
ODD = (40, 41, 42)
"""letters that no answer to the prompt has"""
UNCACHED = {"skip_reading_prefix_cache": True}
"""sampling of a request that finds no kept blocks"""
ROLLOUT = SimpleNamespace(response_length=RESPONSE, prompt_length=16, name="vllm", temperature=0.0)
CONFIG = SimpleNamespace(
    actor_rollout_ref=SimpleNamespace(rollout=ROLLOUT),
    partial_rollout=SimpleNamespace(correction="none", resume_kv="recompute"),
)


class Server:
    """A replica's ``generate`` on ``engine``; aborts each request after ``interrupt_after`` tokens or one more."""

    def __init__(self, engine, interrupt_after):
        self.generate = SimpleNamespace(remote=self._generate)
        self._engine = engine
        self._interrupt_after = interrupt_after

    async def _generate(self, request_id, prompt_ids, sampling_params, **options):
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**{**sampling_params, "logprobs": 0}, output_kind=RequestOutputKind.DELTA)
        asked = params.max_tokens
        # On a busy machine the engine makes more before the abort reaches it.
        params.max_tokens = min(asked, max(self._interrupt_after + 1, params.min_tokens))
        tokens, log_probs, stop_reason = [], [], "completed"
        prompt = TokensPrompt(prompt_token_ids=prompt_ids)
        async for output in self._engine.generate(prompt=prompt, sampling_params=params, request_id=request_id):
            if output is None:
                continue
            part = output.outputs[0]
            tokens += part.token_ids
            log_probs += [row[token].logprob for token, row in zip(part.token_ids, part.logprobs, strict=True)]
            cut_short = not output.finished or (part.finish_reason == "length" and len(tokens) < asked)
            if len(tokens) >= self._interrupt_after and cut_short:
                await self._engine.abort(request_id)
                stop_reason = "aborted"
                break
        return TokenOutput(
            token_ids=tokens,
            log_probs=log_probs,
            stop_reason=stop_reason,
            extra_fields={"global_steps": 0, "num_cached_tokens": output.num_cached_tokens},
        )


async def response_of(engine, interrupt_after, **sampling):
    """(tokens, log-probs, segments, tokens read again) of one response, greedy by default, through the recipe's client."""
    client = PartialRolloutLLMClient(CONFIG)
    client.replicas = ReplicaChoice({"replica": Server(engine, interrupt_after)})
    client.tokenizer, client.claims = build_tokenizer(), Claims()
    sample = live_sample(id=f"s{interrupt_after}")
    output = await client.generate_turn(
        sample,
        prompt_ids=PROMPT,
        sampling_params={"temperature": 0.0, "logprobs": True, "ignore_eos": True, **sampling},
    )
    read_again = sum(call.resumed_tokens for call in client.take_calls())
    return np.array(output.token_ids), np.array(output.log_probs), sample.segments, read_again


async def found_by(engine, request_id, prompt):
    """Tokens of ``prompt`` that a request finds in the cache."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    tokens = TokensPrompt(prompt_token_ids=prompt)
    async for output in engine.generate(
        prompt=tokens, sampling_params=SamplingParams(max_tokens=1), request_id=request_id
    ):
        found = output and output.num_cached_tokens
    return found


async def kept_by(engine):
    """A response interrupted after every 7 tokens whose KV blocks are kept; who finds how many of them."""
    version = 0
    salted = AdmittingEngine(engine, lambda request_id: salt_of(request_id, version))
    response = await response_of(salted, 7)
    whole = [*PROMPT, *response[0].tolist()]
    version = 1
    found = {
        "its own": await found_by(salted, request_id_of("s7", 0), whole),
        "another group": await found_by(salted, request_id_of("s8", 0), whole),
        "sibling of later weights": await found_by(salted, request_id_of("s7", None), whole),
        "validation": await found_by(salted, "r", whole),
    }
    # A prompt of more than a block is read once by siblings, under the weights that they start with.
    for version in (1, 2):
        found[f"siblings at {version}"] = [
            await found_by(salted, request_id_of("0/4", None), PROMPT * 8) for _ in range(2)
        ]
    return response, found


def late_string(tokens):
    """Of the texts of three tokens in a row, the one that first occurs latest."""
    letters = build_tokenizer().batch_decode([[token] for token in tokens], skip_special_tokens=True)
    triples = [parts for parts in zip(letters, letters[1:], letters[2:], strict=False) if all(parts)]
    return max(map("".join, triples), key="".join(letters).find)


async def sampled_by(engine):
    """Segments (token lists) of responses, by the tokens after which every call is interrupted, for what each test asks."""

    async def segments(every, **sampling):
        _, _, made, _ = await response_of(engine, every, **UNCACHED, **sampling)
        return [segment.token_ids.tolist() for segment in made]

    (plain,) = await segments(RESPONSE)
    stop = late_string(plain)
    # Whatever the model would say ends the response.
    ends = {"stop_token_ids": sorted({*range(VOCABULARY_SIZE)} - {*ODD})}
    return SimpleNamespace(
        stop=stop,
        stopped={every: await segments(every, stop=[stop]) for every in (RESPONSE, 1, 2)},
        unasked=await segments(RESPONSE, **ends),
        least={every: await segments(every, min_tokens=9, **ends) for every in (RESPONSE, 1, 4)},
    )


@pytest.fixture(scope="module")
def found(on_engine):
    """Responses by the number of tokens after which every call is interrupted (None: not interrupted), kept, sampled."""

    async def body(engine):
        kept = await kept_by(engine)
        responses = {every: await response_of(engine, every or RESPONSE, **UNCACHED) for every in (None, 1, 7)}
        return SimpleNamespace(responses=responses, kept=kept, sampled=await sampled_by(engine))

    return on_engine(body, enable_prefix_caching=True, block_size=BLOCK, skip_tokenizer_init=False)


def test_kept_blocks_are_not_read_again(found):
    tokens, log_probs, _, _ = found.responses[None]
    (kept_tokens, kept_log_probs, segments, read_again), _ = found.kept
    np.testing.assert_array_equal(kept_tokens, tokens)
    np.testing.assert_allclose(kept_log_probs, log_probs, rtol=0, atol=1e-5)
    lengths = len(PROMPT) + np.cumsum([len(segment) for segment in segments])[:-1]
    # Of the last full block at least one token is read again: the one whose logits come next.
    assert read_again == sum(length - (length - 1) // BLOCK * BLOCK for length in lengths) < found.responses[7][3]


def test_kept_blocks_serve_no_other_group_and_no_other_weights(found):
    own = {"its own": BLOCK, "siblings at 1": [0, BLOCK], "siblings at 2": [0, BLOCK]}
    assert found.kept[1] == {**own, "another group": 0, "sibling of later weights": 0, "validation": 0}


@pytest.mark.parametrize("every", [1, 7])
def test_interrupted_response_is_the_uninterrupted_one(found, every):
    tokens, log_probs, whole, _ = found.responses[None]
    resumed_tokens, resumed_log_probs, segments, _ = found.responses[every]
    assert len(whole) == 1 and len(tokens) == RESPONSE
    assert RESPONSE / (every + 1) <= len(segments) <= -(-RESPONSE // every)
    np.testing.assert_array_equal(resumed_tokens, tokens)
    np.testing.assert_allclose(resumed_log_probs, log_probs, rtol=0, atol=1e-5)


def test_log_probs_are_those_of_the_models_forward_pass(found, task):
    tokens, log_probs, _, _ = found.responses[1]
    model = AutoModelForCausalLM.from_pretrained(task / "task" / "model", dtype=torch.float32).eval()
    ids = torch.tensor([[*PROMPT, *tokens.tolist()]])
    with torch.no_grad():
        scores = model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    expected = scores[torch.arange(RESPONSE), torch.tensor(tokens)]
    np.testing.assert_allclose(log_probs, expected.numpy(), rtol=0, atol=1e-5)


def test_stop_string_is_found_wherever_the_response_is_cut(found):
    sampled = found.sampled
    (whole,) = sampled.stopped[RESPONSE]
    assert build_tokenizer().decode(whole, skip_special_tokens=True).endswith(sampled.stop)
    for every in (1, 2):
        assert [*chain(*sampled.stopped[every])] == whole
    # Three tokens make the string, and no call but the last made more than two: it lies across cuts.
    assert len(sampled.stopped[1]) > 1 and len(sampled.stopped[1][-1]) < 3


def test_least_number_of_tokens_is_that_of_the_response(found):
    least, (unasked,) = found.sampled.least, found.sampled.unasked
    (whole,) = least[RESPONSE]
    assert len(unasked) < 9 < len(whole) < RESPONSE and {*whole[:9]} <= {*ODD}
    for every in (1, 4):
        assert len(least[every]) > 1 and [*chain(*least[every])] == whole


@pytest.mark.nightly
@pytest.mark.parametrize("on_engine", ["synchronous"], indirect=True)
def test_tokens_in_pieces_are_the_same_to_the_last_bit(on_engine):
    async def body(engine):
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        front = AdmittingEngine(engine)

        async def response(i):
            params = SamplingParams(seed=i, max_tokens=30 + 11 * i, ignore_eos=True, logprobs=0, detokenize=False)
            prompt = TokensPrompt(prompt_token_ids=[*PROMPT, 12 + i])
            *_, last = [
                output async for output in front.generate(prompt=prompt, sampling_params=params, request_id=f"r{i}")
            ]
            (answer,) = last.outputs
            rows = zip(answer.token_ids, answer.logprobs, strict=True)
            return [(token, row[token].logprob) for token, row in rows]

        return await asyncio.gather(*map(response, range(8)))

    whole = on_engine(body, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")
    assert on_engine(body) == whole and sum(map(len, whole)) == 8 * 30 + 11 * 28
