"""An interrupted engine call goes on from its own tokens; the agent loop above sees one answer."""

import asyncio
import contextlib
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError, RayActorError
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from recipe.partial_rollout import waits
from recipe.partial_rollout.manager.types import Segment
from recipe.partial_rollout.records.calls import EngineCall
from recipe.partial_rollout.tasks.clock10.tokenizer import build_tokenizer
from recipe.partial_rollout.waits import ReplicaError
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE, LiveSample
from recipe.partial_rollout.worker.llm_client import ObservedLLMClient, PartialRolloutLLMClient
from recipe.partial_rollout.worker.replica_choice import ReplicaChoice
from recipe.partial_rollout.worker.resumption import SamplingError

ROLLOUT = SimpleNamespace(response_length=10, prompt_length=4, scheduling_policy="fcfs", name="vllm")
CONFIG = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=ROLLOUT))


class Keeper:
    """Grants at once; remembers what was handed in."""

    def __init__(self):
        self.handed_in = []
        self.noted = []

    @contextlib.asynccontextmanager
    async def engine_call(self, sample):
        yield

    def release_slot(self, sample):
        segments, _ = sample.take_unsent()
        self.handed_in += [(sample.id, list(segment.token_ids), segment.version) for segment in segments]

    def report_now(self, sample):
        self.noted.append(sample.take_unsent())


@pytest.fixture
def engine(monkeypatch):
    """Scripted replica: answers in turn and notes every request."""
    script = SimpleNamespace(answers=[], requests=[], priorities=[])

    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        server, _ = await self._acquire_server(request_id)
        script.requests.append((request_id, list(prompt_ids), dict(sampling_params)))
        script.priorities.append(kwargs.get("priority"))
        answer = script.answers.pop(0)
        self._release_server(server, request_id)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def acquire(self, request_id, **extra):
        return "replica-7", None

    def release(self, server_id, request_id=None):
        return None

    monkeypatch.setattr(LLMServerClient, "generate", generate)
    monkeypatch.setattr(LLMServerClient, "_acquire_server", acquire)
    monkeypatch.setattr(LLMServerClient, "_release_server", release)
    return script


def tokens(*ids, stop="completed", version=0, log_probs=True, marks=None):
    return TokenOutput(
        token_ids=list(ids),
        log_probs=[-0.1 * i for i in ids] if log_probs else None,
        stop_reason=stop,
        extra_fields={"global_steps": version} | ({"version_marks": marks} if marks else {}),
    )


def generate(client, sample, **sampling_params):
    async def run():
        LIVE_SAMPLE.set(sample)
        return await client.generate("r", prompt_ids=[1, 2, 3], sampling_params=sampling_params)

    return asyncio.run(run())


def live(keeper=None, **kwargs):
    return LiveSample("0/0#0", keeper or Keeper(), priority=0, **kwargs)


def test_uninterrupted_call_is_one_segment(engine):
    engine.answers = [tokens(5, 6)]
    sample = live()
    output = generate(PartialRolloutLLMClient(CONFIG), sample)
    assert output.token_ids == [5, 6] and len(sample.segments) == 1


def test_aborted_call_resumes_from_its_tokens_with_the_budget_that_is_left(engine):
    engine.answers = [tokens(5, 6, 7, stop="aborted", version=3), tokens(8, version=4)]
    keeper = Keeper()
    sample = live(keeper)
    output = generate(PartialRolloutLLMClient(CONFIG), sample)
    assert output.token_ids == [5, 6, 7, 8]
    assert output.log_probs == pytest.approx([-0.5, -0.6, -0.7, -0.8])
    assert [request[1] for request in engine.requests] == [[1, 2, 3], [1, 2, 3, 5, 6, 7]]
    assert [request[2]["max_tokens"] for request in engine.requests] == [10, 7]
    assert keeper.handed_in == [("0/0#0", [5, 6, 7], 3)]
    assert [segment.version for segment in sample.segments] == [3, 4]
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (3, 4)


def of(segments):
    """Tokens, version and stop reason of each segment; checks the log-probs."""
    for segment in segments:
        assert segment.log_probs == pytest.approx(-0.1 * segment.token_ids)
    return [(list(segment.token_ids), segment.version, segment.stop_reason) for segment in segments]


