"""Agent loops of one's own: whatever a loop does costs at most its sample, and what is trained is what the engine made."""

import asyncio
import gc
import threading
import weakref

import pytest
from verl.tools.function_tool import FunctionTool, normalize_function_tool_return

from recipe.partial_rollout.config.settings import Scheduling, SchedulingPolicy
from tests.unit.loop_life import Life, output_of, play
from tests.unit.shared import tool_schema

PROMPT = [7, 8, 9]


async def plain(client, row, params, tokens=5):
    answer = await client.generate("r", prompt_ids=PROMPT, sampling_params={**params, "max_tokens": tokens})
    return output_of(PROMPT, answer.token_ids, response_logprobs=answer.log_probs)


def beside_plain(loop, **settings):
    """A life of two prompts; the first, which is short, ends a round in which ``loop`` is in the midst of the second."""

    async def either(client, row, params):
        return await (plain(client, row, params, 20) if row["plain"] else loop(client, row, params))

    return lambda: Life(either, [{"plain": True}, {"plain": False}], **settings)


def ask(client, params, tokens, prompt=PROMPT):
    return client.generate("r", prompt_ids=prompt, sampling_params={**params, "max_tokens": tokens})


def trained(loop, *, update_s=0.0, **settings):
    """The output of ``loop``, and its training, whose updates take ``update_s``."""

    async def story(life):
        return (await life.train(update_s=update_s))[1], life

    return play(beside_plain(loop, **settings), story)


def test_client_of_a_sample_that_has_ended_is_freed_at_once():
    """Full garbage collections wait for the end of the round (``manager/garbage.py``)."""
    clients = []

    async def plain_of(client, row, params):
        clients.append(weakref.ref(client))
        return await plain(client, row, params)

    async def story(life):
        await life.stop_round()
        return [each() for each in clients]

    gc.collect()
    gc.disable()
    try:
        assert play(lambda: Life(plain_of, [{}] * 4, batch=4), story) == [None] * 4
    finally:
        gc.enable()


# -- several calls at once -----------------------------------------------------------------------------------------------


def test_calls_of_a_sample_are_no_more_requests_than_there_are_slots():
    async def eight(client, row, params):
        answers = await asyncio.gather(*[ask(client, params, 5) for _ in range(8)])
        return output_of(PROMPT, answers[5].token_ids)

    output, life = trained(eight, slots=3)
    assert output.response_length == 5 and life.engine.most == 3


@pytest.mark.parametrize("slots", [2, 12])
@pytest.mark.parametrize("when", ["before the first round", "between two", "in a round"])
def test_worker_whose_slots_are_resized_makes_no_more_requests_than_it_has_slots_now(slots, when):
    async def loop(client, row, params):
        calls, tokens = (16, 40) if row["asks"] else (1, 5)
        answers = await asyncio.gather(*[ask(client, params, tokens) for _ in range(calls)])
        return output_of(PROMPT, answers[0].token_ids)

    async def story(life):
        if when == "between two":
            await life.stop_round()
        elif when == "in a round":
            while not life.actor._manager.samples.running.total():
                await asyncio.sleep(0.001)
        await life.actor.resize_workers(slots)
        if when == "between two":
            await life.next_round()
        while not life.outputs.get("0/1"):
            await life.stop_round()
            life.engine.most = 0
            await life.next_round()
        await life.train()
        return life.engine.most

    def life():
        made = Life(loop, [{"asks": False}, {"asks": False}, {"asks": True}, {"asks": True}], slots=6)
        if when == "before the first round":
            serve = made.serve

            async def serve_resized():
                await serve()
                await made.actor.resize_workers(slots)

            made.serve = serve_resized
        return made

    assert play(life, story) == slots


