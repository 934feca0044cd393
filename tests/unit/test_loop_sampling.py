"""What an agent loop asks of the engine in its own way: sampling parameters, kinds of prompts; and odd log-probs."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from tests.unit.loop_life import Life, config_of, output_of, play

PROMPT = [7, 8, 9]


async def call(client, prompt=PROMPT, tokens=4, **params):
    return await client.generate("r", prompt_ids=prompt, sampling_params={"max_tokens": tokens, **params})


def trained(loop, *, correction="decoupled", engine=None):
    """The first output of a round of ``loop``; ``engine(answer, params)`` changes what the engine answers."""
    config = config_of(temperature=1.0)
    config.partial_rollout = SimpleNamespace(correction=correction)

    def life():
        made = Life(loop, [{}] * 2, batch=2, config=config)
        generate = made.engine.generate

        async def answer(request_id, *, sampling_params, **asked):
            answered = await generate(request_id, sampling_params=sampling_params, **asked)
            if not sampling_params.get("logprobs"):
                # As verl's server.
                answered.log_probs = None
            if engine is not None:
                engine(answered)
            return answered

        made.engine.generate = answer
        return made

    return play(life, lambda life: life.train())[0]


def loop_with(**params):
    """A loop of one call, with sampling parameters of its own."""

    async def loop(client, row, _):
        answer = await call(client, **params)
        return output_of(PROMPT, answer.token_ids, response_logprobs=answer.log_probs)

    return loop


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"top_p": 0.7}, "top_p=0.7"),
        ({"top_k": 20}, "top_k=20"),
        ({"min_p": 0.1}, "min_p=0.1"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"min_tokens": 2}, "min_tokens=2"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [3]}, "allowed_token_ids"),
        ({"temperature": 0.0}, "temperature=0.0"),
    ],
)
def test_token_of_another_distribution_than_the_trainers_is_not_compared_with_it(params, named):
    output = trained(loop_with(**params))
    assert output.masked and named in output.extra_fields["sample_error"]
    assert not trained(loop_with(**params), correction="none").masked


def test_call_that_is_not_trained_may_sample_as_it_likes():
    async def judged(client, row, params):
        answer = await call(client, **params)
        await call(client, PROMPT + answer.token_ids, 1, temperature=0.0, top_k=1)
        return output_of(PROMPT, answer.token_ids, response_logprobs=answer.log_probs)

    assert not trained(judged).masked


@pytest.mark.parametrize("params", [{}, {"logprobs": False}, {"logprobs": 1}])
def test_loop_need_not_ask_for_log_probs(params):
    output = trained(loop_with(**params))
    assert not output.masked and output.log_probs.any()


@pytest.mark.parametrize(
    "prompt",
    [
        np.array(PROMPT),
        torch.tensor([PROMPT]),
        [PROMPT],
        BatchEncoding({"input_ids": PROMPT, "attention_mask": [1, 1, 1]}),
        BatchEncoding({"input_ids": torch.tensor([PROMPT])}),
    ],
    ids=["array", "tensor [1, L]", "nested list", "BatchEncoding", "BatchEncoding [1, L]"],
)
def test_prompt_may_be_of_any_kind_that_verls_server_takes(prompt):
    async def loop(client, row, params):
        answer = await call(client, prompt, **params)
        return output_of(PROMPT, answer.token_ids, response_logprobs=answer.log_probs)

    assert not trained(loop).masked


@pytest.mark.parametrize("gives", [True, False])
@pytest.mark.parametrize("value", [math.nan, -math.inf, None])
def test_log_prob_that_is_no_number_costs_its_sample_by_name(value, gives):
    async def loop(client, row, params):
        answer = await call(client, **params)
        return output_of(PROMPT, answer.token_ids, response_logprobs=answer.log_probs if gives else None)

    def engine(answer):
        answer.log_probs[1] = value

    output = trained(loop, engine=engine)
    assert output.masked and "as the log-prob of token" in output.extra_fields["sample_error"]


def test_log_probs_of_the_prompt_are_refused_by_name():
    output = trained(loop_with(prompt_logprobs=0))
    assert output.masked and "prompt_logprobs=0" in output.extra_fields["sample_error"]
