"""The stage for agent loops: any loop in a training's own parts, in one process: manager, claim loop, client, alignment.

The engine is scripted: what it makes depends on the whole context and on its version, and it remembers every token that it
made, so ``check`` can tell whether a trained token was made under the context that it is trained in. ``test_loop_fuzz``
plays random loops here, ``test_loops`` a table of named ones.
"""

import asyncio
import contextlib
import hashlib
import pickle
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from ray import cloudpickle
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.tools.function_tool import FunctionTool
from verl.workers.rollout.replica import TokenOutput

from recipe.partial_rollout.config.settings import FailureLimits, Scheduling, ToolCalls
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.types import Prompt
from recipe.partial_rollout.tools.planner.engine_curve import EngineCurve
from recipe.partial_rollout.training.agent_loop_manager import assemble_batch
from recipe.partial_rollout.worker.agent_loop_worker import PartialRolloutAgentLoopWorker
from recipe.partial_rollout.worker.llm_client import PartialRolloutLLMClient
from tests.bench.scripted_engine import ScriptedWorker
from tests.unit.shared import InProcess, Local, script_replicas, settings_of, tool_schema

RETRY = FailureLimits(sample_retries=2)
PROMPT = [7, 8, 9]


def config_of(response_length=64, prompt_length=16, *, correction="none", **more):
    """Without a correction loops may sample as they like."""
    sizes = {"response_length": response_length, "prompt_length": prompt_length}
    rollout = SimpleNamespace(**sizes, **{"name": "vllm", "temperature": 1.0, **more})
    ours = SimpleNamespace(correction=correction, resume_kv="recompute")
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout), partial_rollout=ours)


def output_of(prompt, response, mask=None, **fields):
    """What a loop returns."""
    return AgentLoopOutput(
        prompt_ids=list(prompt),
        response_ids=list(response),
        response_mask=[1] * len(response) if mask is None else mask,
        num_turns=2,
        metrics=AgentLoopMetrics(),
        **fields,
    )


def ask(client, params, tokens, prompt=PROMPT):
    return client.generate("r", prompt_ids=prompt, sampling_params={**params, "max_tokens": tokens})


async def plain(client, row, params, tokens=5):
    return output_with(await ask(client, params, tokens))


def output_with(answer, prompt=PROMPT):
    """What a loop of one call returns."""
    return output_of(prompt, answer.token_ids, response_logprobs=answer.log_probs)


def function(name, call):
    """verl's tool of ``call``."""
    is_async = asyncio.iscoroutinefunction(call)
    return FunctionTool(name=name, fn=call, tool_schema=tool_schema(name), is_async=is_async)


def any_token(context, number):
    return 100 + (sum(context) + number) % 50


class Engine:
    """Makes a token a tick, up to ``max_tokens`` or one of ``ends``, until it is aborted.

    ``token(context, number)``: what follows the context in the request of this number. ``cut_after``: tokens after which
    each request is aborted by itself. ``answers``: these outputs and errors in turn, and nothing of the above.
    """

    answers = ()

    def __init__(self, token=any_token, *, ends=(), cut_after=None, tick_s=0.001):
        self.token, self.ends, self.cut_after, self.tick_s = token, ends, cut_after, tick_s
        self.version, self.running, self.asked = 0, 0, []
        self.most = self.decoded = 0
        self.aborting = asyncio.Event()
        self.made = {}
        """versions that made a token after a context"""

    async def tick(self, context):
        await asyncio.sleep(self.tick_s)

    async def generate(self, request_id, *, prompt_ids, sampling_params, **options):
        context, ids, log_probs = list(prompt_ids), [], []
        self.asked.append((request_id, list(prompt_ids), sampling_params, options))
        if self.answers:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer
        number, version, budget = len(self.asked), self.version, sampling_params["max_tokens"]
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            while not (whole := len(ids) >= budget or (ids and ids[-1] in self.ends)) and len(ids) != self.cut_after:
                await self.tick(context)
                if self.aborting.is_set():
                    break
                token = self.token(context, number)
                self.made.setdefault((digest(context), token), set()).add(version)
                ids.append(token)
                self.decoded += 1
                log_probs.append(log_prob(context, version))
                context.append(token)
        finally:
            self.running -= 1
        stop = "completed" if whole else "aborted"
        # As verl's server.
        log_probs = log_probs if sampling_params.get("logprobs") else None
        return TokenOutput(token_ids=ids, log_probs=log_probs, stop_reason=stop, extra_fields={"global_steps": version})

    async def quiet(self):
        """Return once no request runs."""
        while self.running:
            await asyncio.sleep(self.tick_s)


def digest(context):
    return hashlib.blake2b(repr([int(token) for token in context]).encode(), digest_size=8).digest()


