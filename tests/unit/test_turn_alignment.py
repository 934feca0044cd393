"""A finished sample's tokens are the engine's, turn by turn: with verl's own tool loop where the template trims a token."""

from types import SimpleNamespace

import numpy as np
import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from recipe.partial_rollout.manager.types import Segment
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample, ProbeSlots
from recipe.partial_rollout.worker.llm_client import PartialRolloutLLMClient
from recipe.partial_rollout.worker.turn_alignment import sample_output

USER, ASSISTANT, OBSERVATION = 1, 2, 3
ROLES = {"user": USER, "system": USER, "assistant": ASSISTANT, "tool": OBSERVATION}
SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "looks",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
)


class GlmTokenizer:
    """One token for each role and for each letter of a content, as in GLM: a role's token starts its message."""

    def convert_tokens_to_ids(self, token):
        return {"<|observation|>": OBSERVATION, "<|user|>": USER}[token]

    def apply_chat_template(self, messages, *, add_generation_prompt, **_):
        tokens = []
        for message in messages:
            tokens += [ROLES[message["role"]], *map(ord, message["content"])]
        return tokens + [ASSISTANT] * add_generation_prompt


@ToolParser.register("observation")
class ObservationParser(ToolParser):
    """An answer that ends in the observation token calls ``look``."""

    async def extract_tool_calls(self, responses_ids, tools=None):
        calls = [FunctionCall(name="look", arguments="{}")] if responses_ids[-1] == OBSERVATION else []
        return "x", calls


class Keeper(ProbeSlots):
    """Grants at once."""

    def release_slot(self, sample):
        pass


@pytest.fixture
def engine(monkeypatch):
    """Scripted replica: answers in turn."""
    script = SimpleNamespace(answers=[])

    async def generate(self, request_id, **kwargs):
        await self._acquire_server(request_id)
        return script.answers.pop(0)

    async def acquire(self, request_id, **extra):
        return "r", None

    monkeypatch.setattr(LLMServerClient, "generate", generate)
    monkeypatch.setattr(LLMServerClient, "_acquire_server", acquire)
    return script


def log_probs_of(ids, versions):
    return (np.float32(-0.1) * np.array(ids, np.float32) - np.float32(versions)).tolist()


def answer(*ids, version=0, stop="completed"):
    return TokenOutput(
        token_ids=list(ids),
        log_probs=log_probs_of(ids, version),
        stop_reason=stop,
        extra_fields={"global_steps": version},
    )


def config_of(response_length, tools_format):
    """What verl's tool loop and the client read."""
    multi_turn = {"max_user_turns": None, "max_assistant_turns": None, "max_parallel_calls": 1, "format": tools_format}
    answers = {"max_tool_response_length": 99, "tool_response_truncate_side": "left"}
    rollout = SimpleNamespace(
        response_length=response_length,
        prompt_length=8,
        scheduling_policy="fcfs",
        name="vllm",
        multi_turn=SimpleNamespace(**multi_turn, **answers),
        full_determinism=False,
    )
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))


def loop_of(config, tools):
    """verl's tool loop with GLM's boundary rules over the recipe's client."""
    return ToolAgentLoop(
        DictConfigWrap(config),
        PartialRolloutLLMClient(config),
        GlmTokenizer(),
        None,
        None,
        DictConfigWrap({}),
        hf_model_type="glm4_moe",
        tools=ToolListWrap(tools),
    )


def look():
    return ToolResponse(text="see"), 0.0, {}