def test_held_call_is_a_segment_for_each_version_and_none_is_empty(engine):
    engine.answers = [tokens(5, 6, 7, 8, version=6, marks=[(1, 3), (3, 4)])]
    keeper, sample = Keeper(), live()
    sample.keeper = keeper
    output = generate(PartialRolloutLLMClient(CONFIG), sample)
    assert of(sample.segments) == [([5], 3, None), ([6, 7], 4, None), ([8], 6, "completed")]
    assert output.token_ids == [5, 6, 7, 8] and output.stop_reason == "completed"
    assert output.extra_fields == {"global_steps": 6, "min_global_steps": 3, "max_global_steps": 6}
    assert len(engine.requests) == 1 and keeper.handed_in == [], "it never left its engine"


def test_call_that_ended_in_its_hold_has_no_token_of_the_newer_version(engine):
    engine.answers = [tokens(5, 6, version=4, marks=[(2, 3)])]
    sample = live()
    generate(PartialRolloutLLMClient(CONFIG), sample)
    assert of(sample.segments) == [([5, 6], 3, "completed")]


def test_held_call_that_is_interrupted_later_resumes_from_all_its_tokens(engine):
    engine.answers = [tokens(5, 6, 7, stop="aborted", version=4, marks=[(2, 3)]), tokens(8, version=5)]
    keeper = Keeper()
    sample = live(keeper)
    generate(PartialRolloutLLMClient(CONFIG), sample)
    assert of(sample.segments) == [([5, 6], 3, None), ([7], 4, None), ([8], 5, "completed")]
    assert engine.requests[1][1] == [1, 2, 3, 5, 6, 7] and engine.requests[1][2]["max_tokens"] == 7
    assert keeper.handed_in == [("0/0#0", [5, 6], 3), ("0/0#0", [7], 4)]


def test_held_call_aborted_at_its_budget_is_complete(engine):
    engine.answers = [tokens(5, 6, stop="aborted", version=4, marks=[(1, 3)])]
    sample = live()
    assert generate(PartialRolloutLLMClient(CONFIG), sample, max_tokens=2).stop_reason == "completed"
    assert of(sample.segments) == [([5], 3, None), ([6], 4, "completed")]


def test_call_that_was_held_and_aborted_without_a_token_adds_no_segment(engine):
    engine.answers = [tokens(stop="aborted", version=4), tokens(5, version=4)]
    sample = live()
    generate(PartialRolloutLLMClient(CONFIG), sample)
    assert of(sample.segments) == [([5], 4, "completed")]


def test_marks_that_do_not_fit_the_tokens_are_refused(engine):
    engine.answers = [tokens(5, 6, marks=[(3, 3)])]
    with pytest.raises(RuntimeError, match=r"version marks \[\(3, 3\)\] do not fit a request of 2 tokens"):
        generate(PartialRolloutLLMClient(CONFIG), live())


def test_held_sample_goes_on_from_its_journal(engine):
    engine.answers = [tokens(8, version=6)]
    sample = live(restored=journal(([5], 3, None), ([6, 7], 4, None)))
    assert generate(PartialRolloutLLMClient(CONFIG), sample).token_ids == [5, 6, 7, 8]
    assert engine.requests[0][1] == [1, 2, 3, 5, 6, 7]


def test_every_engine_call_has_its_own_request_id(engine):
    engine.answers = [tokens(stop="aborted"), tokens(5)]
    generate(PartialRolloutLLMClient(CONFIG), live())
    assert len({request[0] for request in engine.requests}) == 2


def test_call_refused_without_tokens_adds_no_segment(engine):
    engine.answers = [tokens(stop="aborted", log_probs=False), tokens(5)]
    sample = live()
    assert generate(PartialRolloutLLMClient(CONFIG), sample).token_ids == [5]
    assert len(sample.segments) == 1


