"""A round goes through its states in order, and nobody who needs it finished is answered before."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.rollout.live_round import LiveRound, RoundState
from recipe.partial_rollout.rollout.round_parts import RoundParts
from recipe.partial_rollout.rollout.rounds import Rounds

VERBS = ("open", "interrupt", "flush", "finish")
STATES = list(RoundState)


def do(round_, verb):
    getattr(round_, verb)(*[None] * (verb == "flush"))


def round_in(state):
    """A round of step 3."""
    round_ = LiveRound(3)
    for verb in VERBS[: STATES.index(state)]:
        do(round_, verb)
    return round_


def rounds_in(state):
    """``Rounds`` whose last round is in ``state``; None: there was none yet. Whatever they ask anyone fails."""
    settings = SimpleNamespace(deadlines=None, batch_groups=1, dashboard=SimpleNamespace(progress_s=0))
    rounds = Rounds(RoundParts(SimpleNamespace(settings=settings, control=None), *[None] * 8))
    rounds._round = None if state is None else round_in(state)
    return rounds


def test_verbs_move_a_round_from_state_to_state():
    round_ = LiveRound(3)
    seen = [round_.state]
    for verb in VERBS:
        do(round_, verb)
        seen.append(round_.state)
    assert seen == STATES


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("verb", VERBS)
def test_verb_out_of_turn_is_refused_by_the_name_of_the_state(state, verb):
    round_ = round_in(state)
    if STATES.index(state) == VERBS.index(verb):
        return
    with pytest.raises(RuntimeError, match=f"the round of step 3 is {state}, not "):
        do(round_, verb)
    assert round_.state is state


NEEDS = {
    "its figures": lambda rounds: rounds.take_step_metrics(),
    "validation": lambda rounds: asyncio.run(rounds.make_way_for_validation()),
    "a checkpoint": lambda rounds: asyncio.run(rounds.save(Path("manager"))),
    "the next round": lambda rounds: asyncio.run(rounds.play(None)),
}


@pytest.mark.parametrize("state", STATES[:-1])
@pytest.mark.parametrize("what", NEEDS)
def test_whoever_needs_the_round_finished_is_refused_at_once(state, what):
    with pytest.raises(RuntimeError, match=f"round of step 3 is {state}, not finished: it is too early for {what}"):
        NEEDS[what](rounds_in(state))


@pytest.mark.parametrize("state", [None, RoundState.FINISHED])
def test_figures_are_there_before_the_first_round_and_after_a_finished_one(state):
    assert rounds_in(state).take_step_metrics() == {}


@pytest.mark.parametrize("state", [state for state in STATES if state is not RoundState.FLUSHING])
def test_round_that_is_not_flushing_cannot_be_finished(state):
    with pytest.raises(RuntimeError, match=f"the round of step 3 is {state}: there is nothing to finish"):
        asyncio.run(rounds_in(state).finish_round())


def test_nothing_is_finished_before_the_first_round():
    with pytest.raises(RuntimeError, match="no round has been played"):
        asyncio.run(rounds_in(None).finish_round())
