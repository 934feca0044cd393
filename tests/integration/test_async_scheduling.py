"""Holds and interruptions at every step of a short generation, under the scheduler of a GPU; no model, see the executor.

At the step in question two are under way: one that stands still until the core has the server's message, and the next.
"""

import asyncio
import itertools
import runpy
from pathlib import Path

import pytest

from recipe.partial_rollout.engine import replica
from recipe.partial_rollout.engine.hold import spans

HERE = Path(__file__).parent
E2E = HERE.parent / "e2e"
SAMPLES, RESPONSE = 5, 8
ACTIONS = ("hold", "interrupt", "hold and interrupt")
LATE_S = 0.002
"""what vLLM's output handler takes for each step, as on a busy machine"""
WAIT_S = 60


class Sample:
    """What its calls have given back so far, with the version that is said to have made each token."""

    def __init__(self, number, prompt):
        self.number, self.prompt = number, prompt
        self.tokens, self.log_probs, self.versions = [], [], []

    async def run(self, server, name):
        """Ask until it is whole, as the recipe's client does after each interruption."""
        for call in itertools.count():
            sampling = {"temperature": 0.0, "ignore_eos": True, "logprobs": True, "detokenize": False}
            sampling["max_tokens"] = RESPONSE - len(self.tokens)
            prompt = [*self.prompt, *self.tokens]
            output = await server.generate(prompt, sampling, f"{name}-{self.number}-{call}", priority=self.number)
            marks = output.extra_fields.get("version_marks", [])
            for span in spans(len(output.token_ids), marks, output.extra_fields["global_steps"]):
                self.versions += [span.version] * (span.stop - span.start)
            self.tokens += output.token_ids
            self.log_probs += output.log_probs or []
            if len(self.tokens) >= RESPONSE:
                return

    def faults(self, scripted, stale_allowed):
        """What is wrong with it: tokens, or log-probs of other weights than the marks say."""
        if self.tokens != scripted.response_to(self.prompt, RESPONSE):
            return [f"{self.number}: tokens {self.tokens}"]
        said = [scripted.log_prob(version) for version in self.versions]
        stale = [scripted.log_prob(version, stale=stale_allowed) for version in self.versions]
        right = len(said) == len(self.log_probs) and all(
            log_prob in pair for log_prob, *pair in zip(self.log_probs, said, stale, strict=True)
        )
        return [] if right else [f"{self.number}: log-probs {self.log_probs}, versions {self.versions}"]


