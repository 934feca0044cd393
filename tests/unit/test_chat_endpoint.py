"""Agents that speak to an OpenAI-compatible server are trained on the tokens that the engine made for them."""

import asyncio
import json
import os
from types import SimpleNamespace

import pytest
from openai import AsyncOpenAI, BadRequestError, InternalServerError, NotFoundError
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from recipe.partial_rollout.tasks.calculator.conversation import call, evaluate
from recipe.partial_rollout.tasks.calculator.tokenizer import build_tokenizer
from recipe.partial_rollout.tasks.chat_endpoint import ChatEndpoint
from tests.unit.loop_life import Engine, Life, config_of, play
from tests.unit.shared import tool_schema

TOKENIZER = build_tokenizer()
BUILDER = create_continuous_token_builder(TOKENIZER, hf_model_type="qwen3")
ASSISTANT, EOS = TOKENIZER.convert_tokens_to_ids("assistant"), TOKENIZER.eos_token_id
TOOLS = [tool_schema("calculator").model_dump(exclude_none=True)]
ROOM = 160


def guess(context, number):
    """Calls the calculator twice, then answers; what it asks depends on all that has been said."""
    begins = len(context) - 1 - context[::-1].index(ASSISTANT) + 2
    a, b = (sum(context[:begins]) + number) % 10, begins % 10
    text = call(f"{a}+{b}") if context.count(ASSISTANT) < 3 else f"!{a}{b}"
    return [*TOKENIZER.encode(text), EOS][len(context) - begins]


def agent_of(kind, server_manager):
    """An agent loop of this ``kind``, without verl's set-up."""
    made = object.__new__(kind)
    made.server_manager, made.tokenizer, made.continuous_token_builder = server_manager, TOKENIZER, BUILDER
    made.rollout_config = SimpleNamespace(
        response_length=ROOM, prompt_length=64, multi_turn=SimpleNamespace(format="hermes")
    )
    made.loop = asyncio.get_running_loop()
    return made


def question(number=0):
    return {"role": "user", "content": f"{number}?2=_"}


async def converse(ask, messages):
    """A tool-calling agent on ``ask``, as its author would write it; the last completion."""
    while True:
        completion = await ask(messages=messages)
        message = completion.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return completion
        for each in message.tool_calls:
            said = evaluate(json.loads(each.function.arguments)["expression"])
            messages.append({"role": "tool", "tool_call_id": each.id, "content": said})


def client_of(url):
    return AsyncOpenAI(base_url=url, api_key="none", timeout=None, max_retries=0)


def asking(client, **request):
    return lambda **more: client.chat.completions.create(model="policy", **{"tools": TOOLS, **request, **more})


def trained(agent, **settings):
    """What ``agent(chat, client)`` returns, else the last conversation, cut after every token; and its life.

    The first reward fails.
    """

    async def loop(server, row, params):
        output = None
        async with ChatEndpoint(agent_of(SingleTurnAgentLoop, server), params) as chat, client_of(chat.url) as client:
            output = await agent(chat, client)
        return output or chat.output()

    failed = []

    async def score(output, row):
        if not failed:
            failed.append(output)
            raise ConnectionError("the reward's service is away")
        output.reward_score = 1.0

    async def story(life):
        (output,) = await life.train()
        return output, life

    settings = {"config": config_of(ROOM, 64), "engine": Engine(guess, ends=[EOS], cut_after=1), **settings}
    return play(lambda: Life(loop, [{}], score=score, **settings), story)


def words(output):
    """What the model said itself, and what else it read."""
    mask = output.response_mask.astype(bool)
    return TOKENIZER.decode(output.response_ids[mask]), TOKENIZER.decode(output.response_ids[~mask])


# -- conversations -------------------------------------------------------------------------------------------------------


def test_tokens_of_all_turns_are_trained_and_what_the_tool_said_is_read():
    async def agent(chat, client):
        completion = await converse(asking(client), [question()])
        assert completion.choices[0].finish_reason == "stop" and completion.usage.completion_tokens == 4

    output, life = trained(agent)
    said, read = words(output)
    first, second, last, _ = said.split("<|im_end|>")
    assert first.startswith("<tool_call>") and second.startswith("<tool_call>") and last[0] == "!"
    assert read.count("tool\n") == 2 and output.num_turns == 6 and life.figures()["failures/failed_total"] == 1
    assert len(life.engine.asked) == sum(output.response_mask), "cut after every token"
    assert TOKENIZER.decode(output.prompt_ids) == "<|im_start|>user\n0?2=_<|im_end|>\n<|im_start|>assistant\n"


def test_candidate_that_the_loop_names_is_trained():
    async def agent(chat, client):
        first, *_ = await asyncio.gather(*[converse(asking(client), [question(i)]) for i in (3, 4)])
        judge = [{"role": "user", "content": first.choices[0].message.content}]
        await asking(client, tools=None, max_tokens=1)(messages=judge)
        return chat.output(first.id)

    output, _ = trained(agent, slots=2)
    assert not output.masked and TOKENIZER.decode(output.prompt_ids).startswith("<|im_start|>user\n3?2=_")
    assert output.metrics["untrained_tokens"] > sum(output.response_mask) / 2