def test_call_that_was_aborted_in_the_queue_goes_on_with_its_priority(engine, monkeypatch):
    monkeypatch.setattr(ROLLOUT, "scheduling_policy", "priority")
    engine.answers = [tokens(stop="aborted"), tokens(stop="aborted"), tokens(5)]
    sample = live()
    sample.priority = 7
    assert generate(PartialRolloutLLMClient(CONFIG), sample).token_ids == [5]
    assert engine.priorities == [7, 7, 7] and len(sample.segments) == 1


def test_call_aborted_at_its_budget_is_complete(engine):
    engine.answers = [tokens(5, 6, stop="aborted")]
    output = generate(PartialRolloutLLMClient(CONFIG), live(), max_tokens=2)
    assert output.token_ids == [5, 6] and output.stop_reason == "completed"


def test_budget_of_a_later_turn_counts_what_the_conversation_has_used(engine):
    engine.answers = [tokens(5)]

    async def run():
        LIVE_SAMPLE.set(live())
        client = PartialRolloutLLMClient(CONFIG)
        await client.generate("r", prompt_ids=list(range(12)), sampling_params={})

    asyncio.run(run())
    assert engine.requests[0][2]["max_tokens"] == 2


def test_the_callers_sampling_params_are_left_alone(engine):
    engine.answers = [tokens(5, stop="aborted"), tokens(6)]
    params = {"temperature": 1.0, "max_new_tokens": 4}

    async def run():
        LIVE_SAMPLE.set(live())
        await PartialRolloutLLMClient(CONFIG).generate("r", prompt_ids=[1], sampling_params=params)

    asyncio.run(run())
    assert params == {"temperature": 1.0, "max_new_tokens": 4}
    assert engine.requests[1][2] == {"temperature": 1.0, "max_tokens": 3, "detokenize": False}


def journal(*segments):
    return deque(
        Segment(np.array(ids, np.int32), np.array(ids, np.float32) * -0.1, version, stop)
        for ids, version, stop in segments
    )


def test_sample_goes_on_from_its_journal(engine):
    engine.answers = [tokens(7, version=2)]
    sample = live(restored=journal(([5], 0, None), ([6], 1, None)))
    output = generate(PartialRolloutLLMClient(CONFIG), sample)
    assert output.token_ids == [5, 6, 7]
    assert engine.requests[0][1] == [1, 2, 3, 5, 6] and engine.requests[0][2]["max_tokens"] == 8
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (0, 2)
    assert [list(segment.token_ids) for segment in sample.take_unsent()[0]] == [[7]]


def test_turn_that_the_journal_holds_whole_makes_no_call(engine):
    sample = live(restored=journal(([5], 0, None), ([6], 1, "stop"), ([8], 1, None)))
    output = generate(PartialRolloutLLMClient(CONFIG), sample)
    assert (output.token_ids, output.stop_reason, engine.requests) == ([5, 6], "stop", [])
    assert output.log_probs == pytest.approx([-0.5, -0.6])
    assert [list(segment.token_ids) for segment in sample.restored] == [[8]]


def test_resumed_call_asks_for_the_tokens_that_are_left_of_the_least(engine):
    engine.answers = [tokens(5, 6, stop="aborted"), tokens(7, 8, stop="aborted"), tokens(9)]
    generate(PartialRolloutLLMClient(CONFIG), live(), min_tokens=3)
    assert [request[2]["min_tokens"] for request in engine.requests] == [3, 1, 0]


def seeds(engine, **params):
    engine.answers = [tokens(stop="aborted"), tokens(5, stop="aborted"), tokens(6, stop="aborted"), tokens(7)]
    first = len(engine.requests)
    generate(PartialRolloutLLMClient(CONFIG), live(), **params)
    return [request[2].get("seed") for request in engine.requests[first:]]