@pytest.mark.parametrize(
    ("answers", "response_length", "tokens", "versions"),
    [
        (
            [answer(50, 51, OBSERVATION, version=3), answer(52, 53, USER, version=4)],
            40,
            [50, 51, 52, 53, USER],
            [3, 3, 4, 4, 4],
        ),
        (
            [
                answer(50, version=1, stop="aborted"),
                answer(51, OBSERVATION, version=2),
                answer(52, version=2, stop="aborted"),
                answer(OBSERVATION, version=3),
                answer(54, USER, version=3),
            ],
            40,
            [50, 51, 52, 54, USER],
            [1, 2, 2, 3, 3],
        ),
        # 2 tokens, 5 of the tool and the next header, then a turn of 4 of which 2 fit.
        (
            [answer(50, 51, OBSERVATION, version=1), answer(52, 53, 54, 55, version=2)],
            9,
            [50, 51, 52, 53],
            [1, 1, 2, 2],
        ),
        # A search for the tokens in order would find the second turn's 50 behind the first turn's 50.
        (
            [
                answer(50, 50, OBSERVATION, version=1),
                answer(50, 50, OBSERVATION, version=2),
                answer(OBSERVATION, version=3, stop="aborted"),
                answer(50, USER, version=4),
            ],
            40,
            [50, 50, 50, 50, OBSERVATION, 50, USER],
            [1, 1, 2, 2, 3, 4, 4],
        ),
    ],
    ids=["the template trims a boundary", "interrupted calls", "cut at its budget", "repeated tokens"],
)
async def test_token_of_verls_tool_loop_has_the_version_and_log_prob_of_its_call(
    engine, answers, response_length, tokens, versions
):
    engine.answers = list(answers)
    sample = LiveSample("0/0#0", Keeper(), priority=0)
    LIVE_SAMPLE.set(sample)
    tool = FunctionTool(name="look", fn=look, tool_schema=SCHEMA, is_async=False)
    loop = loop_of(config_of(response_length, "observation"), [tool])
    made = sample_output(sample, await loop.run({}, raw_prompt=[{"role": "user", "content": "go"}]))
    mask = made.response_mask.astype(bool)
    assert (made.response_ids[mask].tolist(), made.versions[mask].tolist()) == (tokens, versions)
    assert made.log_probs[mask].tolist() == log_probs_of(tokens, versions)
    assert (made.versions[~mask] == -1).all() and (made.log_probs[~mask] == 0).all()
    assert len(made.response_ids) == len(made.log_probs) == len(made.versions) <= response_length


def played(*turns):
    """A sample with ``turns`` (start, version, tokens)."""
    sample = LiveSample("0/0#0", Keeper(), priority=0)
    for start, version, tokens in turns:
        sample.start_turn(start)
        if tokens:
            log_probs = np.float32(log_probs_of(tokens, version))
            sample.add(Segment(np.array(tokens, np.int32), log_probs, version, "stop"))
    return sample


def returned(response, mask, log_probs):
    return AgentLoopOutput(
        prompt_ids=[7, 8],
        response_ids=response,
        response_mask=mask,
        response_logprobs=log_probs,
        num_turns=2,
        metrics=AgentLoopMetrics(),
    )


@pytest.mark.parametrize(
    ("turns", "response", "log_probs", "versions"),
    [
        # Both turns are token 5 at one position: only where the prompts ended says which of them is in the response.
        ([(2, 1, [5]), (2, 2, [5])], [5], [-2.5], [2]),
        ([(2, 1, [5]), (3, 2, [6]), (3, 3, [])], [5, 6], [-1.5, -2.6], [1, 2]),
        # The loop returns no log-probs.
        ([(2, 1, [5, 6])], [5, 6], None, [1, 1]),
    ],
    ids=["dropped whole", "without tokens", "without log-probs"],
)
def test_turn_that_is_dropped_or_empty_takes_no_place(turns, response, log_probs, versions):
    sample = played(*turns)
    sample.calls_replayed, sample.calls_asked = 2, 1
    made = sample_output(sample, returned(response, [1] * len(response), log_probs))
    assert made.versions.tolist() == versions and made.log_probs.tolist() == log_probs_of(response, versions)
    assert (made.metrics["calls_replayed"], made.metrics["calls_asked"]) == (2, 1)


@pytest.mark.parametrize(
    ("response", "mask", "log_probs", "why"),
    [
        ([5, 9], [1, 1], [-1.5, -1.9], "turn 0"),
        ([5, 6, 6], [1, 1, 1], [-1.5, -1.6, -1.6], "turn 0"),
        ([5, 9, 6], [1, 0, 1], [-1.5, 0.0, -1.6], "turn 0"),
        ([9, 5, 6], [1, 1, 1], [-1.9, -1.5, -1.6], "turn 0"),
        ([5, 6], [1, 1], [-1.5, -1.7], "log-probs"),
        ([5, 6], [1, 1], [-1.5], "log-probs"),
        ([5, 6], [1], [-1.5], "mask"),
    ],
)
def test_tokens_or_log_probs_that_are_not_the_engines_are_refused(response, mask, log_probs, why):
    with pytest.raises(RuntimeError, match=f"sample 0/0#0: .*{why}.*unchanged"):
        sample_output(played((2, 1, [5, 6])), returned(response, mask, log_probs))


def test_tokens_before_the_first_turn_are_nobodys():
    with pytest.raises(RuntimeError, match=r"sample 0/0#0: .* 1 tokens .* no engine call made"):
        sample_output(played((3, 1, [5])), returned([4, 5], [1, 1], [0.0, -1.5]))
