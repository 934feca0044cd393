"""Random lives of the manager: whatever happens, nothing is lost, repeated, too stale or changed by a token.

Under any order of samples workers come and go, samples end, fail or leave whenever they like; each batch stops the round
(colocated placement) or lets it run on (separate); the run checkpoints, crashes, and resumes. A plain model says
what must hold, and the audit judges the log that the driver would keep. 2,000 sequences by default; for a night's worth
``PARTIAL_ROLLOUT_SEQUENCES=100000 python -m pytest --timeout 0 tests/unit/test_manager_life.py``.
"""

import itertools
import math
import os
import tempfile
from collections import Counter
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from recipe.partial_rollout.checkpoint import plain_state
from recipe.partial_rollout.config.settings import FailureLimits, FilterSettings, Mode, Scheduling, SchedulingPolicy
from recipe.partial_rollout.manager.admission import pacing_load
from recipe.partial_rollout.manager.codec import restore
from recipe.partial_rollout.manager.policies import FailureVerdict, masked_output
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.types import GroupState, Prompt, SampleState, Segment
from recipe.partial_rollout.records.run_log import Ended, RolloutPhase, Round, RunLog, TrainedGroup
from recipe.partial_rollout.tools.audit import audit
from tests.unit import orders
from tests.unit.runs import pr_settings
from tests.unit.shared import output_of, settings_of, state_of

