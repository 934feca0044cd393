"""Agent loops of one's own: whatever a loop does costs at most its sample, and what is trained is what the engine made.

Tables of named loops; ``test_loop_fuzz`` plays random ones.
"""

import asyncio
import contextlib
import contextvars
import copy
import sys
import threading

import anyio
import numpy as np
import pytest
import torch
from transformers import BatchEncoding
from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.utils.dataset.rl_dataset import RLHFDataset

from recipe.partial_rollout.config.settings import Scheduling, SchedulingPolicy
from tests.unit.loop_life import (
    PROMPT,
    Life,
    ask,
    beside_plain,
    config_of,
    function,
    output_of,
    output_with,
    plain,
    play,
    trained,
)
from tests.unit.shared import byte_tokenizer
from tests.unit.test_tool_recipes import CHATML

# -- sound ---------------------------------------------------------------------------------------------------------------


async def ends_while_a_call_waits_for_the_trainer(client, row, params):
    answer = await ask(client, params, 4)
    await asyncio.wait([asyncio.ensure_future(ask(client, params, 60))], timeout=0.1)
    return output_with(answer)


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


async def generator_that_nobody_closes(client, row, params):
    async def turns():
        try:
            while True:
                yield await ask(client, params, 30)
        finally:
            await ask(client, params, 5)

    async for answer in turns():
        return output_with(answer)


async def context_of_its_own(client, row, params):
    context = contextvars.Context()
    return output_with(await asyncio.create_task(ask(client, params, 30), context=context))


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


async def greedy_judge(client, row, params):
    answer = await ask(client, params, 30)
    judged = {**params, "temperature": 0.0, "top_k": 1}
    await ask(client, judged, 1, PROMPT + answer.token_ids)
    return output_with(answer)


async def asks_for_no_log_probs(client, row, params):
    return output_of(PROMPT, (await ask(client, {}, 30)).token_ids)


async def asks_with_prompts_of_any_kind(client, row, params):
    """Those that verl's server takes."""
    one, encoded = torch.tensor([PROMPT]), BatchEncoding({"input_ids": PROMPT, "attention_mask": [1, 1, 1]})
    for kind in (np.array(PROMPT), one, [PROMPT], {"input_ids": np.array([PROMPT])}, BatchEncoding({"input_ids": one})):
        await ask(client, params, 1, kind)
    return output_with(await ask(client, params, 4, encoded))


SOUND = [
    ends_while_a_call_waits_for_the_trainer, anyio_groups, generator_that_nobody_closes, context_of_its_own, copied,
    cancelled_by_itself, greedy_judge, asks_for_no_log_probs, asks_with_prompts_of_any_kind,
]  # fmt: skip
COMPARED = config_of(correction="decoupled")


@pytest.mark.parametrize("loop", SOUND)
def test_sound_loop_trains(loop):
    output, life = trained(loop, update_s=0.12, config=COMPARED)
    assert not output.masked, output.extra_fields
    assert output.response_mask.all() and life.figures()["failures/failed_total"] == 0


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


async def leaves_what_cannot_be_sent(client, row, params):
    output = await plain(client, row, params)
    output.extra_fields["lock"] = threading.Lock()
    return output


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (in_child(KeyError("city")), "KeyError: 'city'"),
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
        (leaves_what_cannot_be_sent, "cannot pickle '_thread.lock' object"),
    ],
)
def test_exception_in_an_agent_loop_fails_only_its_sample_and_is_named(loop, said):
    output, life = trained(loop)
    assert output.masked and said in output.extra_fields["sample_error"]
    assert life.figures()["failures/masked_total"] == 1


OWN = [1] * 5 + [0]
"""the mask of five tokens of the model's, and one that is not"""


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda ids: [output_of(PROMPT, ids), None], "returned a list of NoneType: it must return an AgentLoopOutput"),
        (lambda ids: [], "returned an empty list"),
        (lambda ids: [output_of([7] * 17, ids), output_of(PROMPT, ids)], "a prompt of 17 tokens"),
        (lambda ids: None, "returned NoneType: it must return an AgentLoopOutput"),
        (lambda ids: output_of([7] * 17, ids), "a prompt of 17 tokens (actor_rollout_ref.rollout.prompt_length=16)"),
        (lambda ids: output_of(PROMPT, [*ids, *[2] * 60], [1] * 5 + [0] * 60), "a response of 65 tokens"),
        (lambda ids: output_of(PROMPT, [*ids, -100], OWN), "token -100, but the model's tokens are 0 to 999"),
        (lambda ids: output_of(PROMPT, [*ids, 1000], OWN), "token 1000, but"),
        (lambda ids: output_of(PROMPT, [*ids, 2**40], OWN), f"token {2**40}, but"),
        (lambda ids: output_of(PROMPT, ids, [1, 1, 1, 1, 2]), "a mask with 2, which is neither 0 nor 1"),
        (lambda ids: output_of(PROMPT, ids, [1, 1, 1, 1, 256]), "a mask with 256"),
        (lambda ids: output_of(PROMPT, ids, [1, 1, 1, 1, -1]), "a mask with -1"),
        (lambda ids: output_of(PROMPT, ids, response_logprobs=[]), None),
        (lambda ids: output_of(PROMPT, ids, multi_modal_data={"images": None, "videos": []}), None),
        (lambda ids: output_of(PROMPT, ids, multi_modal_data={"videos": ["a"]}), "shows videos: partial rollout"),
        (
            lambda ids: output_of(PROMPT, ids).model_copy(update={"num_turns": None}),
            "num_turns=None, which is no integer",
        ),
    ],
)
def test_output_of_any_shape_trains_or_fails_its_sample_in_words(returned, said):
    async def shaped(client, row, params):
        return returned((await ask(client, params, 5)).token_ids)

    output, _ = trained(shaped)
    assert output.masked == (said is not None) and (said or "") in str(output.extra_fields.get("sample_error"))


