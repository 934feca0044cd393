"""An interrupted engine call goes on from its own tokens; the agent loop above sees one answer."""

import asyncio
import contextlib
import math
from copy import deepcopy

import numpy as np
import pytest
from PIL import Image
from ray.exceptions import ActorUnavailableError, RayActorError
from verl.workers.rollout.replica import TokenOutput

from recipe.partial_rollout import waits
from recipe.partial_rollout.checkpoint.row_images import digest
from recipe.partial_rollout.manager.types import Segment
from recipe.partial_rollout.tasks.clock10.tokenizer import build_tokenizer
from recipe.partial_rollout.waits import InfraError
from recipe.partial_rollout.worker.live_sample import SampleClock, context_hash, digest_of
from recipe.partial_rollout.worker.llm_client import PartialRolloutLLMClient, ReplicaChoice, SampleClient
from tests.unit.loop_life import config_of
from tests.unit.shared import Claims, live_sample

TOKENIZER = build_tokenizer()


def tokens(*ids, stop="completed", version=0, marks=None, **fields):
    return TokenOutput(
        token_ids=list(ids),
        log_probs=[-0.1 * i for i in ids],
        stop_reason=stop,
        extra_fields={"global_steps": version} | ({"version_marks": marks} if marks else {}) | fields,
    )


def client_of(replicas="", **rollout):
    """A client that chooses among ``replicas``, or has the one that is scripted."""
    client = PartialRolloutLLMClient(config_of(10, 4, correction="decoupled", **rollout))
    client.tokenizer, client.claims = TOKENIZER, Claims()
    if replicas:
        client.replicas = ReplicaChoice(dict.fromkeys(replicas))
    return client


def generate(client, sample, prompt=(1, 2, 3), params=None, **sampling_params):
    """What the agent loop of ``sample``, or of a validation, gets from ``client``."""

    async def run():
        clock = SampleClock("validation row 0") if sample is None else sample.clock
        asking = SampleClient(client, sample, clock)
        return await asking.generate("r", prompt_ids=list(prompt), sampling_params=params or sampling_params)

    return asyncio.run(run())


def test_aborted_call_resumes_from_its_tokens_with_the_rest_of_its_budget(engine):
    engine.answers = [tokens(5, 6, 7, stop="aborted", version=3), tokens(8, version=4)]
    params = {"temperature": 1.0, "max_new_tokens": 9, "min_tokens": 4}
    client, sample = client_of(), live_sample()
    output = generate(client, sample, params=params)
    assert output.token_ids == [5, 6, 7, 8] and of(sample.segments) == [([5, 6, 7], 3, None), ([8], 4, "completed")]
    assert output.log_probs == pytest.approx([-0.5, -0.6, -0.7, -0.8])
    assert of(client.claims.segments) == [([5, 6, 7], 3, None)]
    first = {"temperature": 1.0, "logprobs": True, "detokenize": False, "max_tokens": 9, "min_tokens": 4}
    second = first | {"max_tokens": 6, "min_tokens": 1}
    assert [request[1:3] for request in engine.asked] == [([1, 2, 3], first), ([1, 2, 3, 5, 6, 7], second)]
    assert params == {"temperature": 1.0, "max_new_tokens": 9, "min_tokens": 4}, "the caller's are left alone"


@pytest.mark.parametrize(
    ("log_probs", "said"),
    [
        (None, "calculate_log_probs=True"),
        *[([-0.5, value], "as the log-prob of token") for value in (math.nan, -math.inf, math.inf, None)],
    ],
)
def test_answer_without_a_number_as_log_prob_of_each_token_is_refused(engine, log_probs, said):
    engine.answers = [tokens(5, 6)]
    engine.answers[0].log_probs = log_probs
    with pytest.raises(RuntimeError, match=said):
        generate(client_of(), live_sample(), prompt=range(12))
    assert engine.asked[0][2]["max_tokens"] == 2, "a later turn has the rest of the response"