def test_seed_differs_with_the_tokens_made_and_only_with_them(engine):
    drawn = seeds(engine, seed=7)
    assert drawn[:2] == [7, 7] and len(set(drawn)) == 3 and all(0 <= seed < 2**31 for seed in drawn)
    assert seeds(engine, seed=7) == drawn
    assert not set(seeds(engine, seed=8)) & set(drawn)
    assert seeds(engine) == [None] * 4 and seeds(engine, seed=-1) == [-1] * 4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("bad_words", ["bad"]),
        ("thinking_token_budget", 0),
        ("structured_outputs", {"regex": "a*"}),
        ("repetition_detection", {"max_pattern_size": 2, "min_count": 2}),
    ],
)
def test_what_the_engine_applies_to_a_calls_own_output_is_refused_before_the_first_call(engine, key, value):
    engine.answers = [tokens(5)]
    with pytest.raises(SamplingError, match=f"sample 0/0#0: .* asks for {key}=.*partial_rollout.enable=False"):
        generate(PartialRolloutLLMClient(CONFIG), live(), **{key: value})
    assert engine.requests == []


def test_parameters_at_the_values_that_switch_them_off_are_accepted(engine):
    engine.answers = [tokens(5)]
    off = {"presence_penalty": 0.0, "frequency_penalty": 0, "bad_words": [], "repetition_penalty": 1.3}
    assert generate(PartialRolloutLLMClient(CONFIG), live(), **off).token_ids == [5]


TOKENIZER = build_tokenizer()


def text(letters):
    return TOKENIZER.encode(letters, add_special_tokens=False)


def stopped(engine, *answers, sample=None, **params):
    """Text of the turn whose calls make ``answers``: each but the last is interrupted."""
    *aborted, last = answers
    engine.answers = [*[tokens(*text(letters), stop="aborted") for letters in aborted], tokens(*text(last))]
    client = PartialRolloutLLMClient(CONFIG)
    client.use_tokenizer(TOKENIZER)
    sample = sample or live()
    output = generate(client, sample, max_tokens=99, **params)
    assert len(output.log_probs) == len(output.token_ids) == sum(map(len, sample.segments))
    assert sample.segments[-1].stop_reason == output.stop_reason == "completed"
    return TOKENIZER.decode(output.token_ids)


def test_stop_string_across_the_cut_ends_the_turn(engine):
    assert stopped(engine, "abst", "opcdef", stop=["stop"]) == "abstop"
    assert stopped(engine, "abs", "t", "o", "pcdef", stop="stop") == "abstop"
    assert engine.answers == []


def test_stop_string_that_an_interruption_found_complete_makes_no_further_call(engine):
    engine.requests.clear()
    assert stopped(engine, "abst", "opc", "never", stop=["stop"]) == "abstop"
    assert len(engine.requests) == 2


def test_earliest_of_several_stop_strings_ends_the_turn(engine):
    assert stopped(engine, "ab", "cdefgh", stop=["fg", "bcd"]) == "abcd"


def test_text_that_is_no_stop_string_is_kept(engine):
    assert stopped(engine, "abst", "xopcd", stop=["stop"]) == "abstxopcd"


def test_stop_string_within_the_least_number_of_tokens_does_not_count(engine):
    assert stopped(engine, "ast", "opbstopc", stop=["stop"], min_tokens=6) == "astopbstop"


def test_token_that_completes_a_stop_string_is_kept_whether_or_not_the_text_would_have_it(engine):
    for included in (False, True):
        assert stopped(engine, "ast", "opb", stop=["stop"], include_stop_str_in_output=included) == "astop"


def test_stop_string_that_begins_in_the_journal_is_found(engine):
    sample = live(restored=journal((text("ast"), 0, None)))
    assert stopped(engine, "opcd", stop=["stop"], sample=sample) == "astop"


@pytest.mark.parametrize("held_after", range(1, 6))
def test_stop_string_across_an_interruption_ends_the_turn_wherever_the_call_was_held(engine, held_after):
    letters = text("opcdef")
    engine.answers = [
        tokens(*text("st"), stop="aborted", version=3),
        tokens(*letters, version=5, marks=[(held_after, 4)]),
    ]
    client, sample = PartialRolloutLLMClient(CONFIG), live()
    client.use_tokenizer(TOKENIZER)
    output = generate(client, sample, max_tokens=99, stop=["stop"])
    assert TOKENIZER.decode(output.token_ids) == "stop" and output.stop_reason == "completed"
    rest = (
        [([letters[0]], 4, None), ([letters[1]], 5, "completed")]
        if held_after == 1
        else [(letters[:2], 4, "completed")]
    )
    assert of(sample.segments) == [(text("st"), 3, None), *rest]


