"""The published modes on the real manager and workers in Ray, over replicas that follow an engine curve.

``tests/e2e/test_modes.py`` trains in these modes, nightly.
"""

import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import ray

from recipe.partial_rollout.config.choices import Mode, SchedulingPolicy
from recipe.partial_rollout.config.sections import Scheduling
from recipe.partial_rollout.manager.actor import ManagerActor
from recipe.partial_rollout.manager.admission import Admission
from recipe.partial_rollout.manager.messages import PromptsWanted
from recipe.partial_rollout.manager.output_store import RayObjects, fetch_groups
from recipe.partial_rollout.manager.policies import FailurePolicy, GroupFilter
from recipe.partial_rollout.manager.types import Prompt
from recipe.partial_rollout.planner.engine_curve import EngineCurve
from recipe.partial_rollout.worker.replica_choice import ReplicaChoice
from tests.bench.scripted_engine import ScriptedWorker

# Ray's workers cannot import a test module.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

CURVE = EngineCurve(step_s=0.002, sample_s=0.0)
STORE = RayObjects(deadline_s=30.0)
BATCH, N, PROMPTS = 4, 4, 16
SLOTS = 6
"""of each of two workers, with a replica each"""


class ScoringWorker(ScriptedWorker):
    """Scores the samples of a dull prompt 0, those of any other by their number in the group."""

    def _kwargs(self, row):
        return {**super()._kwargs(row), "dull": row["dull"]}

    async def _run_agent_loop(self, sampling_params, trajectory, **kwargs):
        # A context variable is not pickled with this class.
        from recipe.partial_rollout.worker.live_sample import LIVE_SAMPLE

        output = await super()._run_agent_loop(sampling_params, trajectory, **kwargs)
        return replace(output, reward_score=0.0 if kwargs["dull"] else float(LIVE_SAMPLE.get().id[-1]))


def prompts_of(dull):
    """Every one has a sample that is far longer than the other three; every ``dull``-th scores alike."""
    return [
        Prompt(f"0/{i}", 0, {"lengths": [20, 35, 50, 150 + 10 * i], "dull": bool(dull) and i % dull == 0})
        for i in range(PROMPTS)
    ]


@dataclass
class Played:
    """A training on scripted engines."""

    rounds: list = field(default_factory=list)
    """trained groups of each"""
    admitted: list = field(default_factory=list)
    """groups of each: at its start, and in all"""
    in_flight: list = field(default_factory=list)
    """unfinished samples in mid-round"""
    filtered: list = field(default_factory=list)
    exhausted: bool = False
    metrics: dict = field(default_factory=dict)

    @property
    def trained(self):
        return [group for groups in self.rounds for group in groups]


