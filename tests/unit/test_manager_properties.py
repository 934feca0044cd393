"""Random lives of the manager: whatever happens, nothing is lost, repeated, too stale or changed by a token.

2,000 sequences by default; ``PARTIAL_ROLLOUT_SEQUENCES=100000 python -m pytest tests/unit/test_manager_properties.py``
for a night's worth.
"""

import runpy
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

LIFE = runpy.run_path(str(Path(__file__).with_name("manager_life.py")))
ManagerLife, started = LIFE["ManagerLife"], LIFE["started"]


class ColocatedLife(ManagerLife):
    """Rounds that open, are interrupted once their batch is complete, and open again when it is trained."""

    def may_open(self):
        model = self.model
        return not self.manager.round_open and not model.taken and len(model.trained) < self.total

    @precondition(lambda self: started(self) and self.may_open())
    @rule()
    def open_round(self):
        self.offer()
        if not self.manager.exhausted:
            self.filtered_this_round = 0
            self.manager.open_round()

    def take(self):
        self.manager.close_round()
        return self.manager.take_batch()

    @precondition(lambda self: started(self) and self.model.taken)
    @rule()
    def acknowledge(self):
        super().acknowledge()
        self.model.version += 1
        self.manager.advance_version(self.model.version)

    @precondition(lambda self: started(self) and self.may_open())
    @rule(quarters=st.integers(0, 12))
    def set_overlap(self, quarters):
        """What ``overlap=auto`` does between rounds."""
        self.manager.set_overlap(min(quarters / 4, self.max_staleness))

    @precondition(lambda self: started(self) and self.may_open())
    @rule(every=st.integers(2, 4))
    def play_round_with_stragglers(self, every):
        """A whole round in which some prompts end only when nothing else runs."""
        self.open_round()
        if not self.manager.round_open:
            return
        while not self.manager.round_complete():
            if self.manager.short_of_prompts:
                self.offer_in_the_round()
            assert self.end_one(every), "the round is not complete, and nothing runs"
        for sample_id in list(self.model.running):
            self.manager.interrupt(sample_id)
            del self.model.running[sample_id]
        self.take_batch()
        self.acknowledge()


TestColocatedLife = ColocatedLife.TestCase
TestColocatedLife.settings = settings(
    max_examples=LIFE["SEQUENCES"], stateful_step_count=25, suppress_health_check=list(HealthCheck)
)
