"""A scripted engine under the manager, killed or restored at every transition of a sample, right before and right after.

The script fixes what each sample says and does: how many tokens in which engine calls, whether it calls a tool, whether
its agent loop raises. So the end of every run is known, token by token.
"""

import contextlib
import gc
import itertools
import sys
from collections import Counter, deque
from functools import partial
from zlib import crc32

import numpy as np
import pytest

from recipe.partial_rollout.checkpoint.manifest import read_snapshot, write_snapshot
from recipe.partial_rollout.config.settings import FailureLimits
from recipe.partial_rollout.manager.codec import restore
from recipe.partial_rollout.manager.policies import FailureVerdict
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.types import Progress, Prompt, Segment
from tests.unit.shared import output_of, settings_of, state_of

CHUNK = 3
"""tokens of one engine call"""
TRANSITIONS = "claim", "segment", "tool_result", "interrupt", "finish", "fail", "retry", "take", "acknowledge"


class SampleScript:
    """What one sample will say and do, whoever runs it."""

    def __init__(self, sample_id):
        prompt, index = (int(part) for part in sample_id.split("/")[1].split("#"))
        self.length = 2 + (prompt * 5 + index * 3) % 11
        self.tool_after = CHUNK if index % 2 and self.length > CHUNK else None
        """tokens before its tool call"""
        self.raises = {1: 1, 3: 99}.get(prompt % 5, 0) if index == 0 else 0
        """times that its agent loop raises"""
        self.tokens = (np.arange(self.length) * 13 + crc32(sample_id.encode()) % 9973).astype(np.int32)
        self.log_probs = (-self.tokens / 16384).astype(np.float32)


class Struck(Exception):
    """What was under way does not go on."""