def of(segments):
    """Tokens, version and stop reason of each segment; checks the log-probs."""
    for segment in segments:
        assert segment.log_probs == pytest.approx(-0.1 * segment.token_ids)
    return [(list(segment.token_ids), segment.version, segment.stop_reason) for segment in segments]


HELD = tokens(5, 6, 7, 8, version=6, marks=[(1, 3), (3, 4)])
HELD_AND_INTERRUPTED = tokens(5, 6, 7, stop="aborted", version=4, marks=[(2, 3)])


@pytest.mark.parametrize(
    ("answers", "params", "segments", "handed_in"),
    [
        # It never left its engine.
        ([HELD], {}, [([5], 3, None), ([6, 7], 4, None), ([8], 6, "completed")], []),
        # It ended in its hold.
        ([tokens(5, 6, version=4, marks=[(2, 3)])], {}, [([5, 6], 3, "completed")], []),
        (
            [HELD_AND_INTERRUPTED, tokens(8, version=5)],
            {},
            [([5, 6], 3, None), ([7], 4, None), ([8], 5, "completed")],
            [([5, 6], 3, None), ([7], 4, None)],
        ),
        # Aborted at its budget it is complete.
        ([HELD_AND_INTERRUPTED], {"max_tokens": 3}, [([5, 6], 3, None), ([7], 4, "completed")], []),
        ([tokens(5, 6, stop="aborted", version=4)], {"max_tokens": 2}, [([5, 6], 4, "completed")], []),
    ],
)
def test_held_call_is_a_segment_for_each_version(engine, answers, params, segments, handed_in):
    engine.answers, client, sample = deepcopy(answers), client_of(), live_sample()
    output = generate(client, sample, **params)
    assert of(sample.segments) == segments and output.token_ids == [i for ids, *_ in segments for i in ids]
    versions = [version for _, version, _ in segments]
    fields = output.extra_fields
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (min(versions), max(versions))
    assert "version_marks" not in fields and output.stop_reason == "completed"
    assert of(client.claims.segments) == handed_in and engine.answers == []


def test_call_aborted_without_a_token_adds_no_segment(engine):
    queued = tokens(stop="aborted")
    engine.answers = [queued, queued.model_copy(deep=True), tokens(5, 6, stop="aborted"), tokens(stop="aborted")]
    engine.answers += [tokens(7)]
    queued.log_probs = None
    client, sample = client_of(), live_sample(order=7)
    assert generate(client, sample).token_ids == [5, 6, 7]
    assert [options["priority"] for *_, options in engine.asked] == [7] * 5
    assert of(sample.segments) == [([5, 6], 0, None), ([7], 0, "completed")]
    assert [call.resumed_tokens for call in client.take_calls()] == [0, 0, 0, 0, 5], "what was queued read nothing"


def test_turn_after_a_tool_reads_again_what_the_replica_has_lost(engine):
    engine.answers = [tokens(5, 6), tokens(stop="aborted"), tokens(7, stop="aborted", num_cached_tokens=4), tokens(8)]
    client, sample = client_of(), live_sample()
    generate(client, sample)
    generate(client, sample, prompt=(1, 2, 3, 5, 6, 90, 91))
    # 90 and 91, the tool's, are new to it. A call that was aborted in the queue read nothing; the last continues the turn.
    assert [call.resumed_tokens for call in client.take_calls()] == [0, 0, 1, 8]


def known(*segments, prompt=(1, 2, 3), **params):
    """Segments of a sample's first turn, which a call with this prompt and these parameters made."""
    asked = digest_of(context_hash(np.array(prompt, np.int32)).digest(), params)
    return [
        Segment(np.array(ids, np.int32), np.array(ids, np.float32) * -0.1, version, stop, 0, asked)
        for ids, version, stop in segments
    ]


