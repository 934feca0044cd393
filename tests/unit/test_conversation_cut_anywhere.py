"""A conversation with tool calls ends alike wherever it is cut, at each token and in each call, by a round or by a death.

Manager, claim loop, client, journal and workspace are the recipe's, the agent loop is verl's; the engine is scripted.
"""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.workers.rollout.replica import TokenOutput

from recipe.partial_rollout.config.settings import ToolCalls
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.types import Prompt
from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE
from recipe.partial_rollout.worker.tool_journal import journaled
from tests.bench.scripted_engine import ScriptedWorker, output_of
from tests.chaos.workspace import Workspace
from tests.unit.shared import InProcess, Local, script_replicas, settings_of
from tests.unit.test_turn_alignment import ASSISTANT, OBSERVATION, USER, config_of, loop_of
from tests.unit.test_worker import CURVE, RETRY, finish_round

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
    """Where the conversation stands; at each of ``cuts`` it waits, once, until the cut has been made."""

    def __init__(self, cuts):
        self.cuts, self.passed, self.calls = set(cuts), [], []
        self.reached, self.over = asyncio.Event(), asyncio.Event()

    async def one(self, *moment):
        self.passed.append(moment)
        if moment in self.cuts and not self.reached.is_set():
            self.cuts.discard(moment)
            self.reached.set()
        if self.reached.is_set():
            await self.over.wait()

    def begin(self):
        self.reached.clear()
        self.over.clear()


class WatchedWorkspace(Workspace):
    def __init__(self, root, moments):
        super().__init__({"root": str(root)}, None)
        self.moments = moments

    async def execute(self, instance_id, parameters, call_id=None, **kwargs):
        await self.moments.one("before", call_id)
        self.moments.calls.append((call_id, parameters["command"]))
        answer = await super().execute(instance_id, parameters, call_id=call_id, **kwargs)
        await self.moments.one("after", call_id)
        return answer


class Conversing(ScriptedWorker):
    """Its first prompt is the conversation; each of the others is complete once the conversation has reached a cut."""

    def __init__(self, root, moments):
        super().__init__(CURVE, 1)
        self.config.partial_rollout.tools = ToolCalls(release_after_s=0.01)
        self.root, self.moments = root, moments

    async def _run_agent_loop(self, sampling_params, trajectory, *, length, **kwargs):
        sample = LIVE_SAMPLE.get()
        if not sample.id.startswith("0/0#"):
            async with sample.keeper.engine_call(sample):
                await self.moments.reached.wait()
            return output_of(0, self._version)
        assert sample.group == "0/0"
        workspace = WatchedWorkspace(self.root, self.moments)
        loop = loop_of(CONFIG, journaled([workspace], 20.0))
        output = await loop.run({}, raw_prompt=[{"role": "user", "content": "go"}])
        return await self._agent_loop_postprocess(output, False)

    async def _compute_score(self, outputs, kwargs):
        outputs[0].reward_score = float(len((self.root / "live" / "0_0#0" / "files" / "log").read_text()))


def next_token(context):
    made, turn = context[::-1].index(ASSISTANT), context.count(ASSISTANT)
    if made < TOKENS - 1:
        return 30 + 10 * turn + made
    return OBSERVATION if turn < TURNS else USER


@pytest.fixture(scope="module")
def engine():
    """Makes a token at each turn of the event loop, until it is aborted."""
    state = SimpleNamespace(moments=None, aborting=asyncio.Event())

    async def generate(request_id, *, prompt_ids, **request):
        made = []
        while not made or made[-1] not in (OBSERVATION, USER):
            await state.moments.one("token", len(prompt_ids) + len(made))
            if state.aborting.is_set():
                break
            made.append(next_token([*prompt_ids, *made]))
        probs, stop = [-token / 8 for token in made], "aborted" if state.aborting.is_set() else "completed"
        return TokenOutput(token_ids=made, log_probs=probs, stop_reason=stop, extra_fields={"global_steps": 0})

    with pytest.MonkeyPatch.context() as patch:
        script_replicas(patch, generate)
        yield state


@pytest.fixture(scope="module")
def undisturbed(engine, tmp_path_factory):
    """What becomes of the conversation without a cut."""
    return asyncio.run(converse(engine, tmp_path_factory.mktemp("undisturbed"), [], False))


async def converse(engine, root, cuts, deadly):
    """The conversation's output, its effects and its calls, with so many cuts."""
    engine.moments, engine.aborting = moments, aborting = Moments(cuts), asyncio.Event()
    prompts = len(cuts) + 1
    limits = {"failures": RETRY, "stall_s": 20.0, "away_s": 20.0}
    actor = ManagerActor(settings_of(overlap=float(len(cuts)), max_staleness=99, **limits), InProcess())
    groups, version = {}, 0
    # Nobody asks what a dead worker's calls have raised.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)

    async def serve(name):
        handle, worker = Local(actor), Conversing(root, moments)
        worker.connect(name, handle, 64, {})
        serving = asyncio.create_task(worker.serve())
        await asyncio.sleep(0.01)
        worker.begin(version, time.monotonic())
        return handle, worker, serving

    handle, worker, serving = await serve("w0")
    await actor.begin_version(0, [Prompt(f"0/{i}", {"lengths": [0]}) for i in range(prompts)], False)
    for version in range(1, prompts):
        await asyncio.wait_for(moments.reached.wait(), 20)
        if deadly:
            handle.broken = dict.fromkeys(("report", "claim"), RuntimeError("dead"))
            for task in (serving, *worker._claims._tasks):
                task.cancel()
            await actor.release_worker(f"w{version - 1}")
            handle, worker, serving = await serve(f"w{version}")
        batch = await asyncio.wait_for(actor.wait_batch(True), 20)
        worker.close_round()
        aborting.set()
        moments.over.set()
        await asyncio.wait_for(worker.flush(), 20)
        await actor.finish_step([group.uid for group in batch.groups])
        groups |= {group.uid: group for group in batch.groups}
        aborting.clear()
        moments.begin()
        await actor.begin_version(version, [], False)
        worker.begin(version, time.monotonic())
    groups |= {group.uid: group for group in await finish_round(handle, worker)}
    serving.cancel()
    (output,) = groups["0/0"].outputs
    trajectory = [array.tolist() for array in (output.response_ids, output.response_mask, output.log_probs)]
    effects = (root / "live" / "0_0#0" / "files" / "log").read_text()
    return trajectory, output.reward_score, effects, output.metrics["calls_asked"], moments


@pytest.mark.parametrize("deadly", [False, True], ids=["interrupted", "worker dies"])
@pytest.mark.parametrize("cut", [*range(MOMENTS), slice(None)], ids=[*map(str, range(MOMENTS)), "all"])
def test_conversation_ends_alike_wherever_it_is_cut(engine, undisturbed, cut, deadly, tmp_path):
    *expected, _, plain = undisturbed
    assert len(set(plain.passed)) == MOMENTS
    cuts = plain.passed[cut] if isinstance(cut, slice) else [plain.passed[cut]]
    *found, asked, moments = asyncio.run(converse(engine, tmp_path, list(cuts), deadly))
    assert found == expected and not moments.cuts
    in_token = [kind == "token" for kind, _ in cuts]
    assert asked == (deadly and not in_token[-1]), "only of the call that the last death has cut off"
    if not deadly:
        assert moments.calls == plain.calls and len(moments.passed) == MOMENTS + sum(in_token), "nothing is made twice"
