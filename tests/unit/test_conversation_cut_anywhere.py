"""A conversation with tool calls ends alike wherever it is cut, at each token and in each call, by a round or by a death.

An interruption repeats nothing. After a death the conversation begins anew.

The training is ``loop_life``'s, the agent loop verl's, and the tool writes to a disk.
"""

import asyncio
import json

import pytest
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

from tests.chaos.workspace import ATTEMPT, Workspace
from tests.unit.loop_life import Engine, Life, output_of, play
from tests.unit.test_turn_alignment import ASSISTANT, OBSERVATION, USER, config_of, loop_of

TURNS, TOKENS = 3, 3
MOMENTS = TURNS * TOKENS + 2 * (TURNS - 1)
"""before each token, before and after the effect of each call"""
CONFIG = config_of(90, "cut")


@ToolParser.register("cut")
class CutParser(ToolParser):
    """An answer that ends in the observation token has its tokens written down."""

    async def extract_tool_calls(self, responses_ids, tools=None):
        command = f"echo {' '.join(map(str, responses_ids))} >> log; cat log"
        call = FunctionCall(name="run", arguments=json.dumps({"command": command}))
        return "x", [call] if responses_ids[-1] == OBSERVATION else []


class Moments:
    """Where the conversation stands; at each of ``cuts`` it waits, once, until the round is ``over``."""

    def __init__(self, cuts, over):
        self.cuts, self.passed, self.calls = set(cuts), [], []
        self.reached, self.over = asyncio.Event(), over

    async def one(self, *moment):
        self.passed.append(moment)
        if moment in self.cuts and not self.reached.is_set():
            self.cuts.discard(moment)
            self.reached.set()
        if self.reached.is_set():
            await self.over.wait()


class WatchedWorkspace(Workspace):
    def __init__(self, root, moments):
        super().__init__({"root": str(root)}, None)
        self.moments = moments

    async def execute(self, instance_id, parameters, **kwargs):
        command = parameters["command"]
        await self.moments.one("before", command)
        self.moments.calls.append(command)
        answer = await super().execute(instance_id, parameters, **kwargs)
        await self.moments.one("after", command)
        return answer


def next_token(context, number):
    made, turn = context[::-1].index(ASSISTANT), context.count(ASSISTANT)
    if made < TOKENS - 1:
        return 30 + 10 * turn + made
    return OBSERVATION if turn < TURNS else USER


def converse(root, cuts, deadly):
    """What becomes of the conversation, its effects and its calls, with these cuts.

    Each of the other prompts is complete once the conversation has reached a cut.
    """
    engine, attempts = Engine(next_token, ends=[OBSERVATION, USER]), []
    moments = Moments(cuts, engine.aborting)
    engine.tick = lambda context: moments.one("token", len(context))

    def effects():
        return (root / attempts[-1] / "log").read_text()

    async def loop(client, row, params):
        if row["converses"]:
            attempts.append(str(len(attempts)))
            ATTEMPT.set(attempts[-1])
            agent = loop_of(CONFIG, row["tools"].values(), client)
            return await agent.run({}, raw_prompt=[{"role": "user", "content": "go"}])
        await moments.reached.wait()
        return output_of([1], [])

    async def score(output, row):
        output.reward_score = float(len(effects())) if row["converses"] else 0.0

    def life():
        rows = [{"converses": True}, *[{"converses": False}] * len(cuts)]
        settings = {"slots": 64, "score": score, "stall_s": 20.0, "config": CONFIG, "engine": engine}
        return Life(loop, rows, functions=[WatchedWorkspace(root, moments)], **settings)

    async def story(life):
        for _ in cuts:
            await asyncio.wait_for(moments.reached.wait(), 20)
            if deadly:
                await life.die()
            await life.stop_round()
            moments.reached.clear()
            await life.next_round()
        await life.stop_round()
        return life.outputs["0/0"]

    (output,) = play(life, story)
    trajectory = [array.tolist() for array in (output.response_ids, output.response_mask)]
    return trajectory, output.reward_score, effects(), moments


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What becomes of the conversation without a cut."""
    return converse(tmp_path_factory.mktemp("undisturbed"), [], False)


@pytest.mark.parametrize("deadly", [False, True], ids=["interrupted", "worker dies"])
@pytest.mark.parametrize("cut", [*range(MOMENTS), slice(None)], ids=[*map(str, range(MOMENTS)), "all"])
def test_conversation_ends_alike_wherever_it_is_cut(undisturbed, cut, deadly, tmp_path):
    *expected, plain = undisturbed
    assert len(set(plain.passed)) == MOMENTS
    cuts = plain.passed[cut] if isinstance(cut, slice) else [plain.passed[cut]]
    *found, moments = converse(tmp_path, list(cuts), deadly)
    assert found == expected and not moments.cuts
    if not deadly:
        in_token = sum(kind == "token" for kind, _ in cuts)
        assert moments.calls == plain.calls and len(moments.passed) == MOMENTS + in_token, "nothing is made twice"
