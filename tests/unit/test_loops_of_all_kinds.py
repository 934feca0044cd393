"""Other things that loops do: what is sound trains, what is not costs its sample and says why."""

import asyncio
import contextlib
import contextvars
import copy
import sys
import threading

import anyio
import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopBase

from tests.unit.loop_life import Life, output_of, play, transcripts
from tests.unit.test_loops import PROMPT, ask, trained


def output_with(answer, prompt=PROMPT):
    return output_of(prompt, answer.token_ids, response_logprobs=answer.log_probs)


# -- sound ---------------------------------------------------------------------------------------------------------------


async def anyio_groups(client, row, params):
    answers = []

    async def one(tokens):
        answers.append(await ask(client, params, tokens))

    with anyio.move_on_after(0.01):
        await ask(client, params, 60)
    async with anyio.create_task_group() as group:
        group.start_soon(one, 30)
        group.start_soon(one, 10)
    return output_with(answers[1])


async def shields(client, row, params):
    inner = asyncio.gather(asyncio.shield(ask(client, params, 60)), asyncio.shield(ask(client, params, 50)))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(inner), 0.005)
    return output_with(await ask(client, params, 30))


async def generator_that_nobody_closes(client, row, params):
    async def turns():
        try:
            while True:
                yield await ask(client, params, 30)
        finally:
            await ask(client, params, 5)

    async for answer in turns():
        return output_with(answer)


CONTEXT = contextvars.copy_context()


async def context_of_its_own(client, row, params):
    return output_with(await asyncio.create_task(ask(client, params, 30), context=CONTEXT.copy()))


async def prompt_that_shrinks(client, row, params):
    await ask(client, params, 5)
    return output_with(await ask(client, params, 30, PROMPT[:1]), PROMPT[:1])


async def copied(client, row, params):
    agents = [copy.deepcopy({"client": client, "said": []}), copy.copy(client)]
    await ask(agents[1], params, 5)
    return output_with(await ask(agents[0]["client"], params, 30))


async def cancelled_by_itself(client, row, params):
    asyncio.current_task().cancel()
    try:
        await ask(client, params, 60)
    except asyncio.CancelledError:
        asyncio.current_task().uncancel()
    return output_with(await ask(client, params, 30))


@pytest.mark.parametrize(
    "loop",
    [
        anyio_groups, shields, generator_that_nobody_closes, context_of_its_own,
        prompt_that_shrinks, copied, cancelled_by_itself,
    ],
)  # fmt: skip
def test_sound_loop_trains(loop):
    output, life = trained(loop)
    assert not output.masked, output.extra_fields
    assert output.response_mask.sum() >= 15 and life.figures()["failures/failed_total"] == 0


# -- unsound -------------------------------------------------------------------------------------------------------------


class Stops(BaseException):
    """As pytest's or trio's own."""


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


def in_child(error):
    async def child(client, row, params):
        async def tool():
            await asyncio.sleep(0.001)
            raise error

        await asyncio.gather(ask(client, params, 20), tool())

    return child


def raises(error):
    async def loop(client, row, params):
        await ask(client, params, 4)
        raise error

    return loop


async def exits_in_a_thread(client, row, params):
    await asyncio.gather(asyncio.to_thread(sys.exit, 2), ask(client, params, 20))


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (in_child(KeyError("city")), "KeyError: 'city'"),
        (in_child(SystemExit(2)), "SystemExit: 2"),
        (in_child(asyncio.CancelledError()), "CancelledError"),
        (in_child(KeyboardInterrupt()), "KeyboardInterrupt"),
        (in_child(Stops("a")), "Stops: a"),
        (exits_in_a_thread, "SystemExit: 2"),
        (raises(Stops("a")), "Stops: a"),
        (raises(Mute()), "Mute"),
        (raises(ValueError("\ud800")), "ValueError"),
        (raises(ExceptionGroup("two", [KeyError("city"), ValueError("b")])), "city"),
        (raises(StopAsyncIteration()), "StopAsyncIteration"),
        (raises(GeneratorExit()), "GeneratorExit"),
    ],
)
def test_whatever_a_loop_or_a_task_of_it_raises_costs_its_sample_and_is_named(loop, said):
    output, life = trained(loop)
    assert output.masked and said in output.extra_fields["sample_error"]
    assert life.figures()["failures/masked_total"] == 1


def test_loop_that_catches_its_cancellation_ends_by_its_timeout_all_the_same(monkeypatch):
    monkeypatch.setattr("recipe.partial_rollout.worker.live_sample._END_S", 0.05)

    async def deaf(client, row, params):
        await ask(client, params, 4)
        # The third is the end of the test.
        for _ in range(3):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    output, _ = trained(deaf, sample_timeout_s=0.05)
    assert output.masked and "sample_timeout_s" in output.extra_fields["sample_error"]


