"""What an agent loop asks of the engine in its own way: sampling parameters, kinds of prompts; and odd log-probs."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import BatchEncoding
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.function_tool import FunctionTool
from verl.utils.dataset.rl_dataset import RLHFDataset

from tests.unit.loop_life import Life, config_of, output_of, play
from tests.unit.shared import byte_tokenizer, tool_schema
from tests.unit.test_tool_recipes import CHATML

PROMPT = [7, 8, 9]
TOKENIZER = byte_tokenizer(CHATML, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])
QUESTION = {"role": "user", "content": "1+2=_"}


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
        {"input_ids": np.array([PROMPT])},
        BatchEncoding({"input_ids": PROMPT, "attention_mask": [1, 1, 1]}),
        BatchEncoding({"input_ids": torch.tensor([PROMPT])}),
    ],
    ids=["array", "tensor [1, L]", "nested list", "dictionary", "BatchEncoding", "BatchEncoding [1, L]"],
)
def test_prompt_may_be_of_any_kind_that_verls_server_takes(prompt):
    async def loop(client, row, params):
        answer = await call(client, prompt, **params)
        return output_of(PROMPT, answer.token_ids, response_logprobs=answer.log_probs)

    assert not trained(loop).masked


@pytest.mark.parametrize("gives", [True, False])
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, None])
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


class WithSystemPrompt(AgentLoopBase):
    """Adds to the row's prompt, as docs/own_job.md shows it."""

    async def run(self, sampling_params, *, raw_prompt, **row):
        system = {"role": "system", "content": "1+2*3" * row.get("repeats", 0)}
        prompt = await self.ct_build_initial_tokens([system, *raw_prompt])
        answer = await self.server_manager.generate("r", prompt_ids=prompt, sampling_params=sampling_params)
        return output_of(prompt, answer.token_ids, response_logprobs=answer.log_probs)


def with_tools(count):
    schema = tool_schema("add")
    return ToolListWrap(
        [FunctionTool(name=f"add{i}", fn=sum, tool_schema=schema, is_async=False) for i in range(count)]
    )


@pytest.mark.parametrize("enough", [False, True])
@pytest.mark.parametrize(
    ("kind", "tools", "row"),
    [
        (SingleTurnAgentLoop, 0, {"raw_prompt": [QUESTION] * 3}),
        (WithSystemPrompt, 0, {"raw_prompt": [QUESTION], "repeats": 12}),
        (ToolAgentLoop, 3, {"raw_prompt": [QUESTION]}),
    ],
)
def test_prompt_that_verl_would_cut_on_its_left_fails_its_sample_with_key_and_tokens(kind, tools, row, enough):
    """The row alone fits: a loop adds a system prompt, or its template the tools."""
    limit = 2000 if enough else 40
    turns = {"max_user_turns": 1, "max_assistant_turns": 1, "max_parallel_calls": 1, "max_tool_response_length": 9}
    multi_turn = SimpleNamespace(format="hermes", tool_response_truncate_side="left", **turns)
    config = config_of(64, limit, multi_turn=multi_turn, full_determinism=False)

    async def loop(client, _, params):
        more = {"hf_model_type": "qwen3", "tools": with_tools(tools)}
        made = kind(DictConfigWrap(config), client, TOKENIZER, None, RLHFDataset, DictConfigWrap({}), **more)
        return await made.run({**params, "max_tokens": 4}, **row)

    async def story(life):
        (output,) = await life.train()
        if not enough:
            with pytest.raises(ValueError, match=r"rollout\.prompt_length=40"):
                await life.validate({})
        return output

    output = play(lambda: Life(loop, [{}], config=config), story)
    if enough:
        assert not output.masked and len(output.prompt_ids) > 40
    else:
        said = output.extra_fields["sample_error"]
        assert (
            output.masked and "a prompt of " in said and "tokens (actor_rollout_ref.rollout.prompt_length=40)" in said
        )