def test_turn_that_is_known_goes_on_from_its_tokens_and_is_not_decoded_again(engine):
    """Nor is it given to another call."""
    engine.answers = [tokens(9, version=2), tokens(4)]
    sample = live_sample(known(([5], 0, None), ([6], 1, None)))
    output = generate(client_of(), sample)
    assert (output.token_ids, output.log_probs[:2]) == ([5, 6, 9], pytest.approx([-0.5, -0.6]))
    assert [(context, params["max_tokens"]) for _, context, params, _ in engine.asked] == [([1, 2, 3, 5, 6], 8)]
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (0, 2)
    assert [(list(s.token_ids), s.turn) for s in sample.unsent] == [([9], 0)]
    finished = live_sample(known(([5, 6], 0, "stop")))
    other, first = generate(client_of(), finished, prompt=[1]), generate(client_of(), finished)
    assert (other.token_ids, first.token_ids, first.stop_reason) == ([4], [5, 6], "stop")
    assert len(engine.asked) == 2


REFUSED = {
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "bad_words": ["bad"], "thinking_token_budget": 0, "seed": 7,
    "structured_outputs": {"regex": "a*"}, "repetition_detection": {"min_count": 2}, "prompt_logprobs": 0,
}  # fmt: skip


def test_parameter_that_would_not_survive_an_interruption_is_refused(engine):
    engine.answers = [tokens(5)]
    for key, value in REFUSED.items():
        with pytest.raises(ValueError, match=f"sample 0/0#0: .* asks for {key}=.*enable=False"):
            generate(client_of(), live_sample(), **{key: value})
    assert engine.asked == []
    off = {"presence_penalty": 0.0, "frequency_penalty": 0, "bad_words": [], "repetition_penalty": 1.3, "seed": -1}
    assert generate(client_of(), live_sample(), **off).token_ids == [5]


@pytest.mark.parametrize("given", [lambda image: image, lambda image: [image], lambda image: (image,), np.asarray])
def test_call_may_show_an_image_in_any_form_that_the_engine_takes(engine, given):
    image, sample = Image.new("RGB", (4, 4)), live_sample()
    engine.answers = [tokens(5)]
    call = client_of().generate_turn(sample, prompt_ids=[1], sampling_params={}, image_data=given(image))
    assert asyncio.run(call).token_ids == [5] and sample.turns[0].images == (digest(image),)


def text(letters):
    return TOKENIZER.encode(letters, add_special_tokens=False)


@pytest.mark.parametrize(
    ("answers", "params", "turn"),
    [
        (["abst", "opcdef"], {"stop": ["stop"]}, "abstop"),
        (["abs", "t", "o", "pcdef"], {"stop": "stop"}, "abstop"),
        # The interruption found it complete: there is no further call.
        (["abst", "opc", None], {"stop": ["stop"]}, "abstop"),
        # Of several the earliest counts, and none within the least number of tokens.
        (["ab", "cdefgh"], {"stop": ["fg", "bcd"]}, "abcd"),
        (["abst", "xopcd"], {"stop": ["stop"]}, "abstxopcd"),
        (["ast", "opbstopc"], {"stop": ["stop"], "min_tokens": 6}, "astopbstop"),
        # The token that completes it is kept, whether or not the text would have it.
        (["ast", "opb"], {"stop": ["stop"], "include_stop_str_in_output": False}, "astop"),
        (["ast", "opb"], {"stop": ["stop"], "include_stop_str_in_output": True}, "astop"),
    ],
)
@pytest.mark.parametrize("resumed", [False, True], ids=["asked", "first from a checkpoint"])
def test_stop_string_is_found_across_every_cut(engine, answers, params, turn, resumed):
    """Each call but the last is interrupted."""
    *aborted, last = answers
    segments = known((text(aborted.pop(0)), 0, None), max_tokens=99, **params) if resumed else ()
    sample = live_sample(segments)
    engine.answers = [tokens(*text(letters), stop="aborted") for letters in aborted]
    engine.answers += [] if last is None else [tokens(*text(last))]
    output = generate(client_of(), sample, max_tokens=99, **params)
    assert TOKENIZER.decode(output.token_ids) == turn and engine.answers == []
    assert len(output.log_probs) == len(output.token_ids) == sum(map(len, sample.segments))
    assert sample.segments[-1].stop_reason == output.stop_reason == "completed"


