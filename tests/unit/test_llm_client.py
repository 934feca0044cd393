"""An interrupted engine call goes on from its own tokens; the agent loop above sees one answer."""

import asyncio
import contextlib
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import RayActorError
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from recipe.partial_rollout.failures import ReplicaError
from recipe.partial_rollout.live_sample import LIVE_SAMPLE, LiveSample
from recipe.partial_rollout.llm_client import EngineCall, ObservedLLMClient, PartialRolloutLLMClient
from recipe.partial_rollout.types import Segment

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

    def hand_in(self, sample):
        segments, _ = sample.take_unsent()
        self.handed_in += [(sample.id, list(segment.token_ids), segment.version) for segment in segments]

    def note(self, sample):
        self.noted.append(sample.take_unsent())


@pytest.fixture
def engine(monkeypatch):
    """Scripted replica: answers in turn and notes every request."""
    script = SimpleNamespace(answers=[], requests=[])

    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
        server, _ = await self._acquire_server(request_id)
        script.requests.append((request_id, list(prompt_ids), dict(sampling_params)))
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


def tokens(*ids, stop="completed", version=0, log_probs=True):
    return TokenOutput(
        token_ids=list(ids),
        log_probs=[-0.1 * i for i in ids] if log_probs else None,
        stop_reason=stop,
        extra_fields={"global_steps": version},
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


def test_every_engine_call_has_its_own_request_id(engine):
    engine.answers = [tokens(stop="aborted"), tokens(5)]
    generate(PartialRolloutLLMClient(CONFIG), live())
    assert len({request[0] for request in engine.requests}) == 2


def test_call_refused_without_tokens_adds_no_segment(engine):
    engine.answers = [tokens(stop="aborted", log_probs=False), tokens(5)]
    sample = live()
    assert generate(PartialRolloutLLMClient(CONFIG), sample).token_ids == [5]
    assert len(sample.segments) == 1


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


def test_interrupted_segments_are_open_and_the_last_one_is_closed(engine):
    engine.answers = [tokens(5, stop="aborted"), tokens(6, stop="stop")]
    sample = live()
    generate(PartialRolloutLLMClient(CONFIG), sample)
    assert [segment.stop_reason for segment in sample.segments] == [None, "stop"]


def two_replicas(dead):
    client = PartialRolloutLLMClient(CONFIG)
    client.use_replicas({"a": "A", "b": "B"})
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
    engine.answers = [tokens(5, stop="aborted")]

    async def run():
        return await PartialRolloutLLMClient(CONFIG).generate("r", prompt_ids=[1], sampling_params={"top_p": 1.0})

    assert asyncio.run(run()).stop_reason == "aborted"
    assert engine.requests == [("r", [1], {"top_p": 1.0, "detokenize": False})]


def test_engine_calls_are_noted_with_replica_tokens_and_version(engine):
    engine.answers = [tokens(5, 6, version=9)]

    async def run():
        client = ObservedLLMClient(CONFIG)
        await client.generate("r", prompt_ids=[1], sampling_params={})
        return client.take_calls(), client.take_calls()

    (call,), again = asyncio.run(run())
    assert (call.replica, call.tokens, call.version) == ("replica-7", 2, 9)
    assert call.end >= call.start and again == []


def test_dead_replica_is_named(engine):
    engine.answers = [OSError("engine core is gone")]
    with pytest.raises(ReplicaError, match="vLLM replica replica-7 failed on request 0/0#0@1: OSError: engine core"):
        generate(PartialRolloutLLMClient(CONFIG), live())


def test_training_samples_go_to_the_replica_with_the_fewest_and_stay_for_their_next_turn():
    async def run():
        client = PartialRolloutLLMClient(CONFIG)
        client.use_replicas({"a": "A", "b": "B"})
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
