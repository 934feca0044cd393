"""Random agent loops in random lives: each sample is trained or masked, each trained token the engine's in its context.

``PARTIAL_ROLLOUT_SEQUENCES=300 bash run_scripts/run_tests.sh tests/unit/test_loop_fuzz.py`` plays more.
"""

import asyncio
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recipe.partial_rollout.config.settings import Scheduling, SchedulingPolicy
from tests.unit.loop_life import PROMPT, Engine, Life, ask, function, output_of, play

SEPARATOR, CUT = 1, -1
"""``(CUT, number)`` in a conversation: here it has been rewritten, into a prompt with this number"""


@dataclass(frozen=True)
class Step:
    """A part of an agent loop. What it returns goes on with the conversation that it was given."""

    kind: str
    ms: int = 0
    tokens: int = 0
    keep: int = 0
    parts: tuple["Step", ...] = ()

    @property
    def steps(self):
        yield self
        for part in self.parts:
            yield from part.steps


calls = st.builds(Step, st.just("generate"), tokens=st.integers(1, 12))
waits = st.builds(Step, st.sampled_from(["sleep", "tool"]), ms=st.sampled_from([0, 1, 5, 20]))
ERRORS = {"raise": ValueError, "raise once": ValueError, "exit": SystemExit, "cancel": asyncio.CancelledError}
raises = st.builds(Step, st.sampled_from([*ERRORS]))
rewrites = st.builds(Step, st.just("rewrite"), keep=st.integers(0, 3))
leaves = st.one_of(calls, calls, calls, waits, waits, rewrites, raises)


def deeper(parts):
    several = st.lists(parts, min_size=1, max_size=3).map(tuple)
    one = parts.map(lambda part: (part,))
    return st.one_of(
        st.builds(Step, st.just("sequence"), parts=several),
        st.builds(Step, st.just("gather"), parts=several, keep=st.integers(0, 2)),
        st.builds(Step, st.just("wait for"), parts=one, ms=st.sampled_from([1, 8, 30])),
        st.builds(Step, st.sampled_from(["semaphore", "leave", "suppress"]), parts=one),
        st.builds(Step, st.just("branch"), parts=several, keep=st.integers(0, 3)),
        st.builds(Step, st.just("thread"), parts=st.lists(calls | waits, min_size=1, max_size=2).map(tuple)),
    )


loops = st.recursive(leaves, deeper, max_leaves=8).map(
    lambda step: Step("sequence", parts=(step, Step("generate", tokens=5)))
)
lives = st.fixed_dictionaries(
    {
        "loops": st.lists(loops, min_size=3, max_size=6),
        "scheduling": st.sampled_from([Scheduling(), Scheduling(SchedulingPolicy.SEED), Scheduling(overtake=0)]),
        "slots": st.integers(1, 5),
        "places": st.integers(1, 3),
        "between": st.lists(
            st.sampled_from(["nothing", "nothing", "death", "resume", "update"]), min_size=6, max_size=6
        ),
        "deaths_ms": st.lists(st.integers(0, 60), max_size=3),
    }
)


def rows_of(conversation):
    """``[(prompt, [(token, mask)])]``: the context of a conversation, and those from which it was rewritten."""
    rows = [(PROMPT, [])]
    for token, mask in conversation:
        if token == CUT:
            rows.append(([SEPARATOR, mask], []))
        else:
            rows[-1][1].append((token, mask))
    return rows


