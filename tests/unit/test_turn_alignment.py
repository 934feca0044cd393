"""A finished sample's tokens are the engine's, turn by turn: with verl's own tool loop where the template trims a token."""

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import ToolResponse
from verl.workers.rollout.replica import TokenOutput

from recipe.partial_rollout.manager.types import Segment
from recipe.partial_rollout.worker.agent_loop_worker import sample_output
from recipe.partial_rollout.worker.live_sample import context_hash
from recipe.partial_rollout.worker.llm_client import PartialRolloutLLMClient, SampleClient
from tests.unit import loop_life
from tests.unit.loop_life import function, output_of
from tests.unit.shared import Claims, live_sample

USER, ASSISTANT, OBSERVATION = 1, 2, 3
ROLES = {"user": USER, "system": USER, "assistant": ASSISTANT, "tool": OBSERVATION}


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


def log_probs_of(ids, versions):
    return (np.float32(-0.1) * np.array(ids, np.float32) - np.float32(versions)).tolist()


def config_of(response_length, tools_format):
    """What verl's tool loop and the client read."""
    multi_turn = {
        "max_user_turns": None, "max_assistant_turns": None, "max_parallel_calls": 1, "format": tools_format,
        "max_tool_response_length": 99, "tool_response_truncate_side": "left",
    }  # fmt: skip
    own = {"multi_turn": SimpleNamespace(**multi_turn), "full_determinism": False}
    return loop_life.config_of(response_length, 8, **own)


def loop_of(config, tools, client):
    """verl's tool loop with GLM's boundary rules."""
    parts = DictConfigWrap(config), client, GlmTokenizer(), None, None, DictConfigWrap({})
    return ToolAgentLoop(*parts, hf_model_type="glm4_moe", tools=ToolListWrap(list(tools)))


def look():
    return ToolResponse(text="see"), 0.0, {}


class Call(NamedTuple):
    version: int
    tokens: list[int]
    kept: int
    """tokens that the response keeps"""
    stop: str = "completed"

    def answer(self):
        log_probs, steps = log_probs_of(self.tokens, self.version), {"global_steps": self.version}
        return TokenOutput(token_ids=self.tokens, log_probs=log_probs, stop_reason=self.stop, extra_fields=steps)


@pytest.mark.parametrize(
    ("calls", "response_length"),
    [
        ([Call(1, [50], 1, "aborted"), Call(2, [51, OBSERVATION], 1), Call(4, [52, USER], 2)], 40),
        # 2 tokens, 5 of the tool and the next header, then a turn of 4 of which 2 fit.
        ([Call(1, [50, 51, OBSERVATION], 2), Call(2, [52, 53, 54, 55], 2)], 9),
    ],
    ids=["the template trims a boundary", "cut at its budget"],
)
async def test_token_of_verls_tool_loop_has_its_calls_version_and_log_prob(engine, calls, response_length):
    engine.answers = [call.answer() for call in calls]
    tokens = [token for call in calls for token in call.tokens[: call.kept]]
    versions = [call.version for call in calls for _ in range(call.kept)]
    sample = live_sample()
    config = config_of(response_length, "observation")
    workers = PartialRolloutLLMClient(config)
    workers.claims = Claims()
    client = SampleClient(workers, sample, sample.clock)
    loop = loop_of(config, [function("look", look)], client)
    made = sample_output(sample, [await loop.run({}, raw_prompt=[{"role": "user", "content": "go"}])])
    mask = made.response_mask.astype(bool)
    assert (made.response_ids[mask].tolist(), made.versions[mask].tolist()) == (tokens, versions)
    assert made.log_probs[mask].tolist() == log_probs_of(tokens, versions)
    assert (made.versions[~mask] == -1).all() and (made.log_probs[~mask] == 0).all()
    assert len(made.response_ids) == len(made.log_probs) == len(made.versions) <= response_length


def played(*turns, images=()):
    """A sample whose engine calls had ``turns`` (prompt, version, tokens), each with ``images``."""
    sample = live_sample()
    for prompt, version, tokens in turns:
        turn = sample.start_turn(len(prompt), context_hash(np.array(prompt, np.int32)).digest(), images=images)
        if tokens:
            log_probs = np.float32(log_probs_of(tokens, version))
            sample.add(turn, Segment(np.array(tokens, np.int32), log_probs, version, "stop"))
    return sample


P = [7, 8]
"""the prompt that is trained"""


# Most calls are made where the response begins, most tokens are alike, and most are trained.
TOKENS, MASK, VERSIONS = st.sampled_from([5] * 6 + [6]), st.sampled_from([1, 1, 0]), st.integers(1, 3)
STARTS, OTHERS = st.sampled_from([0, 0, 0, 0, 1, 2, -1]), st.sampled_from([0] * 6 + [1])
TURNS = st.tuples(OTHERS, STARTS, VERSIONS, st.lists(TOKENS, max_size=4))