async def limited(client, row, params):
    """Gives a call a time limit, and asks again."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(client, params, 60), 0.01)
    answer = await ask(client, params, 6)
    return output_of(PROMPT, answer.token_ids)


async def hedge(client, row, params):
    """Ends while another call runs."""
    call = asyncio.ensure_future(ask(client, params, 60))
    answer = await ask(client, params, 4)
    assert not call.done()
    return output_of(PROMPT, answer.token_ids)


async def answers_interrupted(client, row, params):
    """Ends with what it has while its call waits for the trainer."""
    answer = await ask(client, params, 4)
    await asyncio.wait([asyncio.ensure_future(ask(client, params, 60))], timeout=0.1)
    return output_of(PROMPT, answer.token_ids)


@pytest.mark.parametrize("loop", [limited, hedge, answers_interrupted])
def test_call_that_its_loop_gives_up_runs_on_unheard_and_is_not_trained(loop):
    output, life = trained(loop, update_s=0.12)
    assert not output.masked and output.response_length in (4, 6) and life.figures()["failures/failed_total"] == 0
    assert life.engine.decoded > output.response_length + 20, "it decoded on, beside the other prompt's 20 tokens"


def test_what_a_loop_has_left_behind_may_ask_for_nothing_more():
    said, ended = [], asyncio.Event()

    async def leaves(client, row, params):
        async def later():
            await ended.wait()
            try:
                await ask(client, params, 4)
            except Exception as error:
                said.append(str(error))

        leaves.task = asyncio.ensure_future(later())
        return output_of(PROMPT, (await ask(client, params, 1)).token_ids)

    async def reward(output, row):
        ended.set()
        await asyncio.sleep(0)
        output.reward_score = 1.0

    output, _ = trained(leaves, score=reward)
    assert not output.masked and said == [
        "sample 0/1#0 has ended: its agent loop has returned, and may ask for nothing more"
    ]


# -- places of the user's own --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheduling",
    [Scheduling(), Scheduling(SchedulingPolicy.SEED), Scheduling(overtake=0)],
    ids=["bounded", "seed", "in order"],
)
@pytest.mark.parametrize(("slots", "sandboxes"), [(2, 1), (4, 2), (4, 5), (16, 1)])
def test_sandboxes_that_loops_hold_for_their_whole_conversation_deadlock_under_no_policy(slots, sandboxes, scheduling):
    free = None

    async def sandboxed(client, row, params):
        nonlocal free
        free = free or asyncio.Semaphore(sandboxes)
        async with free:
            answer = await ask(client, params, 4)
            await asyncio.sleep(0.03)
            prompt = [*PROMPT, *answer.token_ids, 1]
            after = await ask(client, params, 4, prompt)
        return output_of(PROMPT, [*answer.token_ids, 1, *after.token_ids], [1] * 4 + [0] + [1] * 4)

    def life():
        return Life(sandboxed, [{}] * 12, batch=4, slots=slots, stall_s=2.0, scheduling=scheduling)

    outputs = play(life, lambda life: life.train())
    assert [(output.masked, output.response_length) for output in outputs] == [(False, 9)] * 12


@pytest.mark.parametrize("own", [True, False], ids=["places of its own", "the same places"])
def test_validation_that_waits_for_what_carried_samples_hold_ends_in_words_and_may_have_places_of_its_own(own):
    places = {}

    async def sandboxed(client, row, params):
        which = client.sample_id is None and own
        async with places.setdefault(which, asyncio.Semaphore(1)):
            answer = await ask(client, params, row["tokens"])
        return output_of(PROMPT, answer.token_ids)

    async def either(client, row, params):
        return await (plain(client, row, params, 20) if row["plain"] else sandboxed(client, row, params))

    async def story(life):
        await life.stop_round()
        return await life.validate({"plain": False, "tokens": 4})

    def life():
        return Life(either, [{"plain": True}, {"plain": False, "tokens": 60}], sample_timeout_s=0.2)

    if own:
        assert len(play(life, story).response_ids) == 4
        return
    said = (
        r"validation row 3 made no engine call for 0\.2 s \(partial_rollout\.failures\.sample_timeout_s\); it awaits .*"
        r"test_loops\.py:\d+; 1 training samples that began are carried meanwhile"
    )
    with pytest.raises(TimeoutError, match=said):
        play(life, story)


# -- outputs -------------------------------------------------------------------------------------------------------------

OWN = [1] * 5 + [0]
"""the mask of five tokens of the model's, and one that is not"""


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (
            lambda ids: [output_of(PROMPT, ids), output_of(PROMPT, ids)],
            "returned a list of 2 outputs: return the Agent",
        ),
        (lambda ids: None, "returned NoneType: return the AgentLoopOutput that is trained"),
        (lambda ids: output_of([7] * 17, ids), "a prompt of 17 tokens (actor_rollout_ref.rollout.prompt_length=16)"),
        (lambda ids: output_of(PROMPT, [*ids, *[2] * 60], [1] * 5 + [0] * 60), "a response of 65 tokens"),
        (lambda ids: output_of(PROMPT, [*ids, -100], OWN), "token -100, and the model knows those from 0 to 999"),
        (lambda ids: output_of(PROMPT, [*ids, 1000], OWN), "token 1000, and"),
        (lambda ids: output_of(PROMPT, [*ids, 2**40], OWN), f"token {2**40}, and"),
        (lambda ids: output_of(PROMPT, ids, [1, 1, 1, 1, 2]), "a mask with 2, which is neither 0 nor 1"),
        (lambda ids: output_of(PROMPT, ids, [1, 1, 1, 1, 256]), "a mask with 256"),
        (lambda ids: output_of(PROMPT, ids, [1, 1, 1, 1, -1]), "a mask with -1"),
        (lambda ids: output_of(PROMPT, [*ids, 2], OWN), None),
        (lambda ids: output_of(PROMPT, ids, [0, 0, 1, 1, 1]), None),
        (lambda ids: output_of(PROMPT, ids[:2]), None),
        (lambda ids: output_of(PROMPT, ids, response_logprobs=[]), None),
        (lambda ids: output_of(PROMPT, ids, multi_modal_data={"images": None, "videos": []}), None),
        (lambda ids: output_of(PROMPT, ids, multi_modal_data={"images": ["a"]}), "has multi-modal data (images)"),
        (lambda ids: output_of(PROMPT, ids).model_copy(update={"num_turns": None}), "TypeError: int()"),
        (lambda ids: output_of(PROMPT, []), None),
    ],
)
def test_output_of_any_shape_trains_or_fails_its_sample_in_words(returned, said):
    async def shaped(client, row, params):
        return returned((await ask(client, params, 5)).token_ids)

    output, _ = trained(shaped)
    assert output.masked == (said is not None) and (said or "") in str(output.extra_fields.get("sample_error"))


