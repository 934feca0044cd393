"""Random lives of the manager in separate placement: its one round never closes, and the trainer works meanwhile.

Each life keeps a ledger, as the driver would, over checkpoints at any moment and crashes; at its end the audit judges it.
"""

import runpy
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from recipe.partial_rollout.records.ledger import Ledger
from recipe.partial_rollout.records.ledger_events import RunSizes
from recipe.partial_rollout.tools.audit import audit

LIFE = runpy.run_path(str(Path(__file__).with_name("manager_life.py")))
ManagerLife, started = LIFE["ManagerLife"], LIFE["started"]


class SeparateLife(ManagerLife):
    """Versions advance while samples run; a batch is taken while the others run on."""

    def process_began(self, resumed=False):
        if not resumed:
            self.directory = tempfile.TemporaryDirectory()
            self.ledger = Ledger(Path(self.directory.name))
        self.taken_groups = []
        filters, drains = self.filter is not None, self.limited
        sizes = self.n, self.batch, self.max_staleness, self.supply, self.total, self.supply
        self.ledger.run(RunSizes("PR", *sizes, filters, drains))
        if resumed:
            self.ledger.resumed(self.step)

    @property
    def step(self):
        """The last step that was trained; a checkpoint is of this one, whatever batch the trainer has."""
        return len(self.model.trained) // self.batch

    def newly_filtered(self):
        """They stay with the manager until their step is in the ledger."""
        return [group for group in self.manager._state.groups.filtered if group.uid not in self.model.filtered]

    def may_open(self):
        """Whether the trainer has trained the batch of this version, or the run has just begun or been restored."""
        model = self.model
        due = len(model.trained) // self.batch > model.version or not self.manager.round_open
        return due and not model.taken and len(model.trained) < self.total

    @precondition(lambda self: started(self) and self.may_open())
    @rule()
    def open_round(self):
        model = self.model
        model.version = len(model.trained) // self.batch
        first, running = model.offered, dict(model.running)
        model.offered += min(self.manager.wanted, self.supply - first)
        self.filtered_this_round = 0
        self.manager.next_version(model.version, self.prompts(first, model.offered))
        self.manager.note_source(self.supply - model.offered)
        assert model.running == running and self.manager.version == model.version

    def complete(self):
        """Whether there is a batch to take; the data may have ended with less than one left."""
        return self.manager.round_complete() and not self.manager.exhausted

    def take(self):
        taken = self.manager.next_batch()
        assert self.manager.round_open and not self.manager.round_complete(), "one batch a version"
        self.taken_groups = taken
        return taken

    @precondition(lambda self: started(self) and self.model.taken)
    @rule()
    def acknowledge(self):
        super().acknowledge()
        self.note_step(self.manager.take_admitted())

    def note_step(self, admitted):
        step, version = self.step, self.step - 1
        self.ledger.admitted(step, version, admitted)
        self.ledger.filtered(step, version, self.manager.take_filtered())
        self.ledger.trained(step, version, self.taken_groups)

    @precondition(started)
    @rule(quarters=st.integers(0, 12))
    def set_overlap(self, quarters):
        self.manager.set_overlap(min(quarters / 4, self.max_staleness))

    @precondition(lambda self: started(self) and self.may_open())
    @rule(every=st.integers(2, 4), during=st.integers(0, 6), crashes=st.booleans())
    def play_round_with_stragglers(self, every, during, crashes):
        """A version whose batch trains for so many samples; some prompts end only when nothing else runs.

        A run that crashes resumes from a checkpoint made while the trainer had the batch.
        """
        self.open_round()
        while not self.complete() and not self.manager.exhausted:
            if self.manager.short_of_prompts:
                self.offer_in_the_round()
            assert self.end_one(every), "there is no batch, and nothing runs"
        if self.complete():
            self.take_batch()
            for _ in range(during):
                self.end_one(every)
            if crashes:
                self.checkpoint_and_go_on_from_it()
            else:
                self.acknowledge()

    @precondition(lambda self: started(self) and not self.model.taken)
    @rule(rounds=st.integers(0, 2))
    def resume_in_colocated_placement_and_back(self, rounds):
        """The checkpoint of each placement is one of the other's."""
        self.checkpoint_and_go_on_from_it()
        model = self.model
        model.version = len(model.trained) // self.batch
        self.manager.advance_version(model.version)
        for _ in range(rounds):
            self.offer()
            if len(model.trained) == self.total or self.manager.exhausted:
                break
            self.filtered_this_round = 0
            self.manager.open_round()
            while not self.manager.round_complete():
                if self.manager.short_of_prompts:
                    self.offer_in_the_round()
                assert self.end_one(2), "the round is not complete, and nothing runs"
            admitted = self.manager.close_round()
            self.taken_groups = self.manager.take_batch()
            self.check(self.taken_groups)
            super().acknowledge()
            self.note_step(admitted)
            model.version += 1
            self.manager.advance_version(model.version)
        self.checkpoint_and_go_on_from_it()

    def next_to_train(self):
        return self.model.version + bool(self.with_the_trainer())

    def with_the_trainer(self):
        model = self.model
        return len(model.trained) + len(model.taken) - self.batch * model.version

    @invariant()
    def no_more_is_in_flight_than_can_be_trained_in_time(self):
        if self.manager is not None and self.manager.round_open:
            assert self.manager._round._load().groups <= (1 + self.max_staleness) * self.batch

    def assert_everything_ended(self):
        super().assert_everything_ended()
        self.ledger.complete(exhausted=len(self.model.trained) < self.total)
        result, _ = audit(Path(self.directory.name))
        assert result.violations == [], result.violations
        self.directory.cleanup()


TestSeparateLife = SeparateLife.TestCase
TestSeparateLife.settings = settings(
    max_examples=LIFE["SEQUENCES"] * 3 // 2, stateful_step_count=25, suppress_health_check=list(HealthCheck)
)