@given(
    st.lists(TOKENS, min_size=6, max_size=6),
    st.integers(1, 2),
    st.lists(MASK, max_size=4),
    st.lists(TURNS, max_size=5),
    st.none() | VERSIONS,
)
@settings(max_examples=300)
def test_token_counts_for_the_call_that_made_it_in_its_place(whole, prompt, mask, turns, given):
    """Of several calls the one with the longest prompt counts, then the first.

    ``turns``: whether the context is another, where the answer begins in the response, its version and tokens.
    ``given``: version whose log-probs the agent loop returns, if any.
    """
    calls = [(([9] * another + whole)[: prompt + at], version, answer) for another, at, version, answer in turns]
    ids, versions, trained, wrong = whole[prompt : prompt + len(mask)], [-1] * len(mask), set(), set()
    for i in np.flatnonzero(mask):
        so_far = whole[: prompt + i + 1]
        made = [
            (len(asked), -number, version)
            for number, (asked, version, answer) in enumerate(calls)
            if prompt <= len(asked) < len(so_far) and asked + answer[: len(so_far) - len(asked)] == so_far
        ]
        if like := [each for each in made if given in (None, each[2])]:
            start, number, versions[i] = max(like)
            trained.add((number, prompt + i - start))
        else:
            wrong.add("log-probs that are not the engine's" if made else "no engine call made")
    log_probs = None if given is None else (np.array(mask) * np.float32(log_probs_of(ids, given))).tolist()
    sample, output = played(*calls), output_of(whole[:prompt], ids, mask, response_logprobs=log_probs)
    if wrong:
        with pytest.raises(RuntimeError, match="no engine call made" if len(wrong) == 2 else wrong.pop()):
            sample_output(sample, [output])
        return
    made = sample_output(sample, [output])
    assert made.versions.tolist() == versions
    assert made.log_probs.tolist() == (np.array(mask) * np.float32(log_probs_of(ids, np.abs(versions)))).tolist()
    assert made.metrics["untrained_tokens"] == sum(len(answer) for _, _, answer in calls) - len(trained)


def test_response_that_is_not_the_engines_is_refused_in_words():
    why = r"sample 0/0#0: .*2 tokens .* after exactly this context\. A loop that .* a list of outputs"
    with pytest.raises(RuntimeError, match=why):
        sample_output(played((P, 1, [5, 6])), [output_of(P, [5, 9, 6])])


def test_answer_to_other_images_is_not_of_the_context_that_is_trained():
    """Images of one size have the same tokens. A tool's image may come after the answer."""
    sample, output = played((P, 1, [5, 6]), images=(b"red",)), output_of(P, [5, 6])
    assert sample_output(sample, [output], [(b"red", b"blue")]).versions.tolist() == [1, 1]
    for trained in ((b"blue",), ()):
        with pytest.raises(RuntimeError, match=r"after exactly this context\. .*, images included"):
            sample_output(sample, [output], [trained])


def test_each_row_is_matched_to_the_calls_of_its_own_context():
    """A conversation, its summary under a prompt of its own, and what goes on from the summary; one call is given up."""
    sample = played((P, 1, [5, 6]), ([*P, 5, 6, 3], 1, [9]), ([4, 9], 2, [7, 8]), ([4, 9, 7], 2, [11, 12, 13]))
    outputs = [output_of(P, [5, 6, 3, 9], [1, 1, 0, 1]), output_of([4, 9], [7, 8])]
    outputs[-1].reward_score, outputs[-1].extra_fields = 0.5, {"reward_extra_info": {"acc": 1.0}, "own": "b"}
    outputs[0].extra_fields = {"own": "a"}
    made = sample_output(sample, outputs)
    first, last = made.rows
    assert (first.versions.tolist(), last.versions.tolist()) == ([1, 1, -1, 1], [2, 2])
    assert first.log_probs[[0, 1, 3]].tolist() == log_probs_of([5, 6, 9], 1)
    assert [(row.reward_score, row.reward_extra_info) for row in made.rows] == [(0.5, {"acc": 1.0})] * 2
    assert [row.extra_fields for row in made.rows] == [{"own": "a"}, {"own": "b"}]
    assert made.metrics["untrained_tokens"] == 3 and made.response_length == 6 and made.staleness(2) == 1


def test_token_that_two_rows_train_is_decoded_once():
    """Branches share the front from which they part."""
    sample = played((P, 1, [5]), ([*P, 5], 1, [6]), ([*P, 5], 1, [7]))
    made = sample_output(sample, [output_of(P, [5, 6]), output_of(P, [5, 7])])
    assert made.metrics["untrained_tokens"] == 0 and len(made.generated) == 4
    with pytest.raises(RuntimeError, match="1 tokens with mask 1 that no engine call made"):
        sample_output(sample, [output_of(P, [5, 6]), output_of([*P, 5, 6], [7])])
