"""A scripted life of the manager, killed or restored at every transition of a sample, right before and right after.

``test_manager_life`` says what must hold; there faults come at random, here at each transition. The script fixes what each
sample does: how many tokens in which engine calls, in one turn or in several, whether its agent loop raises.
"""

import contextlib
import gc
import itertools
import sys
from collections import Counter
from functools import partial

import numpy as np
import pytest

from recipe.partial_rollout.config.settings import Mode, SchedulingPolicy
from tests.unit.test_manager_life import ManagerLife

CHUNK = 3
"""tokens of one engine call"""
TRANSITIONS = "claim", "segment", "interrupt", "finish", "fail", "retry", "take", "acknowledge"
SIZES = {
    "mode": Mode.WINDOW, "batch": 2, "n": 2, "overlap": 1.0, "slack": 1, "retries": 2, "every": 0, "more": 0,
    "limited": False, "gen_batches": 0,
}  # fmt: skip


class Struck(Exception):
    """What was under way does not go on."""


class ScriptedLife(ManagerLife):
    """Two workers and ``steps`` batches.

    ``fault(life, transition, side, sample_id)`` is asked around every transition; where it strikes, it raises ``Struck``.
    """

    def __init__(self, fault, steps=4):
        super().__init__()
        self.fault, self.turns = fault, itertools.count()
        self.begin(SchedulingPolicy.BOUNDED, None, {**SIZES, "steps": steps})
        self.join(3)

    # -- faults ----------------------------------------------------------------------------------------------------

    def worker_dies(self, sample_id):
        """The worker that has ``sample_id`` dies with its conversations, and another takes its place."""
        workers = list(self.capacity)
        self.join(3)
        self.kill_worker(workers.index(self.model.running.get(sample_id, workers[0])))

    def everything_dies(self, sample_id):
        """Right after a checkpoint, from which the training goes on."""
        self.checkpoint_and_go_on_from_it()

    def around(self, transition, verb, sample_id=None):
        self.fault(self, transition, "before", sample_id)
        verb()
        self.nothing_is_lost_or_repeated()
        self.states_agree_with_the_indexes()
        self.slots_are_respected_and_no_key_fails()
        self.fault(self, transition, "after", sample_id)

    # -- a run -----------------------------------------------------------------------------------------------------

    def play(self):
        while len(self.model.trained) < self.total:
            with contextlib.suppress(Struck):
                self.turn(next(self.turns))
        self.assert_everything_ended()

    def turn(self, number):
        """The trainer's part where it can act, or else a sample's."""
        assert number < 200 * self.total
        model = self.model
        if model.taken and model.running:
            self.around("interrupt", partial(self.interrupt, 0, 1), next(iter(model.running)))
        elif model.taken:
            self.around("acknowledge", self.acknowledge)
        elif not self.manager.round_open:
            self.begin_version()
        elif self.complete():
            self.around("take", partial(self.take_batch, True))
        else:
            self.play_samples(number)

    def play_samples(self, number):
        model = self.model
        if model.failed:
            self.around("retry", partial(self.retry, 0), model.failed[0])
        for worker in list(self.capacity):
            self.around("claim", partial(self.take_grants, worker), next(reversed(model.running), None))
        if model.running:
            pick = number % len(model.running)
            self.advance(list(model.running)[pick], pick)

    def advance(self, sample_id, pick):
        """The next thing that its agent loop does."""
        prompt, index = (int(part) for part in sample_id.split("/")[1].split("#"))
        length, made = 2 + (prompt * 5 + index * 3) % 11, sum(map(len, self.model.segments.get(sample_id, ())))
        raises = {1: 1, 3: 99}.get(prompt % 5, 0) if index == 0 else 0
        if made >= min(CHUNK, length) and self.model.failures.get(sample_id, 0) < raises:
            self.around("fail", partial(self.fail, pick), sample_id)
        elif made < length:
            # Those with an odd index are conversations of several turns.
            stop = "completed" if index % 2 or made + CHUNK >= length else None
            call = partial(self.extend, sample_id, min(CHUNK, length - made), stop)
            self.around("segment", call, sample_id)
        else:
            self.around("finish", partial(self.end_sample, sample_id, 0), sample_id)


@pytest.mark.parametrize("occurrence", [1, 2, 4])
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("what", ["worker_dies", "everything_dies"])
def test_fault_at_a_transition_loses_no_prompt_and_counts_lost_tokens(what, transition, side, occurrence):
    struck = Counter()

    def fault(life, at, on, sample_id):
        struck[at, on] += 1
        if (at, on) == (transition, side) and struck[at, on] == occurrence:
            getattr(life, what)(sample_id)
            raise Struck

    ScriptedLife(fault).play()
    assert struck[transition, side] >= occurrence


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


def test_three_hundred_rounds_do_not_grow_the_manager():
    """Rounds of two prompts, with a dead worker every 40th interruption and a crash every 600th."""
    occasions = itertools.count(1)
    sizes = {}

    def fault(life, transition, side, sample_id):
        if transition == "take" and side == "before" and life.step in (100, 300):
            kept = life.manager
            sizes[life.step] = footprint([kept.backlog, kept.groups, kept.samples.unfinished, kept.slots])
        if transition == "interrupt" and side == "after":
            count = next(occasions)
            if count % 40 == 0:
                (life.worker_dies if count % 300 else life.everything_dies)(sample_id)
                raise Struck

    ScriptedLife(fault, steps=302).play()
    assert sizes[300] <= 1.5 * sizes[100]
