"""Agent loops of one's own: whatever a loop does costs at most its sample, and what is trained is what the engine made."""

import asyncio
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import ToolResponse

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


@pytest.mark.parametrize(("loop", "most"), [(limited, 16), (hedge, 16), (answers_interrupted, 60)])
def test_call_that_its_loop_no_longer_awaits_is_withdrawn_from_the_engine_and_not_trained(loop, most):
    """The round ends once the other prompt has its 20 tokens: until then would go what nobody withdraws."""
    output, life = trained(loop, update_s=0.12)
    assert not output.masked and output.response_length in (4, 6) and life.figures()["failures/failed_total"] == 0
    assert len(life.engine.asked) <= 5 and output.metrics["untrained_tokens"] < most


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
        answer, *_ = await asyncio.wait_for(row["tools"]["look"].call({"city": "b"}), 5)
        release.set()
        assert {answer.text, *[(await each)[0].text for each in hung]} == {"it rains"}
        return output_of(PROMPT, (await ask(client, params, 5)).token_ids)

    try:
        output, _ = trained(travels, functions=[function("look", look)])
    finally:
        release.set()
    assert not output.masked, output.extra_fields


# -- replays -------------------------------------------------------------------------------------------------------------


class Dies(Exception):
    """Ends a life of the sample; it is run again from its journal."""


def lives(*, at_most=1):
    """Whether the sample's present life is to end at this moment; of its lives ``at_most`` do."""
    ended = []

    def end():
        if len(ended) < at_most:
            ended.append(1)
            raise Dies

    return end


@pytest.mark.parametrize("again", [60, 6], ids=["the same question", "a shorter one"])
def test_call_that_was_given_up_is_no_part_of_a_replay(again):
    """The time limit runs out while the sample waits for the trainer; then the loop fails."""
    end, answers = lives(), []

    async def limited(client, row, params):
        try:
            answer = await asyncio.wait_for(ask(client, params, 60), 0.04 if not answers else 10)
        except TimeoutError:
            answer = await ask(client, params, again)
        answers.append(answer.token_ids)
        end()
        return output_of(PROMPT, answer.token_ids, response_logprobs=answer.log_probs)

    output, _ = trained(limited, update_s=0.1)
    assert output.response_ids.tolist() == answers[1] and not output.masked
    assert len(answers[0]) == again and (answers[0] == answers[1]) == (again == 60)


def function(name, call, *, repeatable=False):
    call.repeatable = repeatable
    return FunctionTool(name=name, fn=call, tool_schema=tool_schema(name), is_async=True)


@pytest.mark.parametrize("threaded", [False, True])
def test_parallel_tools_keep_their_answers_though_a_replay_asks_in_another_order(threaded):
    end, orders, made = lives(at_most=2), iter(["ab", "ba", "ba"]), []

    async def look(city):
        await asyncio.sleep(0.01 if city == "a" else 0)
        made.append(city)
        return f"it rains in {city}", 0.5, {"cost": 2}

    async def travels(client, row, params):
        await ask(client, params, 5)
        order, home = next(orders), asyncio.get_running_loop()

        def call(city):
            look = row["tools"]["look"].call({"city": city})
            return home.run_in_executor(None, asyncio.run, look) if threaded else look

        said = dict(zip(order, await asyncio.gather(*map(call, order)), strict=True))
        assert {city: (answer[0].text, *answer[1:]) for city, answer in said.items()} == {
            city: (f"it rains in {city}", 0.5, {"cost": 2}) for city in "ab"
        }
        end()
        answer = await ask(client, params, 5)
        return output_of(PROMPT, answer.token_ids)

    output, _ = trained(travels, functions=[function("look", look)])
    assert not output.masked and sorted(made) == ["a", "b"] and output.metrics["calls_replayed"] == 2


class Finds(BaseTool):
    """Leaves what it has found in the loop's state, and says something when it is created."""

    def __init__(self, what):
        super().__init__({}, tool_schema("find"))
        self.what = what

    async def create(self, instance_id=None, **kwargs):
        return instance_id, ToolResponse(text="you are in a hall")

    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        agent_data.extra_fields.setdefault("found", []).append(self.what)
        return ToolResponse(text="ok"), 0.5, {"cost": 2}


@pytest.mark.parametrize(
    ("what", "reads", "said"),
    [
        (3, False, None),
        (object(), False, "what tool find leaves.found[1]: builtins.object cannot be saved"),
        (3, True, "tool find: its instance is created by its first real call"),
    ],
    ids=["is journaled", "cannot be", "is not known"],
)
def test_what_a_tool_leaves_for_the_reward_is_there_in_a_replay_or_refused_by_name(what, reads, said):
    end, scored = lives(), []

    async def searches(client, row, params):
        data = SimpleNamespace(extra_fields={"found": [0]})
        for _ in range(2):
            instance, first = await row["tools"]["find"].create()
            if reads:
                assert first.text
            await row["tools"]["find"].execute(instance, {}, agent_data=data)
            await row["tools"]["find"].release(instance)
        answer = await ask(client, params, 5)
        end()
        return output_of(PROMPT, answer.token_ids, extra_fields=data.extra_fields)

    async def reward(output, row):
        scored.append(output.extra_fields.get("found"))
        output.reward_score = 1.0

    output, _ = trained(searches, functions=[Finds(what)], score=reward)
    assert output.masked == (said is not None)
    if said is None:
        assert sorted(scored, key=bool) == [None, [0, 3, 3]] and output.metrics["calls_replayed"] == 2
    else:
        assert said in output.extra_fields["sample_error"]