class ScriptedRun:
    """Trainer, two workers and engine around one manager.

    ``fault(run, transition, side, sample_id)`` is asked around every step; where it strikes, it raises ``Struck``.
    """

    def __init__(self, path, fault, total=8):
        self.path, self.total, self.batch, self.n, self.max_staleness = path, total, 2, 2, 2
        self.fault = fault
        self.offered, self.trained = 0, {}
        self.engine_tokens, self.tool_calls = Counter(), Counter()
        self.names = (f"w{i}" for i in itertools.count())
        self.boot()

    def boot(self):
        failures = FailureLimits(sample_retries=2)
        settings = settings_of(self.batch, self.n, max_staleness=self.max_staleness, failures=failures)
        clock = itertools.count()
        self.manager = PromptsManager(settings, lambda: float(next(clock)))
        self.held, self.running, self.failed, self.taken = {}, deque(), deque(), []
        self.join()
        self.join()

    def join(self):
        worker = next(self.names)
        self.manager.slots.register(worker, 3)
        self.held[worker] = {}

    # -- faults ----------------------------------------------------------------------------------------------------

    def kill_worker(self, sample_id):
        """The worker that runs ``sample_id`` dies with its conversations, and another takes its place."""
        worker = dict(self.running).get(sample_id) or next(iter(self.held))
        self.manager.release_worker(worker)
        del self.held[worker]
        self.running = deque((s, w) for s, w in self.running if w != worker)
        self.join()

    def crash(self, sample_id):
        """Everything dies right after a checkpoint, and the training goes on from it."""
        write_snapshot(self.path, state_of(self.manager))
        self.boot()
        restore(self.manager, read_snapshot(self.path))

    def step(self, transition, verb, sample_id=None):
        self.fault(self, transition, "before", sample_id)
        verb()
        self.fault(self, transition, "after", sample_id)

    # -- a run -----------------------------------------------------------------------------------------------------

    def play(self):
        turns = itertools.count()
        while len(self.trained) < self.total:
            assert next(turns) < 200 * self.total
            with contextlib.suppress(Struck):
                self.turn()
        return self

    def turn(self):
        """The trainer's part where it can act, or else a sample's."""
        if self.taken and self.running:
            self.interrupt(self.running[0][0])
        elif self.taken:
            self.step("acknowledge", self.acknowledge)
        elif not self.manager.round_open:
            self.open_round()
        elif self.manager.round_complete():
            self.step("take", self.take)
        else:
            self.play_samples()

    def open_round(self):
        count = min(self.manager.wanted, self.total - self.offered)
        prompts = [Prompt(f"0/{i}", {"index": i}) for i in range(self.offered, self.offered + count)]
        self.offered += count
        self.manager.reserve.offer(prompts, self.total - self.offered)
        self.manager.begin_version(len(self.trained) // self.batch)

    def play_samples(self):
        if self.failed:
            self.step("retry", lambda: self.manager.retry(self.failed.popleft()), self.failed[0])
        for worker in list(self.held):
            self.step("claim", partial(self.claim, worker), self.running[-1][0] if self.running else None)
        if self.running:
            self.advance(self.running[0][0])
        self.running.rotate(-1)

    def claim(self, worker):
        for grant in self.manager.claim(worker, limit=1):
            journals = list(grant.segments), list(grant.tool_results)
            # Its own worker has them already.
            assert grant.held == (grant.sample_id in self.held[worker])
            assert journals == ([], []) or not grant.held
            self.held[worker].setdefault(grant.sample_id, journals)
            self.running.append((grant.sample_id, worker))

    def advance(self, sample_id):
        """The next thing that its agent loop does."""
        script = SampleScript(sample_id)
        segments, results = self.held[dict(self.running)[sample_id]][sample_id]
        done = sum(map(len, segments))
        failures = self.manager.samples.unfinished[sample_id].failures
        if done >= min(CHUNK, script.length) and failures < script.raises:
            self.step("fail", lambda: self.fail(sample_id), sample_id)
        elif script.tool_after is not None and done >= script.tool_after and not results:
            self.tool_calls[sample_id] += 1
            self.step("tool_result", lambda: self.tool_result(sample_id, results), sample_id)
        elif done < script.length:
            self.call_engine(sample_id, min(CHUNK, script.length - done), "completed")
        else:
            self.step("finish", lambda: self.finish(sample_id, segments), sample_id)

    def call_engine(self, sample_id, count, stop_reason):
        script = SampleScript(sample_id)
        segments, _ = self.held[dict(self.running)[sample_id]][sample_id]
        part = slice(sum(map(len, segments)), sum(map(len, segments)) + count)
        segment = Segment(script.tokens[part], script.log_probs[part], self.manager.version, stop_reason)
        self.engine_tokens[sample_id] += count

        def verb():
            self.manager.add(Progress(sample_id, [segment]))
            segments.append(segment)

        self.step("segment", verb, sample_id)

    def tool_result(self, sample_id, results):
        results.append({"text": sample_id})
        self.manager.add(Progress(sample_id, tool_results=[results[-1]]))

    def leave(self, sample_id):
        worker = dict(self.running)[sample_id]
        self.running.remove((sample_id, worker))
        return worker

    def interrupt(self, sample_id):
        script = SampleScript(sample_id)
        done = sum(map(len, self.held[dict(self.running)[sample_id]][sample_id][0]))
        if done < script.length:
            self.call_engine(sample_id, 1, None)

        def verb():
            self.manager.interrupt(sample_id)
            self.leave(sample_id)

        self.step("interrupt", verb, sample_id)

    def fail(self, sample_id):
        verdict = self.manager.fail(sample_id, "scripted")
        del self.held[self.leave(sample_id)][sample_id]
        if verdict is FailureVerdict.RETRY:
            self.failed.append(sample_id)

    def finish(self, sample_id, segments):
        self.manager.finish(sample_id, output_of(segments, reward=1.0))
        del self.held[self.leave(sample_id)][sample_id]

    def take(self):
        self.taken = self.manager.take_batch(stop=True)

    def acknowledge(self):
        self.manager.groups.train(group.uid for group in self.taken)
        for group in self.taken:
            assert group.uid not in self.trained
            self.trained[group.uid] = (self.manager.version, group.outputs)
        self.taken = []


def assert_trained_once_and_exactly(run):
    assert sorted(run.trained) == sorted(f"0/{i}" for i in range(run.total))
    assert run.manager.groups.lost == 0
    for uid, (version, outputs) in run.trained.items():
        assert len(outputs) == run.n
        for i, output in enumerate(outputs):
            script = SampleScript(f"{uid}#{i}")
            assert output.masked == (script.raises > 2)
            if output.masked:
                assert not output.response_mask.any() and (output.versions == -1).all()
                assert output.response_ids.tolist() == script.tokens[: len(output.response_ids)].tolist()
                continue
            assert output.response_ids.tolist() == script.tokens.tolist()
            assert output.log_probs.tolist() == script.log_probs.tolist()
            assert sorted(output.versions) == list(output.versions)
            assert output.staleness(version) <= run.max_staleness


def wasted_tokens(run):
    """Decoded and neither trained nor in a masked sample."""
    kept = sum(o.response_length for _, outputs in run.trained.values() for o in outputs)
    return run.engine_tokens.total() - kept


def test_scripted_run_without_a_fault_goes_through_every_transition(tmp_path):
    seen = Counter()
    run = ScriptedRun(tmp_path / "s", lambda run, transition, side, sample_id: seen.update([transition]))
    assert_trained_once_and_exactly(run.play())
    assert set(seen) == set(TRANSITIONS)
    assert wasted_tokens(run) == 0 and set(run.tool_calls.values()) == {1}
    assert run.manager.counters.retried > 0 and run.manager.counters.masked > 0
    assert run.manager.counters.resumed > 0


@pytest.mark.parametrize("occurrence", [1, 2, 4])
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("what", ["kill_worker", "crash"])
def test_fault_at_a_transition_loses_no_prompt_and_no_token(tmp_path, what, transition, side, occurrence):
    struck = Counter()

    def fault(run, at, on, sample_id):
        struck[at, on] += 1
        if (at, on) == (transition, side) and struck[at, on] == occurrence:
            getattr(run, what)(sample_id)
            raise Struck

    run = ScriptedRun(tmp_path / "s", fault).play()
    assert struck[transition, side] >= occurrence
    assert_trained_once_and_exactly(run)
    # Nothing newer than the engine call that the fault cut off is missing, and no finished tool call is repeated.
    lost = CHUNK if (transition, side) == ("segment", "before") else 0
    assert wasted_tokens(run) <= lost
    repeated = 1 if (transition, side) == ("tool_result", "before") else 0
    assert run.tool_calls.total() - len(run.tool_calls) <= repeated


def footprint(root):
    """Bytes of everything that the manager reaches, tokens and log-probs included."""
    seen, total, stack = set(), 0, [root]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type) or callable(item):
            continue
        seen.add(id(item))
        if isinstance(item, np.ndarray):
            total += item.nbytes
        else:
            total += sys.getsizeof(item)
            stack += gc.get_referents(item)
    return total


def test_three_hundred_rounds_do_not_grow_the_manager(tmp_path):
    """Rounds of two prompts, with a dead worker every 40th interruption and a crash every 600th."""
    occasions = itertools.count(1)
    sizes = {}

    def fault(run, transition, side, sample_id):
        done = len(run.trained) // run.batch
        if transition == "take" and side == "before" and done in (100, 300):
            kept = run.manager
            sizes[done] = footprint([kept.reserve, kept.groups, kept.samples.unfinished, kept.slots])
        if transition == "interrupt" and side == "after":
            count = next(occasions)
            if count % 40 == 0:
                (run.kill_worker if count % 300 else run.crash)(sample_id)
                raise Struck

    assert_trained_once_and_exactly(ScriptedRun(tmp_path / "s", fault, total=604).play())
    assert sizes[300] <= 1.5 * sizes[100]
