"""Every question to a Ray actor is asked inside a wait that has a deadline, or where this file says who ends it."""

import ast
from pathlib import Path

import pytest

import recipe.partial_rollout.waits as here

pytestmark = pytest.mark.usefixtures("no_garbage")

PACKAGE = Path(here.__file__).parent
ROOMS = ("rollout", "training", "engine", "worker", "manager")
WAITS = {"_watched", "wait", "wait_batch", "wait_for"}
"""``waits.wait``, ``RecipeCheckpointManager._watched``, the guard's two; asyncio's own, which takes seconds"""

ENDED_BY = {
    "rollout/driver.py _begin_version": "the guard, in the next line",
    "rollout/driver.py _batch_taken": "the guard, in the next line",
    "rollout/guard.py _look": "within interrupt_s, in the next line",
    "rollout/guard.py _watch_trainer": "whoever waits meanwhile: a trainer that hangs is awaited by nobody in a round",
    "rollout/replicas.py _asking": "_answers, within interrupt_s",
    "rollout/guard.py _start": "within START_S, in the next line",
    "rollout/guard.py _serve": "nobody: it lasts as long as the worker",
    "rollout/guard.py _answer": "within interrupt_s, two lines on",
    "rollout/driver.py connect": "nobody waits: makes an actor",
    "rollout/driver.py explain": "within _LAST_WORDS_S, in the next line",
    "rollout/guard.py follow_lengths": "the guard, in the next line",
    "training/agent_loop_manager.py spawn": "nobody waits: makes an actor",
    "training/agent_loop_manager.py _take_calls": "within interrupt_s, two lines on",
    "training/weight_transfer.py _meet": "_watched, by the constructor",
    "training/weight_transfer.py load_staged": "_watched, four lines on",
    "engine/replica.py check_alive": "ServerControl._all, within interrupt_s",
    "engine/replica.py hold_generation": "ServerControl._all, within interrupt_s",
    "engine/replica.py launch_servers": "verl at the start, ServerControl.restart_dead later",
    "engine/replica.py relaunch": "ServerControl.restart_dead, within START_S",
    "worker/claim_loop.py serve": "the guard, which asks the manager: a worker lives as long as its driver",
    "worker/claim_loop.py _claim": "the guard, as above; a claim also ends after CLAIM_WAIT_S",
    "worker/rewards.py remote": "its caller, within reward_s",
    "manager/actor.py fetch": "ray.get with a timeout",
}
"""file and function of each question outside such a call, and what ends it"""


def asks(node):
    """Whether ``node`` is ``actor.verb.remote(...)``, or a question to Ray itself."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    owner = node.func.value
    if node.func.attr == "remote":
        # ``ray.remote(...)`` is a decorator.
        return not (isinstance(owner, ast.Name) and owner.id == "ray")
    return isinstance(owner, ast.Name) and owner.id == "ray" and node.func.attr in ("get", "wait")


def waits(node):
    called = getattr(node, "func", None)
    return isinstance(node, ast.Call) and getattr(called, "attr", getattr(called, "id", "")) in WAITS


def unguarded(tree):
    """Names of the functions in ``tree`` that ask outside a wait, one for each question."""
    found = []

    def visit(node, function, guarded):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if asks(node) and not guarded:
            found.append(function)
        for child in ast.iter_child_nodes(node):
            visit(child, function, guarded or waits(node))

    visit(tree, "(module)", False)
    return found


def test_every_question_to_an_actor_has_a_deadline():
    paths = [PACKAGE / "task_runner.py", *(path for room in ROOMS for path in (PACKAGE / room).glob("**/*.py"))]
    found = {
        f"{path.relative_to(PACKAGE).as_posix()} {function}"
        for path in paths
        for function in unguarded(ast.parse(path.read_text()))
    }
    assert found - set(ENDED_BY) == set(), "wait for it with the guard, or say here what ends the wait"
    assert set(ENDED_BY) - found == set(), "nobody needs the exception"