def test_stop_strings_need_a_tokenizer(engine):
    with pytest.raises(SamplingError, match=r"asks for stop=\['x'\].*use stop_token_ids"):
        generate(PartialRolloutLLMClient(CONFIG), live(), stop=["x"])


def test_interrupted_segments_are_open_and_the_last_one_is_closed(engine):
    engine.answers = [tokens(5, stop="aborted"), tokens(6, stop="stop")]
    sample = live()
    generate(PartialRolloutLLMClient(CONFIG), sample)
    assert [segment.stop_reason for segment in sample.segments] == [None, "stop"]


def two_replicas(dead):
    client = PartialRolloutLLMClient(CONFIG)
    client.use_replicas(ReplicaChoice({"a": "A", "b": "B"}))
    died = RayActorError() if dead else OSError("bad request")
    return client, died


def test_call_whose_replica_died_is_made_again_at_another(engine):
    client, died = two_replicas(dead=True)
    engine.answers = [tokens(5, stop="aborted"), died, tokens(6)]
    sample = live()
    assert generate(client, sample).token_ids == [5, 6]
    assert [request[1] for request in engine.requests] == [[1, 2, 3], [1, 2, 3, 5], [1, 2, 3, 5]]
    # The first call ended at a: the next one went to b, which died.
    assert sample.replica == "a" and [call.replica for call in client.take_calls()] == ["a", "a"]


def test_call_fails_once_no_replica_is_left(engine):
    client, died = two_replicas(dead=True)
    engine.answers = [died, died]
    with pytest.raises(ReplicaError, match="vLLM replica b failed"):
        generate(client, live())


def test_request_that_a_living_replica_refuses_is_not_made_again(engine):
    client, refused = two_replicas(dead=False)
    engine.answers = [refused, tokens(5)]
    with pytest.raises(ReplicaError, match="OSError: bad request"):
        generate(client, live())


def test_tokens_without_log_probs_are_refused(engine):
    engine.answers = [tokens(5, 6, log_probs=False)]
    with pytest.raises(RuntimeError, match="calculate_log_probs=True"):
        generate(PartialRolloutLLMClient(CONFIG), live())


def test_validation_call_is_verls_own(engine):
    engine.answers = [tokens(5, stop="aborted", marks=[(1, 3)])]

    async def run():
        return await PartialRolloutLLMClient(CONFIG).generate("r", prompt_ids=[1], sampling_params={"top_p": 1.0})

    output = asyncio.run(run())
    assert output.stop_reason == "aborted" and output.extra_fields == {"global_steps": 0}
    assert engine.requests == [("r", [1], {"top_p": 1.0, "detokenize": False})]


def test_validation_calls_go_to_the_replicas_without_verls_load_balancer_once_that_is_dead(engine, monkeypatch):
    asked = []

    async def acquire(self, request_id, **extra):
        asked.append(request_id)
        raise RayActorError

    def release(self, server_id, request_id=None):
        raise AssertionError("the dead load balancer counts nothing")

    monkeypatch.setattr(LLMServerClient, "_acquire_server", acquire)
    monkeypatch.setattr(LLMServerClient, "_release_server", release)
    client = PartialRolloutLLMClient(CONFIG)
    client.use_replicas(ReplicaChoice({"a": 1, "b": 2}))
    engine.answers = [tokens(i) for i in range(20)]
    assert [generate(client, None).token_ids for _ in range(20)] == [[i] for i in range(20)]
    assert len(asked) == 1


def test_engine_calls_are_noted_with_replica_tokens_and_version(engine):
    engine.answers = [tokens(5, 6, version=9)]

    async def run():
        client = ObservedLLMClient(CONFIG)
        await client.generate("r", prompt_ids=[1], sampling_params={})
        return client.take_calls(), client.take_calls()

    (call,), again = asyncio.run(run())
    assert (call.replica, call.tokens, call.version) == ("replica-7", 2, 9)
    assert call.end >= call.start and again == []


