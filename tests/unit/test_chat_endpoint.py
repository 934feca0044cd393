"""Agents that speak to an OpenAI-compatible server are trained on the tokens that the engine made for them."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from openai import AsyncOpenAI, BadRequestError, InternalServerError, NotFoundError, OpenAI
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from recipe.partial_rollout.tasks.calculator.conversation import call, evaluate
from recipe.partial_rollout.tasks.calculator.tokenizer import build_tokenizer
from recipe.partial_rollout.tasks.chat_endpoint import ChatEndpoint
from tests.unit.loop_life import Engine, Life, config_of, play, transcripts

TOKENIZER = build_tokenizer()
BUILDER = create_continuous_token_builder(TOKENIZER, hf_model_type="qwen3")
ASSISTANT, EOS = TOKENIZER.convert_tokens_to_ids("assistant"), TOKENIZER.eos_token_id
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR = {"name": "calculator", "description": "Calculates.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": CALCULATOR}]
ROOM = 160


class Guesser(Engine):
    """Calls the calculator twice, then answers; what it asks depends on all that has been said."""

    eos = EOS

    def token(self, context, nonce):
        begins = len(context) - 1 - context[::-1].index(ASSISTANT) + 2
        a, b = (sum(context[:begins]) + nonce) % 10, begins % 10
        text = call(f"{a}+{b}") if context.count(ASSISTANT) < 3 else f"!{a}{b}"
        return [*TOKENIZER.encode(text), EOS][len(context) - begins]


class Agent(AgentLoopBase):
    """An agent loop with a chat endpoint; ``run`` is the agent's."""

    def __init__(self, server_manager):
        self.server_manager, self.tokenizer, self.continuous_token_builder = server_manager, TOKENIZER, BUILDER
        multi_turn = SimpleNamespace(format="hermes")
        self.rollout_config = SimpleNamespace(response_length=ROOM, prompt_length=64, multi_turn=multi_turn)
        self.loop = asyncio.get_running_loop()

    async def run(self, sampling_params, **row):
        raise NotImplementedError


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


def client_of(chat, kind=AsyncOpenAI, **options):
    return kind(base_url=chat.url, api_key="none", **{"timeout": None, "max_retries": 0, **options})


def asking(client, **request):
    return lambda **more: client.chat.completions.create(model="policy", **{"tools": TOOLS, **request, **more})


def trained(agent, **settings):
    """The output of ``agent(chat, client, row)`` cut after every token, and its life."""

    async def loop(server, row, params):
        output = None
        async with ChatEndpoint(Agent(server), params) as chat, client_of(chat) as client:
            output = await agent(chat, client, row)
        return output or chat.output()

    def life():
        made = Life(loop, [{}], config=config_of(ROOM, 64), **settings)
        made.engine = Guesser()
        made.engine.cut_after = 1
        return made

    async def story(life):
        (output,) = await life.train()
        return output, life

    return play(life, story)


def words(output):
    """What the model said itself, and what else it read."""
    own, read = (
        [t for t, bit in zip(output.response_ids, output.response_mask, strict=True) if bit == b] for b in (1, 0)
    )
    return TOKENIZER.decode(own), TOKENIZER.decode(read)


# -- conversations -------------------------------------------------------------------------------------------------------


def agents():
    async def loop(server, row, params):
        async with ChatEndpoint(Agent(server), params) as chat, client_of(chat) as client:
            await converse(asking(client), [question(row["number"] % 10)])
        return chat.output()

    return loop, lambda: None


def test_agent_on_the_openai_client_says_and_earns_what_it_does_undisturbed():
    """Cut at every token; workers killed; each reward fails once; validation every second step."""

    def prepare(life):
        life.engine = Guesser()

    settings = {"prepare": prepare, "config": config_of(ROOM, 64), "deaths": ((2, 60), (3, 120))}
    undisturbed, (validated,) = transcripts(agents, range(6), disturbed=False, **settings)
    disturbed, validations = transcripts(agents, range(6), disturbed=True, **settings)
    assert disturbed == undisturbed and len(undisturbed) == 6
    assert validations and all(list(validation) == list(validated) for validation in validations)


def test_tokens_of_all_turns_are_trained_and_what_the_tool_said_is_read():
    async def agent(chat, client, row):
        completion = await converse(asking(client), [question()])
        assert completion.choices[0].finish_reason == "stop" and completion.usage.completion_tokens == 4

    output, life = trained(agent)
    said, read = words(output)
    first, second, last, _ = said.split("<|im_end|>")
    assert first.startswith("<tool_call>") and second.startswith("<tool_call>") and last[0] == "!"
    assert read.count("tool\n") == 2 and output.num_turns == 6 and life.figures()["failures/failed_total"] == 0
    assert len(life.engine.asked) == sum(output.response_mask), "cut after every token"
    assert TOKENIZER.decode(output.prompt_ids) == "<|im_start|>user\n0?2=_<|im_end|>\n<|im_start|>assistant\n"


def test_of_candidates_beside_each_other_the_one_that_the_loop_names_is_trained():
    async def agent(chat, client, row):
        first, *_ = await asyncio.gather(*[converse(asking(client), [question(i)]) for i in (3, 4)])
        judge = [{"role": "user", "content": first.choices[0].message.content}]
        await asking(client, tools=None, max_tokens=1)(messages=judge)
        return chat.output(first.id)

    output, _ = trained(agent, slots=2)
    assert not output.masked and TOKENIZER.decode(output.prompt_ids).startswith("<|im_start|>user\n3?2=_")
    assert output.metrics["untrained_tokens"] > sum(output.response_mask) / 2