@pytest.mark.parametrize("field", ["extra_fields", "reward"])
def test_what_no_process_can_be_sent_fails_its_sample(field):
    async def keeps(client, row, params):
        answer = await ask(client, params, 5)
        return output_of(PROMPT, answer.token_ids, extra_fields={"lock": threading.Lock()} if field != "reward" else {})

    async def score(output, row):
        output.reward_score = 1.0
        if field == "reward" and len(output.response_ids) == 5:
            output.extra_fields["reward_extra_info"] = {"lock": threading.Lock()}

    output, _ = trained(keeps, score=score)
    assert output.masked and "cannot pickle '_thread.lock' object" in output.extra_fields["sample_error"]


class Shared:
    """What loops keep for all."""

    client = output = None


async def client_of_the_first(client, row, params):
    Shared.client = Shared.client or client
    return output_with(await ask(Shared.client, params, 10))


async def output_of_the_last(client, row, params):
    answer = output_with(await ask(client, params, 10))
    Shared.output, answer = answer, Shared.output or answer
    return answer


@pytest.mark.parametrize("loop", [client_of_the_first, output_of_the_last])
def test_loops_that_share_a_client_or_an_output_train_nothing_that_was_not_made_for_their_sample(loop):
    Shared.client = Shared.output = None
    outputs = play(lambda: Life(loop, [{}] * 4), lambda life: life.train())
    assert [output.masked for output in outputs].count(False) == 1
    said = [output.extra_fields["sample_error"] for output in outputs if output.masked]
    assert all("no engine call made" in words or "has ended: its agent loop has returned" in words for words in said)


def test_synchronous_agents_in_threads_leave_validation_its_own():
    """The event loop's own pool has as many threads as six samples need."""

    async def threaded(client, row, params):
        return output_with(await asyncio.to_thread(asyncio.run, ask(client, params, row["tokens"])))

    rows = [{"tokens": 4}, *[{"tokens": 60}] * 50]

    async def story(life):
        await life.stop_round()
        return await asyncio.wait_for(life.validate({"tokens": 4}), 5)

    assert len(play(lambda: Life(threaded, rows, slots=64), story).response_ids) == 4


# -- as people write them, disturbed in every way at once --------------------------------------------------------------


PLACES = 2


class Sandbox:
    """Runs programs; what it says depends on all that it has run."""

    def __init__(self):
        self.state = 0

    async def run(self, program):
        await asyncio.sleep(0.002)
        self.state = (31 * self.state + sum(program)) % 97
        return self.state


class Host:
    """Has room for the sandboxes of some conversations at once."""

    def __init__(self, places):
        self.places, self.open, self.most = asyncio.Semaphore(places), 0, 0

    @contextlib.asynccontextmanager
    async def sandboxes(self, number):
        async with self.places:
            self.open += 1
            self.most = max(self.most, self.open)
            try:
                yield [Sandbox() for _ in range(number)]
            finally:
                self.open -= 1


class TwoCandidatesAndJudge(AgentLoopBase):
    """Two candidates, each with a sandbox, side by side; a judge's word says which one is trained."""

    def __init__(self, server_manager, host, hosts_validation):
        self.server_manager = server_manager
        validates = getattr(server_manager, "sample_id", None) is None
        self.host = hosts_validation if validates else host

    async def ask(self, prompt, params, tokens):
        answer = await self.server_manager.generate(
            "r", prompt_ids=prompt, sampling_params={**params, "max_tokens": tokens}
        )
        return answer.token_ids, answer.log_probs

    async def candidate(self, prompt, params, sandbox):
        response, mask, log_probs = [], [], []
        for _ in range(2):
            program, likely = await self.ask(prompt + response, params, 6)
            said = await sandbox.run(program)
            response += [*program, said]
            mask += [*[1] * len(program), 0]
            log_probs += [*likely, 0.0]
        return output_of(prompt, response, mask, response_logprobs=log_probs)

    async def run(self, sampling_params, *, number, **row):
        prompts = [[7, 8, number, which] for which in range(2)]
        async with self.host.sandboxes(len(prompts)) as sandboxes:
            candidates = await asyncio.gather(
                *[self.candidate(prompt, sampling_params, box) for prompt, box in zip(prompts, sandboxes, strict=True)]
            )
        (word,), _ = await self.ask([9, *[output.response_ids[-1] for output in candidates]], sampling_params, 1)
        return candidates[word % 2]


def candidates_and_judge():
    hosts = Host(PLACES), Host(1)

    async def loop(client, row, params):
        return await TwoCandidatesAndJudge(client, *hosts).run(params, **row)

    def check():
        assert all(not host.open for host in hosts) and hosts[0].most == PLACES

    return loop, check


def test_candidates_with_sandboxes_and_a_judge_say_and_earn_what_they_do_undisturbed():
    """Cut at every token; workers killed; each reward fails once; validation every second step."""
    undisturbed, (validated,) = transcripts(candidates_and_judge, range(20, 26), disturbed=False)
    disturbed, validations = transcripts(candidates_and_judge, range(20, 26), disturbed=True)
    assert disturbed == undisturbed and len(undisturbed) == 6
    assert validations and all(list(validation) == list(validated) for validation in validations)