def test_noted_call_names_its_sample_and_says_whether_it_was_interrupted(engine):
    engine.answers = [tokens(5, 6, stop="aborted"), tokens(7)]
    client = PartialRolloutLLMClient(CONFIG)
    generate(client, live())
    assert [(call.sample, call.interrupted) for call in client.take_calls()] == [("0/0#0", True), ("0/0#0", False)]


def test_call_without_a_training_sample_is_noted_under_verls_request_id(engine):
    engine.answers = [tokens(5)]
    client = ObservedLLMClient(CONFIG)
    asyncio.run(client.generate("0123456789abcdef", prompt_ids=[1], sampling_params={}))
    assert client.take_calls()[0].sample == "0123456789ab"


def test_dead_replica_is_named(engine):
    engine.answers = [OSError("engine core is gone")]
    with pytest.raises(ReplicaError, match="vLLM replica replica-7 failed on request 0/0#0@1: OSError: engine core"):
        generate(PartialRolloutLLMClient(CONFIG), live())


def test_training_samples_go_to_the_replica_with_the_fewest_and_stay_for_their_next_turn():
    async def run():
        client = PartialRolloutLLMClient(CONFIG)
        client.use_replicas(ReplicaChoice({"a": "A", "b": "B"}))
        first, second = live(), live()
        chosen = []
        for sample in (first, second, first):
            LIVE_SAMPLE.set(sample)
            chosen.append(await client._acquire_server("r"))
        client._release_server("a", "r")
        client._release_server("a", "r")
        LIVE_SAMPLE.set(live())
        chosen.append(await client._acquire_server("r"))
        return chosen

    assert asyncio.run(run()) == [("a", "A"), ("b", "B"), ("a", "A"), ("a", "A")]


def test_tokens_of_a_call_are_spread_evenly_over_it():
    call = EngineCall("a", start=10.0, end=14.0, tokens=8, version=0)
    assert call.tokens_within(0.0, 99.0) == 8
    assert call.tokens_within(13.0, 99.0) == 2
    assert call.tokens_within(11.0, 12.0) == 2
    assert call.tokens_within(14.0, 99.0) == 0
    assert EngineCall("a", start=10.0, end=10.0, tokens=0, version=0).tokens_within(0.0, 99.0) == 0


def test_request_names_its_group_and_the_weights_of_its_samples_first_token():
    client = PartialRolloutLLMClient(CONFIG)
    sample = live(group="0/0")

    def made_by(version):
        return Segment(np.array([5], np.int32), np.array([-0.1], np.float32), version)

    def named():
        token = LIVE_SAMPLE.set(sample)
        try:
            return client._vllm_request_id("r").rpartition("@")[0]
        finally:
            LIVE_SAMPLE.reset(token)

    assert named() == "0/0@"
    sample.segments = [made_by(3), made_by(4)]
    assert named() == "0/0@3"
    sample.segments = [made_by(-1), made_by(4)]
    assert named() == "0/0@", "unknown weights share nothing with any"


def test_resumed_call_that_was_aborted_in_the_queue_read_nothing_again(engine):
    engine.answers = [tokens(5, 6, stop="aborted"), tokens(stop="aborted"), tokens(7)]
    client = PartialRolloutLLMClient(CONFIG)
    generate(client, live())
    assert [call.resumed_tokens for call in client.take_calls()] == [0, 0, 5]


@pytest.mark.parametrize("sample", [live(), None], ids=["training", "validation"])
def test_call_whose_connection_drops_is_made_again_and_its_replica_stays(engine, monkeypatch, sample):
    monkeypatch.setattr(waits, "AGAIN_S", 0.001)
    client, _ = two_replicas(dead=True)
    engine.answers = [ActorUnavailableError("connection reset", None), *[tokens(i) for i in range(20)]]
    assert generate(client, sample).token_ids == [0]
    for _ in range(19):
        generate(client, live())
    assert len(engine.requests) == 21 and {call.replica for call in client.take_calls()[1:]} == {"a", "b"}


def test_replicas_announced_during_a_call_are_those_of_the_next_one(engine):
    client, _ = two_replicas(dead=True)
    before = client._replicas
    client.use_replicas(ReplicaChoice({"a": "A", "c": "C"}))
    assert client._replicas is before and set(before.servers) == {"a", "c"}