class Bench:
    """The engine, and servers that keep or drop the KV blocks at a hold."""

    def __init__(self, engine, scripted, directory):
        self.engine, self.scripted, self.reached = engine, scripted, directory / "reached"
        serve = runpy.run_path(str(E2E / "bare_server.py"))["serve"]
        self.servers = {kv: serve(engine, replica.RecipeVLLMServer, RESPONSE, kv) for kv in ("recompute", "keep")}
        self.version, self.names, self.wrong = 0, map(str, itertools.count()), []

    def core(self, verb, *args):
        return self.engine.engine_core.call_utility_async(verb, *args)

    async def act(self, server, action):
        """Hold, interrupt, or both; a sample of the best priority arrives; then new weights."""
        if "hold" in action:
            await server.hold()
            self.wrong += [] if await self.is_idle() else ["the engine is not idle, or its tokens are not counted"]
        if "interrupt" in action:
            await server.abort_all_requests()
            # Where vLLM's output handler is slow, requests end a moment later; the driver too waits for them.
            while self.engine.output_processor.request_states:
                await asyncio.sleep(0.001)
        urgent = Sample(-1, self.scripted.prompt_of(-1, 4))
        running = asyncio.ensure_future(urgent.run(server, next(self.names)))
        await asyncio.sleep(0.001)
        self.version += 1
        await self.engine.collective_rpc("set_version", args=(self.version,))
        await server.clear_kv_cache()
        server.global_steps = self.version
        await server.resume_generation()
        return urgent, running

    async def is_idle(self):
        states = self.engine.output_processor.request_states.values()
        core = await self.core("counts")
        made = {state.request_id: state.detokenizer.num_output_tokens() for state in states}
        return core["steps"] == core["expected"] == 0 and core["tokens"] == made

    def samples(self, count, room):
        lengths = self.scripted.ROOM[room]
        return [Sample(i, self.scripted.prompt_of(i, lengths[i % len(lengths)])) for i in range(count)]

    async def at_step(self, step, protocol, room, kv, action):
        """Whether the generation had that step, and what went wrong."""
        server, samples, name = self.servers[kv], self.samples(SAMPLES, room), next(self.names)
        await self.engine.reset_prefix_cache()
        await self.core("speak", protocol == "V2")
        server.global_steps = self.version
        self.reached.unlink(missing_ok=True)
        await self.core("stall", step, str(self.reached))
        running = asyncio.gather(*[sample.run(server, name) for sample in samples])
        while not (self.reached.exists() or running.done()):
            await asyncio.sleep(0.0005)
        acted = self.reached.exists()
        if acted:
            urgent, last = await self.act(server, action)
            await last
            samples.append(urgent)
        await running
        return acted, await self.faults_of(samples, kv == "keep" and action == "hold")

    async def faults_of(self, samples, stale_allowed):
        faults, self.wrong = self.wrong, []
        faults += [fault for sample in samples for fault in sample.faults(self.scripted, stale_allowed)]
        faults += (await self.engine.collective_rpc("faults"))[0]
        if any(server.engine.requests for server in self.servers.values()) or (await self.core("counts"))["blocks"]:
            faults.append("marks or blocks are left")
        return faults

    async def at_every_step(self, protocol, room, kv, action):
        """The number of steps, and what went wrong, with the step at which it did."""
        found, began = [], (await self.core("counts"))["preempted"]
        for step in itertools.count(1):
            acted, faults = await asyncio.wait_for(self.at_step(step, protocol, room, kv, action), WAIT_S)
            if not acted:
                await self.core("stall", 0, "")
                return step - 1, found, (await self.core("counts"))["preempted"] - began
            found += [f"step {step}: {fault}" for fault in faults]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """(runs a coroutine, the bench): one engine for all tests, in whose loop they run."""
    directory = tmp_path_factory.mktemp("scripted")
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        for folder in (HERE, E2E):
            patch.syspath_prepend(str(folder))
        import async_scheduling
        import scripted_executor

        engine = runner.run(start(async_scheduling, scripted_executor.engine_args, directory))
        runner.run(engine.get_supported_tasks())
        slow_outputs(engine.engine_core)
        yield runner.run, Bench(engine, scripted_executor, directory)
        try:
            runner.run(asyncio.wait_for(async_scheduling.watched(engine), WAIT_S))
        finally:
            engine.shutdown()


async def start(async_scheduling, engine_args, directory):
    from vllm.v1.engine.async_llm import AsyncLLM

    with async_scheduling.allowed() as own:
        return AsyncLLM.from_engine_args(engine_args(directory, **own))


def slow_outputs(core):
    """vLLM's output handler is slower than the engine: a count that does not wait for it is wrong."""
    original = core.get_output_async

    async def late():
        outputs = await original()
        await asyncio.sleep(LATE_S)
        return outputs

    core.get_output_async = late


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kv", ["recompute", pytest.param("keep", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("room", ["plentiful", "scarce"])
@pytest.mark.parametrize("protocol", ["V1", "V2"])
def test_no_step_is_a_bad_one_for_a_hold_or_an_interruption(bench, protocol, room, kv, action):
    run, engine = bench
    steps, faults, preempted = run(engine.at_every_step(protocol, room, kv, action))
    assert faults == []
    assert steps >= 2 * RESPONSE and (preempted > 0) == (room == "scarce")