def log_prob(context, version):
    return -(int.from_bytes(digest(context)[:2], "big") % 97) / 16 - 8.0 * version


class LoopWorker(ScriptedWorker):
    """The recipe's worker, in which ``loop(server_manager, row, params)`` stands for ``AgentLoopBase.run``."""

    tokenizer = processor = hf_model_type = dataset_cls = _reward_s = None
    _trained, _rewards, _parts = PartialRolloutAgentLoopWorker._trained, contextlib.nullcontext(), ()

    def __init__(self, life):
        super().__init__(EngineCurve(step_s=0.001, sample_s=0.0), 1)
        self.life = life
        self.tools = life.functions
        self.config.partial_rollout.tools = life.tools
        limits = self.config.partial_rollout.failures
        limits.sample_timeout_s, limits.tool_timeout_s = life.sample_timeout_s, 10.0
        self.config.trainer.save_freq, self.config.data = life.save_freq, {}
        self.config.trainer.use_v1 = life.use_v1
        sampling = {"top_p": 1.0, "top_k": -1, "calculate_log_probs": True}
        agent = SimpleNamespace(default_agent_loop="mine")
        self.rollout_config = SimpleNamespace(
            **{**vars(life.config.actor_rollout_ref.rollout), **sampling}, agent=agent
        )
        self.vocabulary = 1000
        self.llm_client = PartialRolloutLLMClient(life.config)

    def _maker(self, agent_name):
        def make(server_manager, tools, **_):
            given = {"tools": {tool.name: tool for tool in tools.tools}, "life": self.life}
            return SimpleNamespace(run=lambda params, **row: self.life.loop(server_manager, {**row, **given}, params))

        return make

    async def _compute_score(self, outputs, kwargs):
        if self.life.score is None:
            outputs[-1].reward_score = 1.0
        else:
            await self.life.score(outputs[-1], kwargs)


class Remote(Local):
    """Pickles what it is given, as Ray does."""

    def __getattr__(self, verb):
        ask = super().__getattr__(verb).remote
        return SimpleNamespace(remote=lambda *given: ask(*pickle.loads(cloudpickle.dumps(given))))