def test_list_under_the_legacy_trainer_fails_its_sample_in_one_line():
    async def twice(client, row, params):
        return [await plain(client, row, params)] * 2

    output, _ = trained(twice, use_v1=False)
    said = "the agent loop returned a list of 2 outputs: only trainer.use_v1=True trains several rows of a sample"
    assert output.masked and said in output.extra_fields["sample_error"]


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"top_p": 0.7}, "top_p=0.7"),
        ({"top_k": 20}, "top_k=20"),
        ({"repetition_penalty": 1.1}, "repetition_penalty=1.1"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"temperature": 0.0}, "temperature=0.0"),
    ],
)
def test_token_of_another_distribution_is_not_compared_with_the_trainers(sampling, named):
    async def loop(client, row, params):
        return await plain(client, row, {**params, **sampling})

    output, _ = trained(loop, config=COMPARED)
    assert output.masked and named in output.extra_fields["sample_error"]
    assert not trained(loop)[0].masked


def test_loop_that_catches_its_cancellation_ends_by_its_timeout(monkeypatch):
    monkeypatch.setattr("recipe.partial_rollout.worker.live_sample._END_S", 0.05)

    async def deaf(client, row, params):
        await ask(client, params, 4)
        # The third is the end of the test.
        for _ in range(3):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    output, _ = trained(deaf, sample_timeout_s=0.05)
    assert output.masked and "sample_timeout_s" in output.extra_fields["sample_error"]


@pytest.mark.parametrize("limit", [40, 2000])
def test_prompt_that_verl_would_cut_fails_its_sample_with_key_and_tokens(limit):
    config = config_of(64, limit)
    tokenizer = byte_tokenizer(CHATML, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"])

    async def loop(client, row, params):
        parts = DictConfigWrap(config), client, tokenizer, None, RLHFDataset, DictConfigWrap({})
        agent = SingleTurnAgentLoop(*parts, hf_model_type="qwen3", tools=ToolListWrap([]))
        return await agent.run({**params, "max_tokens": 4}, raw_prompt=[{"role": "user", "content": "1+2=_"}] * 3)

    (output,) = play(lambda: Life(loop, [{}], config=config))
    said = output.extra_fields.get("sample_error", "")
    assert output.masked == ("tokens (actor_rollout_ref.rollout.prompt_length=40)" in said) == (limit == 40)


# -- slots, threads and places -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [2, 12])
def test_resized_worker_makes_as_many_requests_as_it_has_slots_now(slots):
    async def sixteen(client, row, params):
        return output_with((await asyncio.gather(*[ask(client, params, 40) for _ in range(16)]))[0])

    async def story(life):
        await life.stop_round()
        assert life.engine.most == 6
        await life.actor.resize_workers(slots)
        life.engine.most = 0
        await life.next_round()
        await life.train()
        return life.engine.most

    assert play(beside_plain(sixteen, slots=6), story) == slots


@pytest.mark.parametrize(
    "scheduling",
    [Scheduling(), Scheduling(SchedulingPolicy.SEED), Scheduling(overtake=0)],
    ids=["bounded", "seed", "in order"],
)
@pytest.mark.parametrize(("slots", "sandboxes"), [(2, 1), (4, 5), (16, 1)])
def test_sandboxes_held_for_whole_conversations_deadlock_under_no_policy(slots, sandboxes, scheduling):
    free = None

    async def sandboxed(client, row, params):
        nonlocal free
        free = free or asyncio.Semaphore(sandboxes)
        async with free:
            answer = await ask(client, params, 4)
            await asyncio.sleep(0.03)
            after = await ask(client, params, 4, [*PROMPT, *answer.token_ids, 1])
        return output_of(PROMPT, [*answer.token_ids, 1, *after.token_ids], [1] * 4 + [0] + [1] * 4)

    outputs = play(lambda: Life(sandboxed, [{}] * 12, batch=4, slots=slots, stall_s=2.0, scheduling=scheduling))
    assert [(output.masked, output.response_length) for output in outputs] == [(False, 9)] * 12


def test_validation_that_waits_for_carried_samples_ends_in_words():
    places = asyncio.Semaphore(1)

    async def sandboxed(client, row, params):
        async with places:
            return await plain(client, row, params, 60)

    async def story(life):
        await life.stop_round()
        await life.validate({"plain": False})

    with pytest.raises(TimeoutError, match=r"validation row 3 made no engine call for 0\.2 s .*sample_timeout_s"):
        play(beside_plain(sandboxed, sample_timeout_s=0.2), story)


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
        return await plain(client, row, params)

    try:
        output, _ = trained(travels, functions=[function("look", look)])
    finally:
        release.set()
    assert not output.masked, output.extra_fields


@pytest.mark.parametrize("error", [StopIteration("empty"), SystemExit("empty")])
def test_synchronous_tool_that_stops_or_exits_is_an_answer(error):
    def look():
        raise error

    async def asks(client, row, params):
        with pytest.raises(RuntimeError, match=f"{type(error).__name__}: empty"):
            await asyncio.wait_for(row["tools"]["look"].call({}), 5)
        return await plain(client, row, params)

    output, _ = trained(asks, functions=[function("look", look)])
    assert not output.masked, output.extra_fields
