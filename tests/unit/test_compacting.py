"""The example that compacts its context: trained alike under noPR, cut at every token, and after deaths and failures."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.tasks.calculator.conversation import call
from recipe.partial_rollout.tasks.calculator.tokenizer import build_tokenizer
from recipe.partial_rollout.tasks.clock10.reward import compute_score
from recipe.partial_rollout.tasks.compacting import CompactingLoop
from tests.unit.loop_life import Engine, Life, config_of, play
from tests.unit.test_chat_endpoint import ASSISTANT, BUILDER, EOS

TOKENIZER = build_tokenizer()
PROBLEM = "3?4=_?2=_-8=0"
QUESTION = [{"role": "user", "content": PROBLEM}]
BUDGET, ROOM = 60, 100
TRIES = ("++", "+-", "-+", "**", "*+", "*-", "--", "-*")
"""operators in the order in which they are tried; the last are right"""


class Guesser(Engine):
    """Tries operators in turn, by what its context has tried last, and answers after the value 0."""

    eos, repeats = EOS, True

    def token(self, context, nonce):
        begins = len(context) - 1 - context[::-1].index(ASSISTANT) + 2
        said = TOKENIZER.decode(context[:begins])
        tried = [i for i, (a, b) in enumerate(TRIES) if f"3{a}4{b}2-8" in said]
        if "tool\n0" in said:
            text = f"!{TRIES[tried[-1]]}"
        else:
            a, b = TRIES[tried[-1] + 1 if tried else 0]
            text = call(f"3{a}4{b}2-8")
        return [*TOKENIZER.encode(text, add_special_tokens=False), EOS][len(context) - begins]


def loop_of(client):
    loop = object.__new__(CompactingLoop)
    loop.server_manager, loop.tokenizer, loop.continuous_token_builder = client, TOKENIZER, BUILDER
    loop.rollout_config = SimpleNamespace(response_length=ROOM, prompt_length=64)
    loop.loop, loop._budget = asyncio.get_running_loop(), BUDGET
    return loop


def lived(story=Life.train, *, cut_after=None, score_fails=False):
    """What ``story`` makes of the life of one sample, and the life."""
    failed = []

    async def loop(client, row, params):
        return await loop_of(client).run(params, raw_prompt=QUESTION)

    async def score(output, row):
        if score_fails and not failed:
            failed.append(output)
            raise ConnectionError("the reward's service is away")
        text = TOKENIZER.decode(output.response_ids, skip_special_tokens=True)
        output.reward_score = compute_score("clock10", text, PROBLEM)

    engine = Guesser()
    engine.cut_after = cut_after

    async def told(life):
        return await story(life), life

    return play(lambda: Life(loop, [{}], config=config_of(ROOM, 64), engine=engine, score=score), told)


def said(rows):
    return [(row.prompt_ids.tolist(), row.response_ids.tolist(), row.response_mask.tolist()) for row in rows]


@pytest.fixture(scope="module")
def whole():
    """The rows of a sample that nothing interrupts, as the agent loop alone makes them."""

    async def run():
        params = {"max_tokens": ROOM, "logprobs": True}
        client = SimpleNamespace(generate=partial(Guesser(tick=0).generate))
        return await loop_of(client).run(params, raw_prompt=QUESTION)

    return [(row.prompt_ids, row.response_ids, row.response_mask) for row in asyncio.run(run())]


def test_each_row_begins_with_the_problem_and_the_last_try(whole):
    problem = "<|im_start|>user\n" + PROBLEM + "<|im_end|>\n<|im_start|>assistant\n"
    assert len(whole) > 2
    for before, (prompt, response, _) in zip([None, *whole], whole, strict=False):
        text = TOKENIZER.decode(prompt)
        assert text.startswith(problem) and len(response) < ROOM
        if before is not None:
            last = TOKENIZER.decode(before[1]).rpartition("<|im_start|>")[2].removeprefix("assistant\n")
            assert text.startswith(problem + last + "\n<|im_start|>tool\n") and text.count("tool\n") == 1


@pytest.mark.parametrize("cut_after", [None, 1, 7])
def test_rows_and_reward_are_those_of_an_uninterrupted_loop(whole, cut_after):
    (output,), life = lived(cut_after=cut_after, score_fails=True)
    assert said(output.rows) == whole and life.figures()["failures/failed_total"] == 1
    assert [row.reward_score for row in output.rows] == [1.0] * len(whole)
    assert output.metrics["untrained_tokens"] == 0


def test_sample_whose_worker_dies_begins_anew_and_ends_alike(whole):
    async def story(life):
        training = asyncio.ensure_future(life.train())
        await asyncio.sleep(0.05)
        await life.die()
        return await training

    (output,), life = lived(story)
    assert life.lives == 2 and said(output.rows) == whole and output.reward_score == 1.0