class Loops:
    """Runs a row's loop, from its steps."""

    def __init__(self, drawn):
        self.drawn, self.raised, self.left = drawn, set(), []
        self.places = None

    async def __call__(self, client, row, params):
        self.places = self.places or asyncio.Semaphore(self.drawn["places"])
        run = SimpleNamespace(client=client, row=row, params=params, home=asyncio.get_running_loop(), holds=False)
        run.branches = []
        made = await self.step(self.drawn["loops"][row["number"]], run, [])
        rows = [*run.branches, *rows_of(made)]
        return [output_of(prompt, [token for token, _ in row], [mask for _, mask in row]) for prompt, row in rows]

    async def step(self, step, run, before):
        """``[(token, mask)]`` that ``step`` adds to the conversation ``before``."""
        if step.kind == "generate":
            prompt, said = rows_of(before)[-1]
            answer = await ask(run.client, run.params, step.tokens, prompt + [token for token, _ in said])
            return [(token, 1) for token in answer.token_ids]
        if step.kind == "sequence":
            made = []
            for part in step.parts:
                made += await self.step(part, run, before + made)
            return made
        if step.kind == "gather":
            answers = await asyncio.gather(*[self.step(part, run, before) for part in step.parts])
            return answers[step.keep % len(answers)]
        if step.kind == "thread":
            work = asyncio.run, self.step(Step("sequence", parts=step.parts), run, before)
            return await run.home.run_in_executor(None, *work)
        if step.kind in ERRORS:
            key = run.row["number"], step
            if step.kind == "raise once" and key in self.raised:
                return []
            self.raised.add(key)
            raise ERRORS[step.kind]("drawn")
        return await getattr(self, step.kind.replace(" ", "_"))(step, run, before)

    async def rewrite(self, step, run, before):
        return [(CUT, step.keep)]

    async def branch(self, step, run, before):
        made = await self.step(Step("sequence", parts=step.parts), run, begun := [(CUT, step.keep)])
        run.branches += rows_of(begun + made)[1:]
        return [(SEPARATOR, 0), (len(made), 0)]

    async def sleep(self, step, run, before):
        await asyncio.sleep(step.ms / 1000)
        return []

    async def tool(self, step, run, before):
        answer = await run.row["tools"]["pay"].call({"ms": step.ms, "at": len(before)})
        return [(SEPARATOR, 0), (len(answer), 0)]

    async def wait_for(self, step, run, before):
        try:
            return await asyncio.wait_for(self.step(step.parts[0], run, before), step.ms / 1000)
        except TimeoutError:
            return [(SEPARATOR, 0)]

    async def semaphore(self, step, run, before):
        if run.holds:
            return await self.step(step.parts[0], run, before)
        async with self.places:
            run.holds = True
            return await self.step(step.parts[0], run, before)

    async def suppress(self, step, run, before):
        try:
            return await self.step(step.parts[0], run, before)
        except (ValueError, RuntimeError):
            return []

    async def leave(self, step, run, before):
        self.left.append(asyncio.ensure_future(self.step(step.parts[0], run, before)))
        await asyncio.sleep(0)
        return []


async def pay(ms, at):
    assert threading.current_thread() is threading.main_thread(), "not that of a loop's own"
    await asyncio.sleep(ms / 1000)
    return "paid"


def may_fail(loop):
    return any(step.kind in ERRORS for step in loop.steps) or sum(step.tokens + 2 for step in loop.steps) > 60


async def story(life, drawn, folder):
    async def deaths():
        for ms in drawn["deaths_ms"]:
            await asyncio.sleep(ms / 1000)
            await life.die()

    dying = asyncio.ensure_future(deaths())
    for round_ in range(len(life.rows)):
        await life.stop_round()
        if len(life.outputs) == len(life.rows):
            break
        between = drawn["between"][round_]
        if between == "death":
            await life.serve()
        elif between == "resume":
            await life.resume(Path(folder) / str(round_))
        elif between == "update":
            await asyncio.sleep(0.03)
        await life.next_round()
    dying.cancel()
    assert len(life.outputs) == len(life.rows)
    for i, loop in enumerate(drawn["loops"]):
        (output,) = life.outputs[f"0/{i}"]
        assert not output.masked or may_fail(loop), output.extra_fields


@given(lives)
@settings(
    max_examples=int(os.environ.get("PARTIAL_ROLLOUT_SEQUENCES", "25")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
def test_sample_of_any_loop_is_trained_on_the_engines_tokens_or_masked(drawn):
    rows = [{"number": i} for i in range(len(drawn["loops"]))]

    def life():
        settings = {"slots": drawn["slots"], "scheduling": drawn["scheduling"], "functions": [function("pay", pay)]}
        return Life(Loops(drawn), rows, engine=Engine(tick_s=0.0005), release_after_s=0.004, **settings)

    with tempfile.TemporaryDirectory() as folder:
        play(life, lambda life: story(life, drawn, folder))