SEQUENCES = int(os.environ.get("PARTIAL_ROLLOUT_SEQUENCES", "2000"))

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""for the logs, each of which is synced to its disk"""
PICK = st.integers(0, 2**20)
OVERTAKE = st.sampled_from([None, 0.0, 0.34, 1.0, 2.5])
POLICIES = st.sampled_from([*SchedulingPolicy, *(f"{orders.__name__}.{order.__name__}" for order in orders.SOUND)])
SIZES = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(Mode),
        "batch": st.integers(1, 3),
        "n": st.integers(1, 3),
        "overlap": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "slack": st.integers(0, 3),
        "steps": st.integers(1, 6),
        "retries": st.integers(0, 2),
        # Every so many prompts score alike in all samples; 0: no dynamic sampling.
        "every": st.integers(0, 3),
        "more": st.integers(0, 12),
        "limited": st.booleans(),
        "gen_batches": st.sampled_from([0, 2, 3]),
    }
)


def tokens_of(sample_id, start, length):
    """What the scripted engine says: the same for a sample at a position, whenever it is asked."""
    return (np.arange(start, start + length, dtype=np.int32) * 7 + crc32(sample_id.encode()) % 997).astype(np.int32)


def segment_of(sample_id, start, length, version, stop_reason, turn=0):
    ids = tokens_of(sample_id, start, length)
    return Segment(ids, (-ids / 1024).astype(np.float32), version, stop_reason, turn)


def packed(records):
    """Every field of ``records``, with types, shapes and bytes."""
    return plain_state.pack([asdict(record) for record in records])


@dataclass
class Model:
    """What the manager must agree with. A checkpoint keeps a copy, a restore goes back to it."""

    offered: int = 0
    version: int = 0
    running: dict = field(default_factory=dict)
    away: dict = field(default_factory=dict)
    holders: dict = field(default_factory=dict)
    """worker that still has the conversation of a sample, by sample"""
    failed: list = field(default_factory=list)
    failures: dict = field(default_factory=dict)
    segments: dict = field(default_factory=dict)
    lost: int = 0
    """tokens of conversations that began anew"""
    births: dict = field(default_factory=dict)
    outputs: dict = field(default_factory=dict)
    taken: list = field(default_factory=list)
    trained: list = field(default_factory=list)
    filtered: list = field(default_factory=list)

    def copy_without_owners(self):
        kept = "failures", "births", "outputs", "trained", "filtered"
        segments = {key: list(value) for key, value in self.segments.items()}
        copies = {name: copy(getattr(self, name)) for name in kept}
        model = Model(self.offered, self.version, segments=segments, lost=self.lost, **copies)
        for sample_id in segments.keys() - self.outputs.keys():
            model.end_conversation(sample_id)
        return model

    def end_conversation(self, sample_id):
        """Nobody has it any more: a sample of several turns begins anew."""
        segments = self.segments.get(sample_id, [])
        if {segment.turn for segment in segments} - {0}:
            self.lost += sum(map(len, segments))
            segments.clear()


some_run = precondition(lambda self: self.model.running)
some_end = precondition(lambda self: self.model.running or self.model.away)


class ManagerLife(RuleBasedStateMachine):
    """A run, its workers and its trainer."""

    manager = None

    @initialize(policy=POLICIES, overtake=OVERTAKE, sizes=SIZES)
    def begin(self, policy, overtake, sizes):
        sizes = SimpleNamespace(**sizes)
        self.batch, self.n, self.scheduling = sizes.batch, sizes.n, Scheduling(policy, overtake)
        least = 0 if sizes.mode is Mode.WINDOW else 1
        self.max_staleness = max(least, int(np.ceil(sizes.overlap)) + sizes.slack)
        self.total = self.supply = sizes.steps * self.batch
        self.every, self.limited, self.filter = sizes.every, sizes.limited, None
        self.most_filtered = self.filtered_this_round = 0
        if self.every:
            self.supply += sizes.more
            self.filter = FilterSettings("reward", sizes.gen_batches)
            self.most_filtered = (sizes.gen_batches - 1) * self.batch if sizes.gen_batches else self.supply
        limit = self.total if self.every and self.limited else None
        self.failures = FailureLimits(sample_retries=sizes.retries)
        keys = {"mode": sizes.mode, "overlap": sizes.overlap, "max_staleness": self.max_staleness}
        run = settings_of(self.batch, self.n, failures=self.failures, group_filter=self.filter, **keys)
        self.build = lambda: PromptsManager(replace(run, scheduling=self.scheduling), lambda: 0.0, limit)
        self.manager = self.build()
        self.out_of_turn = False
        self.model = Model()
        self.checkpoints = []
        self.capacity = {}
        self.names = (f"w{i}" for i in itertools.count())
        self.join(4)
        self.process_began()

    def process_began(self, resumed=False):
        """A process starts the training, or resumes it from a checkpoint."""
        if not resumed:
            self.directory = tempfile.TemporaryDirectory(dir=MEMORY)
        self.taken_groups, self.began = [], False
        facts = {"max_staleness": self.max_staleness, "filters": self.filter is not None, "drains": self.limited}
        sizes = {"epoch_prompts": self.supply, "total": self.total, "offered": self.supply}
        settings = pr_settings(self.batch, self.n, 1, **facts, **sizes, resumed=self.step if resumed else 0)
        self.log = RunLog(Path(self.directory.name), settings, [])

    @property
    def step(self):
        """The last step that was trained; a checkpoint is of this one, whatever batch the trainer has."""
        return len(self.model.trained) // self.batch

    def picked(self, pick, *more):
        running = [*self.model.running, *more]
        return running[pick % len(running)]

    # -- workers ---------------------------------------------------------------------------------------------------

    @rule(capacity=st.integers(1, 8))
    def join(self, capacity):
        name = next(self.names)
        self.capacity[name] = capacity
        self.manager.slots.register(name, capacity)

    @precondition(lambda self: self.capacity and not self.model.running)
    @rule(pick=PICK, capacity=st.integers(1, 8))
    def resize(self, pick, capacity):
        """What scarce KV does between rounds."""
        worker = list(self.capacity)[pick % len(self.capacity)]
        self.manager.slots.workers[worker] = capacity
        self.capacity[worker] = capacity

    @precondition(lambda self: len(self.capacity) > 1)
    @rule(pick=PICK)
    def kill_worker(self, pick):
        worker = list(self.capacity)[pick % len(self.capacity)]
        self.manager.release_worker(worker)
        del self.capacity[worker]
        for sample_id, holder in self.model.holders.items():
            if holder == worker and sample_id not in self.model.outputs:
                self.model.end_conversation(sample_id)
        self.model.running = {s: w for s, w in self.model.running.items() if w != worker}
        self.model.away = {s: w for s, w in self.model.away.items() if w != worker}
        self.model.holders = {s: w for s, w in self.model.holders.items() if w != worker}

    @precondition(lambda self: self.manager.round_open and self.capacity)
    @rule(pick=PICK)
    def claim(self, pick):
        self.take_grants(list(self.capacity)[pick % len(self.capacity)])

    def take_grants(self, worker):
        model, below_share = self.model, self.below_share(worker)
        leases = self.manager.claim(worker)
        overdue = self.next_to_train() - self.max_staleness
        births = dict(model.births)
        shared = [g for g in leases if not g.resident and births.get(g.group_uid, model.version) > overdue]
        assert len(shared) <= max(0, below_share), "more than its share"
        for lease in leases:
            sample_id = lease.sample_id
            assert sample_id not in model.running and sample_id not in model.away
            assert sample_id not in model.outputs and sample_id not in model.failed
            held = model.holders.get(sample_id) == worker
            assert lease.resident == held
            assert packed(lease.segments) == packed([] if held else model.segments.get(sample_id, []))
            model.holders[sample_id] = worker
            model.running[sample_id] = worker
            model.births.setdefault(lease.group_uid, model.version)
        begun = any(lease.group_uid not in births for lease in leases)
        waiting = [s for s in self.held(worker) if s not in model.running]
        if self.scheduling.policy is SchedulingPolicy.BOUNDED:
            assert not (begun and waiting), "a new prompt before a conversation that goes on"

    def next_to_train(self):
        """The version that trains the next batch."""
        return self.model.version + (self.manager.round_open and bool(self.with_the_trainer()))

    def held(self, worker):
        """Samples that ``worker`` runs, or still has the conversation of; those that are away need no slot."""
        model = self.model
        ended = model.outputs.keys() | model.away.keys()
        return [s for s, holder in model.holders.items() if holder == worker and s not in ended]

    def present(self):
        """Unfinished samples but for those that are away."""
        return int(self.manager.metrics()["inflight/samples"]) - len(self.model.away)

    def below_share(self, worker):
        share = math.ceil(self.present() * self.capacity[worker] / sum(self.capacity.values()))
        return share - len(self.held(worker))

    def unowned(self):
        """Samples that any worker could claim."""
        held = sum(len(self.held(worker)) for worker in self.capacity)
        return self.present() - held - len(self.model.failed)

    def free(self, worker):
        return self.capacity[worker] - sum(w == worker for w in self.model.running.values())

    # -- samples ---------------------------------------------------------------------------------------------------

    @some_run
    @rule(pick=PICK, length=st.integers(0, 4), stop=st.sampled_from([None, "completed"]))
    def add_segment(self, pick, length, stop):
        self.extend(self.picked(pick), length, stop)

    def extend(self, sample_id, length, stop=None):
        segments = self.model.segments.setdefault(sample_id, [])
        made, turn = sum(map(len, segments)), sum(segment.stop_reason is not None for segment in segments)
        segment = segment_of(sample_id, made, length, self.model.version, stop, turn)
        self.manager.add(sample_id, [segment])
        if length:
            segments.append(segment)

    @some_run
    @rule(pick=PICK, length=st.integers(0, 4))
    def interrupt(self, pick, length):
        sample_id = self.picked(pick)
        self.extend(sample_id, length)
        self.manager.interrupt(sample_id)
        del self.model.running[sample_id]

    @some_run
    @rule(pick=PICK, length=st.integers(0, 4))
    def park(self, pick, length):
        """Its reward takes long, or a tool."""
        sample_id = self.picked(pick)
        self.extend(sample_id, length, "completed")
        self.manager.park(sample_id)
        self.model.away[sample_id] = self.model.running.pop(sample_id)

    @precondition(lambda self: self.model.away)
    @rule(pick=PICK)
    def come_back(self, pick):
        """Its tool has answered; it needs a slot again."""
        sample_id = list(self.model.away)[pick % len(self.model.away)]
        self.manager.interrupt(sample_id)
        del self.model.away[sample_id]

    @some_end
    @rule(pick=PICK, length=st.integers(0, 4))
    def finish(self, pick, length):
        self.end_sample(self.picked(pick, *self.model.away), length)

    def end_sample(self, sample_id, length):
        if sample_id in self.model.running:
            self.extend(sample_id, length, "completed")
        output = output_of(self.model.segments[sample_id], self.reward(sample_id))
        self.manager.finish(sample_id, output)
        self.forget(sample_id, output)

    def reward(self, sample_id):
        uid, index = sample_id.split("#")
        return 0.0 if self.every and int(uid[2:]) % self.every == 0 else float(index)

    def forget(self, sample_id, output):
        self.leave_worker(sample_id)
        self.model.outputs[sample_id] = output
        # They stay with the manager until a step tells them.
        for group in [each for each in self.manager.groups.filtered if each.uid not in self.model.filtered]:
            outputs = [self.model.outputs[f"{group.uid}#{i}"] for i in range(self.n)]
            rewards = [output.reward_score for output in outputs if not output.masked]
            assert len(rewards) > 1 and set(rewards) == {group.value}
            assert group.lengths == [output.response_length for output in outputs]
            assert group.uid not in self.model.trained + self.model.taken
            self.model.filtered.append(group.uid)
            self.filtered_this_round += 1
            assert self.filtered_this_round <= self.most_filtered
        if self.manager.round_open:
            self.manager.admit()

    def leave_worker(self, sample_id):
        model = self.model
        del (model.running if sample_id in model.running else model.away)[sample_id]

    @some_end
    @rule(pick=PICK)
    def fail(self, pick):
        sample_id = self.picked(pick, *self.model.away)
        model = self.model
        count = model.failures[sample_id] = model.failures.get(sample_id, 0) + 1
        again = count <= self.failures.sample_retries
        model.holders.pop(sample_id, None)
        assert self.manager.fail(sample_id, "boom") is (FailureVerdict.RETRY if again else FailureVerdict.MASK)
        if again:
            model.failed.append(sample_id)
            self.leave_worker(sample_id)
        else:
            self.forget(sample_id, masked_output(model.segments.get(sample_id, []), "boom"))

    @precondition(lambda self: self.model.failed)
    @rule(pick=PICK)
    def retry(self, pick):
        sample_id = self.model.failed.pop(pick % len(self.model.failed))
        self.manager.retry(sample_id)
        self.model.end_conversation(sample_id)

    # -- trainer ---------------------------------------------------------------------------------------------------

    def enqueue(self):
        count = min(self.manager.wanted, self.supply - self.model.offered)
        first = self.model.offered
        self.model.offered += count
        prompts = [Prompt(f"0/{i}", {"index": i}) for i in range(first, first + count)]
        self.manager.backlog.enqueue(prompts, self.supply - self.model.offered)

    @precondition(lambda self: self.manager.short_of_prompts)
    @rule()
    def offer_in_the_round(self):
        self.enqueue()
        self.manager.admit()

    def may_begin(self):
        """Whether the batch of the present version is taken, and trained unless it stopped the round."""
        model = self.model
        due = not self.manager.round_open or (self.with_the_trainer() and not model.taken)
        return due and len(model.trained + model.taken) < self.total

    @precondition(lambda self: self.may_begin())
    @rule()
    def begin_version(self):
        """In a round that was stopped this may come before the batch is trained."""
        model = self.model
        running = dict(model.running)
        self.enqueue()
        if self.manager.exhausted:
            return
        model.version = len(model.trained + model.taken) // self.batch
        self.filtered_this_round = 0
        self.manager.begin_version(model.version)
        assert model.running == running and self.manager.version == model.version

    def complete(self):
        """Whether there is a batch to take; the data may have ended with less than one left."""
        return self.manager.round_complete() and not self.model.taken and not self.manager.exhausted

    @precondition(lambda self: self.manager.round_open and self.complete())
    @rule(stop=st.booleans())
    def take_batch(self, stop):
        taken = self.manager.take_batch(stop=stop)
        self.check(taken)
        self.taken_groups = taken
        assert self.manager.round_open is not stop
        assert not self.manager.round_open or not self.manager.round_complete(), "one batch a version"

    @precondition(lambda self: self.manager.round_open and not self.model.taken)
    @rule()
    def suspend(self):
        self.manager.suspend()

    def check(self, taken):
        """Whole groups, fresh enough and in turn, with the tokens that their samples were given."""
        model = self.model
        assert len(taken) == self.batch
        self.assert_in_turn(taken)
        for group in taken:
            assert group.uid not in model.trained + model.filtered
            assert model.version - model.births[group.uid] <= self.max_staleness
            assert group.row == {"index": int(group.uid[2:])}
            assert packed(group.outputs) == packed(model.outputs[f"{group.uid}#{i}"] for i in range(self.n))
        model.taken = [group.uid for group in taken]

    def assert_in_turn(self, taken):
        """No group is trained further ahead of an older one than ``overtake`` allows; with 0 all go in order.

        What another order has started out of turn, before the run was resumed under a limit, is trained oldest first.
        """
        consumed = {int(uid[2:]) for uid in self.model.trained + self.model.filtered}
        left = (i for i in range(self.model.offered) if i not in consumed)
        orders = [group.order for group in taken]
        positions = self.scheduling.positions(self.batch)
        # Without staleness nothing can overtake: these are noPR's batches.
        if (positions == 0 and not self.out_of_turn) or self.max_staleness == 0:
            assert orders == list(itertools.islice(left, self.batch))
        elif positions is not None and not self.out_of_turn:
            overtaken = min((i for i in left if i not in orders), default=max(orders))
            assert max(orders) - overtaken <= positions
        births = [(group.birth, group.order) for group in (*taken, *self.manager.groups.ready_queue)]
        assert births == sorted(births), "the oldest groups are trained first"

    @precondition(lambda self: self.model.taken)
    @rule()
    def acknowledge(self):
        model = self.model
        admitted, filtered = self.manager.groups.train()
        model.trained += model.taken
        model.taken = []
        step, version = self.step, self.step - 1
        trained = [TrainedGroup.of(group, version) for group in self.taken_groups]
        phase = RolloutPhase(0.0, 0.0, ())
        self.log.round(Round(step=step, phase=phase, trained=trained, admitted=admitted, filtered=filtered))

    @precondition(lambda self: self.may_begin())
    @rule(every=st.integers(2, 4), during=st.integers(0, 6), stop=st.booleans(), crashes=st.booleans())
    def play_version_with_stragglers(self, every, during, stop, crashes):
        """A version whose batch trains for so many samples; some prompts end only when nothing else runs.

        A run that crashes resumes from a checkpoint made while the trainer had the batch.
        """
        if self.model.taken:
            self.acknowledge()
        self.begin_version()
        while not self.complete() and not self.manager.exhausted:
            if self.manager.short_of_prompts:
                self.offer_in_the_round()
            assert self.end_one(every), "there is no batch, and nothing runs"
        if not self.complete():
            return
        self.take_batch(stop)
        if stop:
            for sample_id in list(self.model.running):
                self.manager.interrupt(sample_id)
                del self.model.running[sample_id]
        else:
            for _ in range(during):
                self.end_one(every)
        if crashes:
            self.checkpoint_and_go_on_from_it()
        else:
            self.acknowledge()

    def end_one(self, every):
        """End a sample, one of each ``every`` prompts only when nothing else runs; False: none runs."""
        self.retry_all()
        self.claim_all()
        running = [*self.model.running, *self.model.away]
        fast = [s for s in running if int(s.split("/")[1].split("#")[0]) % every]
        if running:
            self.end_sample((fast or running)[0], 1)
        return bool(running)

    def claim_all(self):
        if self.manager.round_open:
            for worker in self.capacity:
                self.take_grants(worker)
            for worker in self.capacity:
                parked = set(self.held(worker)) - set(self.model.running)
                assert not self.free(worker) or not (parked or self.unowned()), "a slot is free that could be filled"

    def retry_all(self):
        while self.model.failed:
            self.retry(0)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def may_save(self):
        """Not while the trainer has the batch of the version before."""
        return not self.model.taken or bool(self.with_the_trainer())

    @precondition(lambda self: self.may_save())
    @rule()
    def checkpoint(self):
        data = plain_state.pack(state_of(self.manager))
        self.checkpoints.append((data, self.model.copy_without_owners()))

    @precondition(lambda self: self.checkpoints)
    @rule(pick=PICK, scheduling=st.none() | st.builds(Scheduling, POLICIES, OVERTAKE))
    def crash_and_restore(self, pick, scheduling=None):
        """Under another policy, if one is given."""
        self.scheduling = scheduling or self.scheduling
        chosen = pick % len(self.checkpoints)
        data, model = self.checkpoints[chosen]
        del self.checkpoints[chosen + 1 :]
        self.manager = self.build()
        restore(self.manager, plain_state.unpack(data))
        births = [math.inf if g.birth is None else g.birth for g in self.manager.groups.by_order.values()]
        self.out_of_turn = births != sorted(births)
        self.model = model.copy_without_owners()
        self.capacity = {}
        self.join(1 + pick % 5)
        self.process_began(resumed=True)

    @precondition(lambda self: self.may_save())
    @rule()
    def checkpoint_and_go_on_from_it(self):
        self.checkpoint()
        self.crash_and_restore(len(self.checkpoints) - 1)

    # -- what holds ------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost_or_repeated(self):
        assert self.manager.groups.lost == 0 and self.manager.counters.lost_tokens == self.model.lost
        assert len(set(self.model.trained)) == len(self.model.trained) == self.manager.counters.trained_groups
        assert len(set(self.model.filtered)) == len(self.model.filtered) == self.manager.counters.filtered_groups
        assert not set(self.model.filtered) & set(self.model.trained + self.model.taken)

    @invariant()
    def states_agree_with_the_indexes(self):
        groups = self.manager.groups
        in_the_manager = GroupState.WAITING, GroupState.ACTIVE, GroupState.READY, GroupState.TAKEN
        waiting, active, ready, taken = (list(groups.in_state(state)) for state in in_the_manager)
        assert len(waiting + active + ready + taken) == len(groups.by_order)
        assert [g.order for g in groups.by_order.values()] == sorted(groups.by_order) == list(groups.by_order)
        assert set(groups.ready_queue) == set(ready) and len(groups.ready_queue) == len(ready)
        assert set(groups.taken) == set(taken) and [g.uid for g in groups.taken] == self.model.taken
        births = Counter(group.birth for group in waiting + active + ready)
        assert {birth: count for birth, count in groups.births.items() if count} == births
        assert all(group.birth is None for group in waiting)
        assert all(group.birth is not None and group.unfinished for group in active)
        assert not any(group.unfinished for group in ready + taken)
        assert groups.in_flight == len(waiting + active + ready) and groups.carried == len(active + ready)
        unfinished = [s for g in waiting + active for s in g.samples if s.state is not SampleState.FINISHED]
        assert len(unfinished) == len(self.manager.samples.unfinished) == sum(g.unfinished for g in waiting + active)
        for sample in unfinished:
            assert self.manager.samples.unfinished[sample.id] is sample
            assert sample.failures == self.model.failures.get(sample.id, 0)
            assert (sample.state is SampleState.RUNNING) == (sample.id in self.model.running)
            assert (sample.state is SampleState.PARKED) == (sample.id in self.model.away)
            assert (sample.state is SampleState.FAILED) == (sample.id in self.model.failed)

    def with_the_trainer(self):
        """Groups of the batch that the present version trains, which count until the next one."""
        model = self.model
        return max(0, len(model.trained + model.taken) - self.batch * model.version)

    @precondition(lambda self: self.manager.round_open)
    @invariant()
    def pacing_counts_what_is_in_flight_and_with_the_trainer(self):
        """No more than can be trained in time; where each version before has its batch, these are the groups in flight."""
        groups = self.manager.groups
        counted = pacing_load(groups.kept, groups.in_flight, self.batch, self.model.version)
        assert counted == groups.kept - self.batch * self.model.version
        assert counted == groups.in_flight + self.with_the_trainer()
        assert counted <= (1 + self.max_staleness) * self.batch

    @invariant()
    def slots_are_respected_and_no_key_fails(self):
        assert all(self.free(worker) >= 0 for worker in self.capacity)
        assert self.manager.slots.queue.problem is None

    def teardown(self):
        """Let everything end: the training reaches its last step, or the end of its data, every prompt consumed once."""
        if self.manager is None:
            return
        for turn in range(20 * self.supply):
            if self.model.taken:
                self.acknowledge()
            if len(self.model.trained) == self.total:
                break
            if self.may_begin():
                self.begin_version()
            if self.manager.exhausted:
                break
            if self.manager.short_of_prompts:
                self.offer_in_the_round()
            self.retry_all()
            self.claim_all()
            for sample_id in [*self.model.running, *self.model.away]:
                self.end_sample(sample_id, 1)
            if self.manager.round_open and self.complete():
                self.take_batch(turn % 2 == 0)
        self.assert_everything_ended()

    def assert_everything_ended(self):
        in_flight = self.manager.metrics()["inflight/groups"]
        if self.filter is None:
            assert sorted(self.model.trained) == sorted(f"0/{i}" for i in range(self.total))
        elif self.manager.exhausted and len(self.model.trained) < self.total:
            assert self.supply - len(self.model.trained) - len(self.model.filtered) < self.batch
        else:
            assert len(self.model.trained) == self.total
            assert not (self.limited and in_flight)
        self.log.add(Ended(self.step, complete=True, exhausted=len(self.model.trained) < self.total))
        result, _ = audit(Path(self.directory.name))
        assert result.violations == [], result.violations
        self.directory.cleanup()


TestManagerLife = ManagerLife.TestCase
# Hypothesis parses code.
TestManagerLife.pytestmark = [pytest.mark.usefixtures("no_garbage")]
TestManagerLife.settings = settings(
    max_examples=SEQUENCES, stateful_step_count=25, suppress_health_check=list(HealthCheck)
)
