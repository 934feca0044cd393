"""A finished sample's tokens are the engine's, turn by turn: with verl's own tool loop where the template trims a token."""

import asyncio
import contextlib
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
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample
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


class Keeper:
    """Grants at once."""

    @contextlib.asynccontextmanager
    async def engine_call(self, sample):
        yield

    def release_slot(self, sample):
        pass

    def report_now(self, sample):
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


def answer(*ids, version=0, stop="completed"):
    return TokenOutput(
        token_ids=list(ids),
        log_probs=[-0.1 * (position + 1) - version for position in range(len(ids))],
        stop_reason=stop,
        extra_fields={"global_steps": version},
    )


def look():
    return ToolResponse(text="see"), 0.0, {}


def play(engine, *answers, response_length=40):
    """(sample, output) of verl's tool loop with GLM's boundary rules over the recipe's client."""
    multi_turn = SimpleNamespace(
        max_user_turns=None,
        max_assistant_turns=None,
        max_parallel_calls=1,
        max_tool_response_length=99,
        tool_response_truncate_side="left",
        format="observation",
    )
    rollout = SimpleNamespace(
        response_length=response_length,
        prompt_length=8,
        scheduling_policy="fcfs",
        name="vllm",
        multi_turn=multi_turn,
        full_determinism=False,
    )
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    engine.answers = list(answers)

    async def run():
        sample = LiveSample("0/0#0", Keeper(), priority=0)
        LIVE_SAMPLE.set(sample)
        loop = ToolAgentLoop(
            DictConfigWrap(config),
            PartialRolloutLLMClient(config),
            GlmTokenizer(),
            None,
            None,
            DictConfigWrap({}),
            hf_model_type="glm4_moe",
            tools=ToolListWrap([FunctionTool(name="look", fn=look, tool_schema=SCHEMA, is_async=False)]),
        )
        return sample, await loop.run({}, raw_prompt=[{"role": "user", "content": "go"}])

    return asyncio.run(run())


def generated(output):
    mask = output.response_mask.astype(bool)
    return output.response_ids[mask].tolist(), output.versions[mask].tolist(), output.log_probs[mask]


def test_turn_whose_boundary_token_the_template_trims_is_aligned(engine):
    sample, output = play(engine, answer(50, 51, OBSERVATION, version=3), answer(52, 53, USER, version=4))
    made = sample_output(sample, output)
    tokens, versions, log_probs = generated(made)
    assert sum(map(len, sample.segments)) == 6 and tokens == [50, 51, 52, 53, USER]
    assert versions == [3, 3, 4, 4, 4]
    np.testing.assert_array_equal(log_probs, np.float32([-3.1, -3.2, -4.1, -4.2, -4.3]))
    assert len(made.response_ids) == len(made.response_mask) == len(made.log_probs) == len(made.versions)
    assert (made.versions[made.response_mask == 0] == -1).all() and (made.log_probs[made.response_mask == 0] == 0).all()


def test_turns_made_of_interrupted_calls_are_aligned(engine):
    sample, output = play(
        engine,
        answer(50, version=1, stop="aborted"),
        answer(51, OBSERVATION, version=2),
        answer(52, version=2, stop="aborted"),
        answer(OBSERVATION, version=3),
        answer(54, USER, version=3),
    )
    tokens, versions, _ = generated(sample_output(sample, output))
    assert tokens == [50, 51, 52, 54, USER] and versions == [1, 2, 2, 3, 3]


def test_response_cut_at_its_budget_keeps_the_front_of_its_last_turn(engine):
    # 2 tokens, 5 of the tool and the next header, then a turn of 4 of which 2 fit.
    sample, output = play(
        engine, answer(50, 51, OBSERVATION, version=1), answer(52, 53, 54, 55, version=2), response_length=9
    )
    made = sample_output(sample, output)
    assert len(made.response_ids) == 9
    assert generated(made)[:2] == ([50, 51, 52, 53], [1, 1, 2, 2])


def test_repeated_tokens_keep_the_versions_of_their_own_turn(engine):
    # A search for the tokens in order would find the second turn's 50 behind the first turn's 50.
    sample, output = play(
        engine,
        answer(50, 50, OBSERVATION, version=1),
        answer(50, 50, OBSERVATION, version=2),
        answer(OBSERVATION, version=3, stop="aborted"),
        answer(50, USER, version=4),
    )
    assert generated(sample_output(sample, output))[:2] == (
        [50, 50, 50, 50, OBSERVATION, 50, USER],
        [1, 1, 2, 2, 3, 4, 4],
    )


def played(*turns):
    """A sample with ``turns`` (start, version, tokens)."""
    sample = LiveSample("0/0#0", Keeper(), priority=0)
    for start, version, tokens in turns:
        sample.start_turn(start)
        ids = np.array(tokens, np.int32)
        sample.add(Segment(ids, -0.1 * ids.astype(np.float32) - version, version, "stop"))
    return sample


def returned(response, mask, log_probs, prompt=(7, 8)):
    return AgentLoopOutput(
        prompt_ids=list(prompt),
        response_ids=response,
        response_mask=mask,
        response_logprobs=log_probs,
        num_turns=2,
        metrics=AgentLoopMetrics(),
    )


def test_turn_that_the_loop_drops_whole_is_not_mistaken_for_the_next():
    # Both turns are token 5 at one position: only where the prompts ended says which of them is in the response.
    sample = played((2, 1, [5]), (2, 2, [5]))
    made = sample_output(sample, returned([5], [1], [-2.5]))
    assert made.versions.tolist() == [2]


def test_turn_without_tokens_takes_no_place():
    sample = played((2, 1, [5]), (3, 2, [6]))
    sample.start_turn(3)
    made = sample_output(sample, returned([5, 6], [1, 1], None))
    assert made.versions.tolist() == [1, 2]


def test_output_says_how_many_tool_calls_were_replayed_and_asked_for():
    sample = played((2, 1, [5]))
    sample.calls_replayed, sample.calls_asked = 2, 1
    metrics = sample_output(sample, returned([5], [1], None)).metrics
    assert (metrics["calls_replayed"], metrics["calls_asked"]) == (2, 1)


def test_log_probs_come_from_the_engine_where_the_loop_returns_none():
    made = sample_output(played((2, 1, [5, 6])), returned([5, 6, 9], [1, 1, 0], None))
    np.testing.assert_array_equal(made.log_probs, np.float32([-1.5, -1.6, 0]))


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