class Trainer:
    """Plays verl's ``fit`` and the recipe's driver: rounds until the prompts have been trained or filtered."""

    def __init__(self, admission, scheduling, group_filter, prompts):
        self.left = prompts
        self.manager = ray.remote(ManagerActor).remote(
            admission, scheduling, 30.0, FailurePolicy(), group_filter, STORE
        )
        self.workers = [ray.remote(ScoringWorker).options(num_cpus=0).remote(CURVE, 1) for _ in range(2)]
        # A scripted worker chooses among replicas of its own.
        theirs = ReplicaChoice({})
        ray.get(
            [w.connect.remote(f"w{i}", self.manager, SLOTS, theirs) for i, w in enumerate(self.workers)], timeout=60
        )
        self.serving = [worker.serve.remote() for worker in self.workers]

    def take(self, count):
        taken, self.left = self.left[:count], self.left[count:]
        return taken

    def ask(self, verb, *args):
        return ray.get([getattr(worker, verb).remote(*args) for worker in self.workers], timeout=30)

    def call(self, verb, *args):
        return ray.get(getattr(self.manager, verb).remote(*args), timeout=30)

    def play(self):
        played = Played()
        for version in range(PROMPTS):
            prompts = self.take(self.call("wanted"))
            start = self.call("begin_version", version, prompts, len(self.left))
            if start.exhausted or self.nothing_left():
                played.exhausted = start.exhausted
                break
            played.rounds.append(self.round(version, start.admitted, played))
        played.metrics = self.call("metrics")
        return played

    def nothing_left(self):
        return not self.left and self.call("metrics")["inflight/groups"] == 0

    def round(self, version, admitted_at_start, played):
        self.ask("begin", version, time.monotonic())
        while isinstance(ended := self.until_complete(played), PromptsWanted):
            self.call("offer", self.take(ended.count), len(self.left))
        self.ask("close_round")
        self.ask("interrupt")
        groups = fetch_groups(ended.groups, STORE.fetch)
        self.ask("flush")
        self.call("flush")
        played.admitted.append((admitted_at_start, len(ended.admitted)))
        played.filtered += self.call("finish_step", [group.uid for group in groups]).filtered
        return groups

    def until_complete(self, played):
        waiting = self.manager.wait_batch.remote(True)
        while not ray.wait([waiting, *self.serving], timeout=0.05)[0]:
            played.in_flight.append(self.call("metrics")["inflight/samples"])
        return ray.get(waiting, timeout=30)

    def kill(self):
        for actor in (*self.workers, self.manager):
            ray.kill(actor)


@pytest.fixture
def play():
    trainers = []

    def run(mode, scheduling, *, group_filter=None, dull=0, in_flight=BATCH * N, over_sampling=2 * BATCH):
        admission = Admission(mode, BATCH, N, 1.0, over_sampling, in_flight, 4)
        trainers.append(Trainer(admission, scheduling, group_filter, prompts_of(dull)))
        return trainers[-1].play()

    yield run
    for trainer in trainers:
        trainer.kill()


def staleness(played):
    return [version - group.birth for version, groups in enumerate(played.rounds) for group in groups]


def test_ssim_refills_to_its_budget_all_through_the_round_and_trains_every_prompt_once(play):
    played = play(Mode.SSIM, Scheduling(SchedulingPolicy.SEED))
    assert Counter(group.uid for group in played.trained) == {f"0/{i}": 1 for i in range(PROMPTS)}
    assert [len(groups) for groups in played.rounds] == [BATCH] * 4
    assert max(played.in_flight) <= BATCH * N
    at_start, in_all = played.admitted[0]
    assert at_start == BATCH < in_all, "groups that started in mid-round"
    assert 1 <= max(staleness(played)) <= 4
    assert played.metrics["lost_samples"] == 0 and played.metrics["inflight/samples"] == 0
    assert played.metrics["buffer/resumed_total"] == played.metrics["buffer/interrupted_total"] > 0


def test_april_replaces_the_groups_that_score_alike_until_the_data_ends(play):
    """Every third prompt scores 0 in all its samples: they are filtered, and the epoch ends before its fourth batch."""
    played = play(Mode.APRIL, Scheduling(), group_filter=GroupFilter("seq_reward"), dull=3, over_sampling=7)
    uids = Counter(group.uid for group in [*played.trained, *played.filtered])
    assert set(uids.values()) == {1}
    assert PROMPTS - BATCH < len(uids) <= PROMPTS and played.exhausted
    # Those that nothing could replace any more.
    assert sum(group.row["dull"] for group in played.trained) == played.metrics["filter/spared_total"] < BATCH
    assert played.filtered and {group.value for group in played.filtered} == {0.0}
    assert all(len(group.lengths) == N for group in played.filtered)
    assert played.admitted[0][0] == 7
    assert 0 < len(played.rounds) < 4 and {len(groups) for groups in played.rounds} == {BATCH}
    assert max(staleness(played)) <= 4
    assert played.metrics["filter/groups_total"] == len(played.filtered) and played.metrics["lost_samples"] == 0
    assert played.metrics["filter/tokens_total"] == sum(sum(group.lengths) for group in played.filtered)