def test_synchronous_agent_in_a_thread_of_its_own_is_served():
    async def agent(chat, client, row):
        def work():
            with client_of(chat, OpenAI) as synchronous:
                messages = [question()]
                for _ in range(3):
                    message = asking(synchronous)(messages=messages).choices[0].message
                    messages += [message.model_dump(), {"role": "user", "content": "0"}]

        await asyncio.to_thread(work)

    output, _ = trained(agent)
    assert not output.masked and words(output)[0].count("<|im_end|>") == 3


@pytest.mark.parametrize(
    "arguments", ['{"expression": "1+2"}', '{"expression": "1+', "", '"1+2"', "[1]", "null", "NaN"]
)
def test_tool_call_whose_arguments_are_no_json_object_is_the_agents_to_answer(monkeypatch, arguments):
    """verl's parser of gpt-oss hands them on as the model has said them."""

    class Raw(ToolParser):
        async def extract_tool_calls(self, ids, tools=None):
            return "", [FunctionCall(name="calculator", arguments=arguments)] if len(ids) > 5 else []

    monkeypatch.setitem(ToolParser._registry, "hermes", Raw)

    async def agent(chat, client, row):
        messages = [question()]
        while (message := (await asking(client)(messages=messages)).choices[0].message).tool_calls:
            assert [each.function.arguments for each in message.tool_calls] == [arguments]
            said = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1"}
            messages += [message.model_dump(), said]

    output, _ = trained(agent)
    assert not output.masked, output.extra_fields
    assert words(output)[0].count("<|im_end|>") == 3 and words(output)[1].count("tool\n") == 2


EXAMPLES = [question(1), {"role": "assistant", "content": "!11"}]


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
    async def agent(chat, client, row):
        messages, request = [question()], {}
        answer = (await asking(client)(messages=messages)).choices[0].message.model_dump()
        messages += [answer, {"role": "tool", "content": "1", "tool_call_id": answer["tool_calls"][0]["id"]}]
        change(messages, request)
        await asking(client, **request)(messages=messages)

    output, _ = trained(agent)
    assert output.masked == refused
    assert not refused or "the client went on from answers, or with tools" in output.extra_fields["sample_error"]


def test_conversation_may_begin_with_examples():
    async def agent(chat, client, row):
        for _ in range(2):
            completion = await asking(client)(messages=[*EXAMPLES, question()])
        return chat.output(completion.id)

    output, _ = trained(agent)
    assert not output.masked and "!11" in TOKENIZER.decode(output.prompt_ids)


# -- ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"stream": True}, "stream=True is not served: an answer comes whole"),
        ({"temperature": 0.5}, "temperature=0.5 is not served"),
        ({"response_format": {"type": "json_object"}}, "response_format="),
        ({"messages": []}, "messages: the last must be a question"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages: KeyError: 'text'"),
        ({"messages": [{"content": "1"}]}, "messages: KeyError: 'role'"),
    ],
)
def test_what_is_not_served_is_an_error_of_the_api_in_words(request_, said):
    async def agent(chat, client, row):
        with pytest.raises(BadRequestError) as refused:
            await asking(client, messages=[question()])(**request_)
        assert said in refused.value.message and refused.value.code == "invalid_request_error"
        await asking(client, stream=False, temperature=None)(messages=[question()])

    output, _ = trained(agent)
    assert not output.masked, output.extra_fields


def test_client_that_gives_up_or_is_left_behind_withdraws_its_call():
    async def agent(chat, client, row):
        ask = asking(client, tools=None, messages=[question()])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(), 0.003)
        await ask(max_tokens=1)
        agent.left = asyncio.ensure_future(ask(messages=[question(5)]))
        await asyncio.sleep(0.01)
        return chat.output()

    output, life = trained(agent, tick=0.002)
    assert not output.masked and sum(output.response_mask) == 1 and not life.engine.running and agent.left.done()


def test_agent_that_has_used_all_its_tokens_up_ends_there_and_is_trained():
    async def agent(chat, client, row):
        messages = [question()]
        while True:
            message = (await asking(client, tools=None)(messages=messages)).choices[0].message
            messages += [message.model_dump(), question()]

    output, _ = trained(agent)
    assert not output.masked and ROOM - 20 < output.response_length <= ROOM and set(output.response_mask) == {0, 1}


def test_what_fails_behind_the_endpoint_is_what_the_sample_failed_of():
    async def agent(chat, client, row):
        chat._sampling_params["presence_penalty"] = 1.0
        with pytest.raises(InternalServerError, match="presence_penalty"):
            await asking(client)(messages=[question()])
        await asking(client)(messages=[question()])

    output, _ = trained(agent)
    assert output.extra_fields["sample_error"].startswith(
        "SamplingError: sample 0/0#0: its agent loop asks for presence"
    )


def test_endpoint_serves_its_own_sample_and_ends_with_it():
    urls = []

    async def agent(chat, client, row):
        urls.append(chat.url)
        port, stale = chat.url.split("/")[2], "http://{}/0123/v1".format
        with pytest.raises(NotFoundError, match="only chat/completions of a running sample"):
            await asking(AsyncOpenAI(base_url=stale(port), api_key="none", max_retries=0))(messages=[question()])
        await asking(client)(messages=[question()])

    output, _ = trained(agent)
    assert not output.masked and urls[0].startswith("http://127.0.0.1:")
    with pytest.raises(OSError):
        asyncio.run(asyncio.open_connection("127.0.0.1", int(urls[0].split(":")[2].split("/")[0])))
