"""Random lives of the manager: whatever happens, nothing is lost, repeated or too stale, and slots are respected."""

import itertools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from recipe.partial_rollout.admission import Admission, Mode
from recipe.partial_rollout.prompts_manager import PromptsManager
from recipe.partial_rollout.scheduling import Policy
from recipe.partial_rollout.types import Prompt, SampleOutput, Segment


def output_of(length):
    ones = np.ones(length)
    return SampleOutput(
        prompt_ids=np.ones(1, np.int32),
        response_ids=ones.astype(np.int32),
        response_mask=ones.astype(np.int8),
        log_probs=ones.astype(np.float32),
        versions=ones.astype(np.int32),
        segments=1,
        reward_score=0.0,
        reward_extra_info={},
        num_turns=2,
        metrics={},
    )


class ManagerLife(RuleBasedStateMachine):
    """A trainer, workers that come and go, and samples that end whenever they like."""

    def __init__(self):
        super().__init__()
        self.manager = None

    @precondition(lambda self: self.manager is None)
    @rule(
        mode=st.sampled_from(Mode),
        policy=st.sampled_from(Policy),
        batch=st.integers(1, 3),
        n=st.integers(1, 3),
        overlap=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        slack=st.integers(0, 2),
        steps=st.integers(1, 8),
        extra=st.integers(0, 3),
    )
    def begin(self, mode, policy, batch, n, overlap, slack, steps, extra):
        self.batch, self.n = batch, n
        self.max_staleness = max(int(np.ceil(overlap)), 1) + slack
        admission = Admission(mode, batch, n, overlap, batch + extra, batch * n + extra, self.max_staleness)
        self.manager = PromptsManager(admission, policy, lambda: 0.0)
        self.total = steps * batch
        self.offered = 0
        self.running = {}
        self.ended = set()
        self.trained = []
        self.births = {}
        self.version = 0
        self.capacity = {}
        self.names = (f"w{i}" for i in itertools.count())
        self.join(4)

    @precondition(lambda self: self.manager is not None)
    @rule(capacity=st.integers(1, 8))
    def join(self, capacity):
        if self.manager is not None:
            name = next(self.names)
            self.capacity[name] = capacity
            self.manager.register_worker(name, capacity)

    @precondition(
        lambda self: self.manager is not None and not self.manager.round_open and len(self.trained) < self.total
    )
    @rule()
    def open_round(self):
        count = min(self.manager.wanted, self.total - self.offered)
        self.manager.offer(Prompt(f"0/{i}", 0, {}) for i in range(self.offered, self.offered + count))
        self.offered += count
        if self.offered == self.total:
            self.manager.close_source()
        self.manager.open_round()

    @precondition(lambda self: self.manager is not None and self.capacity)
    @rule(data=st.data())
    def claim(self, data):
        self.take(data.draw(st.sampled_from(sorted(self.capacity))))

    def take(self, worker):
        for grant in self.manager.claim(worker):
            assert grant.sample_id not in self.running and grant.sample_id not in self.ended
            self.running[grant.sample_id] = worker
            self.births.setdefault(grant.group_uid, self.version)

    @precondition(lambda self: self.manager is not None and self.running)
    @rule(data=st.data(), length=st.integers(0, 50))
    def finish(self, data, length):
        self.end_sample(data.draw(st.sampled_from(sorted(self.running))), length)

    def end_sample(self, sample_id, length):
        self.manager.finish(sample_id, output_of(length))
        del self.running[sample_id]
        self.ended.add(sample_id)
        self.manager.admit()

    def claim_all(self):
        for worker in self.capacity:
            self.take(worker)

    @precondition(lambda self: self.manager is not None and self.running)
    @rule(data=st.data(), length=st.integers(0, 4))
    def interrupt(self, data, length):
        sample_id = data.draw(st.sampled_from(sorted(self.running)))
        tokens = np.ones(length)
        self.manager.add_segment(sample_id, Segment(tokens.astype(np.int32), tokens.astype(np.float32), self.version))
        self.manager.interrupt(sample_id)
        del self.running[sample_id]

    @precondition(lambda self: self.manager is not None and len(self.capacity) > 1)
    @rule(data=st.data())
    def kill_worker(self, data):
        worker = data.draw(st.sampled_from(sorted(self.capacity)))
        self.manager.release_worker(worker)
        del self.capacity[worker]
        self.running = {s: w for s, w in self.running.items() if w != worker}

    @precondition(lambda self: self.manager is not None and self.manager.round_open)
    @rule()
    def train(self):
        if not self.manager.round_complete():
            return
        self.manager.close_round()
        taken = self.manager.take_batch()
        assert len(taken) == self.batch
        for group in taken:
            assert len(group.outputs) == self.n
            assert self.version - self.births[group.uid] <= self.max_staleness
            self.trained.append(group.uid)
        self.manager.acknowledge(group.uid for group in taken)
        self.version += 1
        self.manager.advance_version(self.version)

    @precondition(
        lambda self: self.manager is not None and not self.manager.round_open and len(self.trained) < self.total
    )
    @rule(every=st.integers(2, 4))
    def play_round_with_stragglers(self, every):
        """A whole round in which some prompts end only when nothing else runs."""
        self.open_round()
        while not self.manager.round_complete():
            self.claim_all()
            fast = [s for s in self.running if int(s.split("/")[1].split("#")[0]) % every]
            self.end_sample((fast or list(self.running))[0], 1)
        for sample_id in list(self.running):
            self.manager.interrupt(sample_id)
            del self.running[sample_id]
        self.train()

    @invariant()
    def nothing_is_lost_or_repeated(self):
        if self.manager is None:
            return
        assert self.manager.lost_groups == 0
        assert len(set(self.trained)) == len(self.trained)

    @invariant()
    def slots_are_respected(self):
        if self.manager is None:
            return
        for worker, capacity in self.capacity.items():
            assert sum(w == worker for w in self.running.values()) <= capacity

    def teardown(self):
        """Let everything end: the training must reach its last step with every prompt trained once."""
        if self.manager is None:
            return
        for _ in range(200 * self.total):
            if len(self.trained) == self.total:
                break
            if not self.manager.round_open:
                self.open_round()
            self.claim_all()
            for sample_id in list(self.running):
                self.end_sample(sample_id, 1)
            self.train()
        assert sorted(self.trained) == sorted(f"0/{i}" for i in range(self.total))


TestManagerLife = ManagerLife.TestCase
TestManagerLife.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
