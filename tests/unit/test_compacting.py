"""The example that compacts its context: one row for each context."""

from recipe.partial_rollout.tasks.calculator.conversation import call
from recipe.partial_rollout.tasks.clock10.reward import compute_score
from recipe.partial_rollout.tasks.compacting import CompactingLoop
from tests.unit.loop_life import Engine, Life, config_of, play
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


async def loop(client, row, params):
    agent = agent_of(CompactingLoop, client)
    agent._budget = 60
    return await agent.run(params, raw_prompt=[{"role": "user", "content": PROBLEM}])


async def score(output, row):
    said = TOKENIZER.decode(output.response_ids, skip_special_tokens=True)
    output.reward_score = compute_score("clock10", said, PROBLEM)


def test_each_row_begins_with_the_problem_and_the_last_try():
    """Cut after every token. ``tests/e2e/test_compacting.py`` compares the rows with those under noPR."""
    settings = {"config": config_of(ROOM, 64), "engine": Engine(guess, ends=[EOS], cut_after=1), "score": score}
    (output,) = play(lambda: Life(loop, [{}], **settings))
    problem, last = "<|im_start|>user\n" + PROBLEM + "<|im_end|>\n<|im_start|>assistant\n", ""
    assert len(output.rows) > 2 and output.metrics["untrained_tokens"] == 0
    for row in output.rows:
        text = TOKENIZER.decode(row.prompt_ids)
        assert text.startswith(problem + last) and text.count("tool\n") == bool(last)
        assert len(row.response_ids) < ROOM and row.reward_score == 1.0
        last = TOKENIZER.decode(row.response_ids).rpartition("<|im_start|>")[2].removeprefix("assistant\n")
        last += "\n<|im_start|>tool\n"
