"""The example that compacts its context: trained alike under noPR, cut at every token, and after deaths and failures."""

import asyncio
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.tasks.calculator.conversation import call
from recipe.partial_rollout.tasks.clock10.reward import compute_score
from recipe.partial_rollout.tasks.compacting import CompactingLoop
from tests.unit.loop_life import Engine, Life, config_of, fails_once, play
from tests.unit.test_chat_endpoint import ASSISTANT, EOS, ROOM, TOKENIZER, agent_of

PROBLEM = "3?4=_?2=_-8=0"
TRIES = ("++", "+-", "-+", "**", "*+", "*-", "--", "-*")
"""operators in the order in which they are tried; the last are right"""


def guess(context, number):
    """Tries operators in turn, by what its context has tried last, and answers after the value 0."""
    begins = len(context) - 1 - context[::-1].index(ASSISTANT) + 2
    said = TOKENIZER.decode(context[:begins])
    tried = [i for i, (a, b) in enumerate(TRIES) if f"3{a}4{b}2-8" in said]
    if "tool\n0" in said:
        text = f"!{TRIES[tried[-1]]}"
    else:
        a, b = TRIES[tried[-1] + 1 if tried else 0]
        text = call(f"3{a}4{b}2-8")
    return [*TOKENIZER.encode(text, add_special_tokens=False), EOS][len(context) - begins]


async def run(client, row, params):
    loop = agent_of(CompactingLoop, client)
    loop._budget = 60
    return await loop.run(params, raw_prompt=[{"role": "user", "content": PROBLEM}])


@pytest.fixture(scope="module")
def whole():
    """The rows of a sample that nothing interrupts, as the agent loop alone makes them."""

    async def alone():
        client = SimpleNamespace(generate=Engine(guess, ends=[EOS], tick_s=0).generate)
        return await run(client, {}, {"max_tokens": ROOM, "logprobs": True})

    return [(row.prompt_ids, row.response_ids, row.response_mask) for row in asyncio.run(alone())]


def test_each_row_begins_with_the_problem_and_the_last_try(whole):
    problem = "<|im_start|>user\n" + PROBLEM + "<|im_end|>\n<|im_start|>assistant\n"
    assert len(whole) > 2
    for before, (prompt, response, _) in zip([None, *whole], whole, strict=False):
        text = TOKENIZER.decode(prompt)
        assert text.startswith(problem) and len(response) < ROOM
        if before is not None:
            last = TOKENIZER.decode(before[1]).rpartition("<|im_start|>")[2].removeprefix("assistant\n")
            assert text.startswith(problem + last + "\n<|im_start|>tool\n") and text.count("tool\n") == 1


async def dies(life):
    """Its worker dies: the sample begins anew."""
    training = asyncio.ensure_future(life.train())
    await asyncio.sleep(0.05)
    await life.die()
    assert life.lives == 2
    return await training


@pytest.mark.parametrize(("cut_after", "lived"), [(None, Life.train), (1, Life.train), (7, Life.train), (None, dies)])
def test_rows_and_reward_are_those_of_an_uninterrupted_loop(whole, cut_after, lived):
    def score(output):
        return compute_score("clock10", TOKENIZER.decode(output.response_ids, skip_special_tokens=True), PROBLEM)

    async def story(life):
        (output,) = await lived(life)
        assert life.figures()["failures/failed_total"] == 1, "the reward that fails once"
        return output

    settings = {"config": config_of(ROOM, 64), "engine": Engine(guess, ends=[EOS], cut_after=cut_after)}
    output = play(lambda: Life(run, [{}], score=fails_once(score), **settings), story)
    rows = [(row.prompt_ids.tolist(), row.response_ids.tolist(), row.response_mask.tolist()) for row in output.rows]
    assert rows == whole and [row.reward_score for row in output.rows] == [1.0] * len(whole)
    assert output.metrics["untrained_tokens"] == 0