class Life:
    """A training of ``loop`` on ``rows``, a prompt each, ``batch`` a round; ``limits`` as in ``settings_of``."""

    def __init__(
        self, loop, rows, *, batch=1, n=1, slots=16, score=None, release_after_s=0.01, sample_timeout_s=None,
        scheduling=Scheduling(), stall_s=10.0, config=None, functions=(), save_freq=-1, engine=None,  # noqa: B008
        use_v1=True, **limits,
    ):  # fmt: skip
        self.loop, self.rows, self.batch, self.n, self.slots, self.score = loop, rows, batch, n, slots, score
        self.use_v1 = use_v1
        self.tools, self.sample_timeout_s, self.save_freq = ToolCalls(release_after_s), sample_timeout_s, save_freq
        self.config, self.functions = config or config_of(), functions
        sizes = {"overlap": (len(rows) - batch) / batch, "max_staleness": 99, "scheduling": scheduling}
        settings = settings_of(batch, n, stall_s=stall_s, **{**sizes, "failures": RETRY, "parked_s": stall_s, **limits})
        self.build = lambda: ManagerActor(settings, InProcess())
        self.actor, self.engine = self.build(), engine or Engine()
        self.lives, self.open = 0, False
        self.worker, self.replacing = None, asyncio.Lock()
        self.outputs = {}

    async def resume(self, path):
        """The run is killed after a checkpoint, and resumed from it."""
        await self.actor.save(str(path))
        self.end_worker()
        self.worker, self.actor = None, self.build()
        await self.actor.load(str(path))
        await self.serve()

    def end_worker(self):
        self.handle.broken = dict.fromkeys(("report", "claim"), RuntimeError("dead"))
        self.serving.cancel()
        # Its process would end with it, threads included.
        for sample in self.worker._claims.samples.values():
            sample.task.cancel()
            sample.ended = True

    async def die(self):
        """The worker dies in the round, if it is open, and is replaced."""
        async with self.replacing:
            if self.open:
                await self.serve()

    async def serve(self):
        """A worker takes the place of the last one."""
        if self.worker is not None:
            self.end_worker()
            await self.actor.release_worker(self.name)
        self.lives += 1
        self.name, self.handle, self.worker = f"w{self.lives}", Remote(self.actor), LoopWorker(self)
        self.worker.connect(self.name, self.handle, self.slots, {})
        # Its client's are scripted.
        del self.worker.llm_client.replicas
        self.serving = asyncio.create_task(self.worker.serve())
        self.serving.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.sleep(0.002)
        if self.open:
            self.worker.open_round()

    async def start(self):
        await self.serve()
        prompts = [Prompt(f"0/{i}", row) for i, row in enumerate(self.rows)]
        await self.actor.begin_version(0, prompts, False)
        self.open_round()

    def open_round(self):
        self.open = True
        self.worker.open_round()

    async def stop_round(self, timeout_s=20):
        """Train the next batch; everything else is interrupted."""
        assert await self.within(self.actor.wait_batch(True), timeout_s)
        batch = await self.actor.batch()
        async with self.replacing:
            self.open = False
            self.worker.close_round()
            self.engine.aborting.set()
            await self.within(self.worker.flush(), timeout_s)
        assert not self.worker._claims._running, "no call of a loop that awaits it runs"
        # The engine alone ends the requests of calls that were given up, and of workers that died.
        await self.within(self.engine.quiet(), timeout_s)
        await self.actor.finish_step()
        for group in batch.groups:
            self.outputs[group.uid] = group.outputs
            for row in group.rows:
                self.check(row)
        rollout = self.config.actor_rollout_ref.rollout
        assemble_batch(batch.groups, ["u"] * len(batch.groups), rollout.prompt_length, rollout.response_length, 0)
        return [output for group in batch.groups for output in group.outputs]

    async def within(self, awaitable, timeout_s):
        work = asyncio.ensure_future(awaitable)
        end = time.monotonic() + timeout_s
        while not work.done():
            serving = self.serving
            await asyncio.wait({work, serving}, timeout=end - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
            if self.handle.broken:
                # The next one is coming.
                await asyncio.sleep(0.001)
            elif serving.done() and serving is self.serving:
                raise AssertionError(f"the worker has ended: {serving.exception()!r}")
            assert time.monotonic() < end, f"hang: {self.actor._manager.samples.report()}"
        return work.result()

    async def next_round(self):
        self.engine.version += 1
        self.engine.aborting.clear()
        await self.actor.begin_version(self.engine.version, [], False)
        self.open_round()

    async def train(self, timeout_s=20, *, update_s=0.0):
        """All that is left, with updates of ``update_s``; the outputs of each prompt."""
        while len(self.outputs) < len(self.rows):
            await self.stop_round(timeout_s)
            if len(self.outputs) < len(self.rows):
                await asyncio.sleep(update_s)
                await self.next_round()
        return [output for i in range(len(self.rows)) for output in self.outputs[f"0/{i}"]]

    def check(self, output):
        """Every trained token was made by the engine, under the context and the version that are trained."""
        whole = [*output.prompt_ids.tolist(), *output.response_ids.tolist()]
        for i in np.flatnonzero(output.response_mask):
            at, version = len(output.prompt_ids) + int(i), int(output.versions[i])
            assert version in self.engine.made.get((digest(whole[:at]), whole[at]), ()), f"token {i} of {output}"
            assert output.log_probs[i] == np.float32(log_prob(whole[:at], version))

    async def validate(self, row):
        """What the loop returns last for ``row``, beside the samples that are carried."""
        assert not self.open
        self.engine.aborting.clear()
        trajectory = {"step": -1, "sample_index": 3, "rollout_n": 0, "validate": True}
        play = partial(self.worker._run_loop, self.worker._maker("mine"), {"temperature": 0.0, "logprobs": True}, row)
        return (await self.worker._attempt(play, trajectory))[-1]

    def figures(self):
        return self.actor._manager.metrics()


@contextlib.asynccontextmanager
async def living(life):
    """``life`` in its first round, on its engine."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    with pytest.MonkeyPatch.context() as patch:
        script_replicas(patch, life.engine.generate)
        await life.start()
        try:
            yield life
        finally:
            # asyncio.run does so again: a task may be in the midst of ending another, and waits for it.
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0.01)


def play(life_of, story=Life.train):
    """``story(life)`` in an event loop of its own."""

    async def run():
        async with living(life_of()) as life:
            return await story(life)

    started = time.monotonic()
    result = asyncio.run(run())
    assert time.monotonic() - started < 60
    return result


def beside_plain(loop, **settings):
    """A life of two prompts; the first, which is short, ends a round in which ``loop`` is in the midst of the second."""

    async def either(client, row, params):
        return await (plain(client, row, params, 20) if row["plain"] else loop(client, row, params))

    return lambda: Life(either, [{"plain": True}, {"plain": False}], **settings)


def trained(loop, *, update_s=0.0, **settings):
    """The output of ``loop``, and its training, whose updates take ``update_s``."""

    async def story(life):
        return (await life.train(update_s=update_s))[1], life

    return play(beside_plain(loop, **settings), story)