# -- threads -------------------------------------------------------------------------------------------------------------


def run_loop_in_thread(client, params):
    return asyncio.run(ask(client, params, 40))


def ask_the_workers_loop(client, params, home):
    return asyncio.run_coroutine_threadsafe(ask(client, params, 40), home).result()


@pytest.mark.parametrize("own_loop", [True, False], ids=["asyncio.run", "run_coroutine_threadsafe"])
@pytest.mark.parametrize("to_thread", [True, False], ids=["to_thread", "run_in_executor"])
def test_synchronous_agent_in_a_thread_is_interrupted_and_resumed_as_any_other(own_loop, to_thread):
    async def threaded(client, row, params):
        home = asyncio.get_running_loop()
        work = (run_loop_in_thread, client, params) if own_loop else (ask_the_workers_loop, client, params, home)
        answer = await (asyncio.to_thread(*work) if to_thread else home.run_in_executor(None, *work))
        return output_of(PROMPT, answer.token_ids, response_logprobs=answer.log_probs)

    output, life = trained(threaded)
    assert output.response_length == 40 and set(output.generated) == {0, 1}
    assert life.figures()["failures/failed_total"] == 0


def test_thread_whose_loop_has_given_up_is_told_so():
    said, over = [], threading.Event()

    async def gives_up(client, row, params):
        def agent():
            try:
                asyncio.run(ask(client, params, 60))
            except BaseException as error:
                said.append(type(error).__name__)
            over.set()

        thread = asyncio.get_running_loop().run_in_executor(None, agent)
        await asyncio.wait([asyncio.ensure_future(thread)], timeout=0.005)
        raise ValueError("the agent takes too long")

    output, _ = trained(gives_up)
    assert output.masked and over.wait(5) and set(said) == {"CancelledError"}


def test_synchronous_tools_that_hang_keep_no_other_from_its_thread():
    """However many: a thread cannot be ended from outside."""
    release = threading.Event()

    def look(city):
        return "it rains" if city == "b" or release.wait(30) else "late"

    async def travels(client, row, params):
        hung = [asyncio.ensure_future(row["tools"]["look"].call({"city": "a"})) for _ in range(50)]
        answer = await asyncio.wait_for(row["tools"]["look"].call({"city": "b"}), 5)
        release.set()
        assert {answer, *[await each for each in hung]} == {"it rains"}
        return output_of(PROMPT, (await ask(client, params, 5)).token_ids)

    try:
        output, _ = trained(travels, functions=[function("look", look)])
    finally:
        release.set()
    assert not output.masked, output.extra_fields


# -- lives of a sample -------------------------------------------------------------------------------------------------


class Dies(Exception):
    """Ends a life of the sample; it is tried again."""


def function(name, call):
    is_async = asyncio.iscoroutinefunction(call)
    return FunctionTool(name=name, fn=call, tool_schema=tool_schema(name), is_async=is_async)


def test_two_tools_of_one_sandbox_see_each_others_files():
    """Whatever attributes they have: nothing but their life cycle is called."""
    files = []

    def empty(conversation, handle):
        files[:] = handle or []

    def shared(name, does):
        does.snapshot, does.restore = lambda conversation: list(files), empty
        return function(name, does)

    async def write(path):
        files.append(path)
        return "written"

    async def ls():
        return str(files)

    said = []

    async def works(client, row, params):
        for name, arguments in (("write", {"path": "a.py"}), ("ls", {})):
            response, *_ = normalize_function_tool_return(await row["tools"][name].call(arguments))
            said.append(response.text)
        return output_of(PROMPT, (await ask(client, params, 5)).token_ids)

    output, _ = trained(works, functions=[shared("write", write), shared("ls", ls)])
    assert not output.masked and said == ["written", "['a.py']"]