@pytest.mark.parametrize("arguments", ['{"expression": "1+', "", "[1]", "null"])
def test_arguments_that_are_no_json_object_are_the_agents_to_answer(monkeypatch, arguments):
    """verl's parser of gpt-oss hands them on as the model has said them."""

    class Raw(ToolParser):
        async def extract_tool_calls(self, ids, tools=None):
            return "", [FunctionCall(name="calculator", arguments=arguments)] if len(ids) > 5 else []

    monkeypatch.setitem(ToolParser._registry, "hermes", Raw)

    async def agent(chat, client):
        messages = [question()]
        while (message := (await asking(client)(messages=messages)).choices[0].message).tool_calls:
            assert [each.function.arguments for each in message.tool_calls] == [arguments]
            said = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1"}
            messages += [message.model_dump(), said]

    output, _ = trained(agent)
    assert not output.masked, output.extra_fields
    assert words(output)[0].count("<|im_end|>") == 3 and words(output)[1].count("tool\n") == 2


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda messages, request: messages[1].update(content="!+"), True),
        (lambda messages, request: messages.pop(0), True),
        (lambda messages, request: messages.insert(0, {"role": "system", "content": "be brief"}), True),
        (lambda messages, request: request.update(tools=None), True),
        (lambda messages, request: messages[1].pop("content"), False),
        (lambda messages, request: messages[1].update(content=[], refusal=None, name=None), False),
    ],
    ids=["an answer", "the question", "a system prompt", "the tools", "no text", "other spelling"],
)
def test_conversation_that_its_client_rewrites_is_refused_by_name(change, refused):
    async def agent(chat, client):
        messages, request = [question()], {}
        answer = (await asking(client)(messages=messages)).choices[0].message.model_dump()
        messages += [answer, {"role": "tool", "content": "1", "tool_call_id": answer["tool_calls"][0]["id"]}]
        change(messages, request)
        await asking(client, **request)(messages=messages)

    output, _ = trained(agent)
    assert output.masked == refused
    assert not refused or "the client went on from answers, or with tools" in output.extra_fields["sample_error"]


def test_history_that_a_client_rewrites_opens_another_row():
    async def agent(chat, client):
        messages = [question()]
        await converse(asking(client), messages)
        summary = {"role": "user", "content": f"so far {messages[-1]['content']}"}
        await converse(asking(client), [question(), messages[1], summary])
        await converse(asking(client), [summary])
        return chat.outputs()

    output, life = trained(agent)
    said = [words(row)[0] for row in output.rows]
    assert not output.masked and len(said) == 3 and all(each.count("<|im_end|>") >= 2 for each in said)
    # The second goes on from the first answer of the first, which trains once.
    assert TOKENIZER.decode(output.rows[2].prompt_ids).startswith("<|im_start|>user\nso far !")
    assert sum(int(row.response_mask.sum()) for row in output.rows) == life.engine.decoded
    assert output.metrics["untrained_tokens"] == 0


def test_answer_that_its_client_has_asked_for_again_counts_once():
    async def agent(chat, client):
        for _ in range(2):
            await asking(client)(messages=[question()])
        await converse(asking(client), [question()])
        for number in (1, 1):
            await asking(client, tools=None)(messages=[question(number)])
        return chat.outputs()

    output, life = trained(agent)
    assert not output.masked and len(output.rows) == 2
    assert sum(int(row.response_mask.sum()) for row in output.rows) < life.engine.decoded
    assert TOKENIZER.decode(output.rows[1].prompt_ids).startswith("<|im_start|>user\n1?2=_")


# -- ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"stream": True}, "stream=True is not served: an answer comes whole"),
        ({"temperature": 0.5}, "temperature=0.5 is not served"),
        ({"response_format": {"type": "json_object"}}, "response_format="),
        ({"messages": []}, "messages: the last must be a question"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "(KeyError: 'text')"),
        ({"messages": [{"content": "1"}]}, "(KeyError: 'role')"),
    ],
)
def test_what_is_not_served_is_an_error_of_the_api_in_words(request_, said):
    async def agent(chat, client):
        with pytest.raises(BadRequestError) as refused:
            await asking(client, messages=[question()])(**request_)
        assert said in refused.value.message and refused.value.code == "invalid_request_error"
        examples = [question(1), {"role": "assistant", "content": "!11"}]
        await asking(client, stream=False, temperature=None)(messages=[*examples, question()])

    output, _ = trained(agent)
    assert not output.masked, output.extra_fields
    assert "!11" in TOKENIZER.decode(output.prompt_ids), "a conversation may begin with examples"


def test_agent_that_has_used_up_all_its_tokens_ends_there_and_is_trained():
    async def agent(chat, client):
        messages = [question()]
        while True:
            message = (await asking(client, tools=None)(messages=messages)).choices[0].message
            messages += [message.model_dump(), question()]

    output, _ = trained(agent)
    assert not output.masked and ROOM - 20 < output.response_length <= ROOM and set(output.response_mask) == {0, 1}


def test_what_fails_behind_the_endpoint_is_what_the_sample_failed_of():
    async def agent(chat, client):
        chat._sampling_params["presence_penalty"] = 1.0
        with pytest.raises(InternalServerError, match="presence_penalty"):
            await asking(client)(messages=[question()])
        await asking(client)(messages=[question()])

    output, _ = trained(agent)
    assert "sample 0/0#0: its agent loop asks for presence" in output.extra_fields["sample_error"]


def test_endpoint_serves_its_own_sample_and_ends_with_it(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.setenv("NO_PROXY", "")
    urls = []

    async def agent(chat, client):
        urls.append(chat.url)
        stale = client_of(f"http://{chat.url.split('/')[2]}/0123/v1")
        with pytest.raises(NotFoundError, match="is not served: send requests to chat/completions"):
            await asking(stale)(messages=[question()])
        await asking(client)(messages=[question()])

    output, _ = trained(agent)
    assert not output.masked and urls[0].startswith("http://127.0.0.1:")
    assert (os.environ["no_proxy"], os.environ["NO_PROXY"]) == ("example.org,127.0.0.1", "127.0.0.1")
    with pytest.raises(OSError):
        asyncio.run(asyncio.open_connection("127.0.0.1", int(urls[0].split(":")[2].split("/")[0])))