def test_call_whose_replica_died_is_made_again_until_none_is_left(engine):
    client, sample = client_of("ab"), live_sample()
    engine.answers = [tokens(5, stop="aborted"), RayActorError(), tokens(6), RayActorError()]
    assert generate(client, sample).token_ids == [5, 6]
    assert [request[1] for request in engine.asked] == [[1, 2, 3], [1, 2, 3, 5], [1, 2, 3, 5]]
    # b died.
    assert sample.affinity.replica == "a" and [call.replica for call in client.take_calls()] == ["a", "a"]
    with pytest.raises(InfraError, match="vLLM replica a failed on request 0/0#0: "):
        generate(client, live_sample())
    with pytest.raises(InfraError, match="no vLLM replica is left"):
        generate(client, live_sample())
    assert len(engine.asked) == 4


def test_call_that_a_living_replica_refuses_fails(engine):
    engine.answers = [OSError("bad request")]
    with pytest.raises(RuntimeError, match=r"vLLM replica a refused .* OSError: bad request"):
        generate(client_of("ab"), live_sample())


def test_validation_calls_of_a_loop_are_verls_and_go_to_one_replica(engine):
    client, engine.answers = client_of("ab"), [tokens(5, stop="aborted")] * 6

    async def loops():
        own = [SampleClient(client, None, SampleClock(f"validation row {row}")) for row in range(3)]
        return [await each.generate("r", prompt_ids=[1], sampling_params={}) for each in (*own, *reversed(own))]

    assert [output.stop_reason for output in asyncio.run(loops())] == ["aborted"] * 6
    assert engine.asked == [("r", [1], {"detokenize": False}, {})] * 6
    assert [call.replica for call in client.take_calls()] == [*"abaaba"]


def test_engine_calls_are_noted_with_replica_tokens_version_and_sample(engine):
    class Busy(Claims):
        @contextlib.asynccontextmanager
        async def engine_call(self, sample):
            await asyncio.sleep(0.05)
            yield

    engine.answers = [tokens(5, 6, version=9, stop="aborted", queued_s=0.25), tokens(7, version=10)]
    engine.answers += [tokens(5)] * 5
    client = client_of()
    client.claims = Busy()
    assert "queued_s" not in generate(client, live_sample()).extra_fields, "no agent loop carries it on"
    # Without a training sample it has the request id, of verl's or of a loop's own, which is never like a sample's.
    for own in ("0123456789abcdef", 7, ("a", 1), None, "problem#3"):
        asyncio.run(client.generate(own, prompt_ids=[1], sampling_params={}))
    calls = client.take_calls()
    assert [(call.sample, call.interrupted, call.tokens, call.version) for call in calls] == [
        ("0/0#0", True, 2, 9),
        ("0/0#0", False, 1, 10),
        *[(name, False, 1, 0) for name in ("0123456789ab", "7", "('a', 1)", "None", "problem-3")],
    ]
    assert [call.queued_s for call in calls] == [0.25] + [0.0] * 6
    assert [call.waited_s >= 0.05 for call in calls] == [True] * 2 + [False] * 5, "for a slot"
    assert all(call.replica == "replica-7" and call.end >= call.start for call in calls) and client.take_calls() == []


@pytest.mark.parametrize("sample", [live_sample(), None], ids=["training", "validation"])
def test_call_whose_connection_drops_is_made_again(engine, monkeypatch, sample):
    monkeypatch.setattr(waits, "AGAIN_S", 0.001)
    client = client_of("ab")
    engine.answers = [ActorUnavailableError("connection reset", None), *[tokens(i) for i in range(20)]]
    assert generate(client, sample).token_ids == [0]
    for _ in range(19):
        generate(client, live_sample())
    assert len(engine.asked) == 21 and {call.replica for call in client.take_calls()[1:]} == {"a", "b"}