@pytest.mark.parametrize("threaded", [False, True])
def test_parallel_tools_of_a_loop_or_of_its_threads_are_called_in_the_workers_loop(threaded):
    homes = set()

    async def look(city):
        homes.add(asyncio.get_running_loop())
        return f"it rains in {city}"

    async def travels(client, row, params):
        home = asyncio.get_running_loop()

        def call(city):
            look = row["tools"]["look"].call({"city": city})
            return home.run_in_executor(None, asyncio.run, look) if threaded else look

        assert await asyncio.gather(*map(call, "ab")) == ["it rains in a", "it rains in b"] and homes == {home}
        return output_of(PROMPT, (await ask(client, params, 5)).token_ids)

    output, _ = trained(travels, functions=[function("look", look)])
    assert not output.masked, output.extra_fields


def lives_of(turns, how):
    """A loop of ``turns`` turns of five tokens, each with a tool call, whose first life ends after the last.

    Returns its output, its training, at which turns the tool was called, and the response of the first life.
    """
    called, ended = [], []

    async def look(at):
        called.append(at)
        return "a"

    async def converses(client, row, params):
        made, mask = [], []
        for turn in range(turns):
            answer = (await ask(client, params, 5, PROMPT + made)).token_ids
            await row["tools"]["look"].call({"at": turn})
            made, mask = [*made, *answer, 1], [*mask, *[1] * len(answer), 0]
        if not ended:
            ended.append(made)
            if how == "fails":
                raise Dies
            await asyncio.Event().wait()
        return output_of(PROMPT, made, mask)

    async def story(life):
        if how == "worker dies":
            # Its slot goes back after 10 ms, and what it has made is reported.
            while not (ended and life.actor._manager.samples.away):
                await asyncio.sleep(0.001)
            await life.die()
        return (await life.train())[1], life

    output, life = play(beside_plain(converses, functions=[function("look", look)], tick=0.01), story)
    return output, life, called, ended[0]


@pytest.mark.parametrize("how", ["fails", "worker dies"])
def test_single_turn_sample_goes_on_from_its_tokens_and_calls_its_tool_anew(how):
    output, life, called, before = lives_of(1, how)
    assert output.response_ids.tolist() == before and called == [0, 0]
    assert output.metrics["untrained_tokens"] == life.figures()["failures/lost_tokens_total"] == 0


@pytest.mark.parametrize("how", ["fails", "worker dies"])
def test_conversation_begins_anew_and_its_tokens_are_counted_as_lost(how):
    output, life, called, before = lives_of(3, how)
    assert not output.masked and output.response_ids.tolist() != before and called == [0, 1, 2] * 2
    assert (life.figures()["failures/lost_tokens_total"], output.metrics["untrained_tokens"]) == (15, 0)


def test_conversation_of_a_run_that_is_resumed_three_times_trains_within_the_bound(tmp_path):
    """A checkpoint has its group's birth and none of its tokens; the round waits for a group at its bound."""
    begun = []

    async def converses(client, row, params):
        begun.append(1)
        first = (await ask(client, params, 5)).token_ids
        second = (await ask(client, params, 40, [*PROMPT, *first, 1])).token_ids
        return output_of(PROMPT, [*first, 1, *second], [1] * 5 + [0] + [1] * 40)

    async def either(client, row, params):
        return await (converses(client, row, params) if row["converses"] else plain(client, row, params, 10))

    async def story(life):
        for resumed in range(3):
            while len(begun) <= resumed:
                await asyncio.sleep(0.001)
            await life.stop_round()
            await life.resume(tmp_path / str(resumed))
            await life.next_round()
        await life.train()
        return life, {uid: step for step, uids in enumerate(life.steps) for uid in uids}

    rows = [{"converses": i == 0} for i in range(6)]
    life, trained_at = play(lambda: Life(either, rows, max_staleness=3, overlap=3.0), story)
    (output,) = life.outputs["0/0"]
    assert trained_at["0/0"] == 3, "in the version at its bound"
    # A sample that was stopped in its first turn keeps that turn's tokens.
    assert len(begun) == 4 and set(output.generated[5:].tolist()) == {3} and output.staleness(3) <= 3
    assert 0 < life.figures()["failures/lost_tokens_total"] <= 3 * 45
