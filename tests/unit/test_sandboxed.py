"""The sandboxed reward: right and wrong responses, those that reach a limit, and a check that fails."""

import asyncio
import os
import random
import signal
import sys
import time
from itertools import product
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.utils.import_utils import load_extern_object

from recipe.partial_rollout.tasks.clock10 import reward as in_process
from recipe.partial_rollout.tasks.clock10.expression import draw_problem
from recipe.partial_rollout.tasks.sandboxed import clock10_check
from recipe.partial_rollout.tasks.sandboxed.limited_process import MOST_OUTPUT, Limit, Limits, run_limited
from recipe.partial_rollout.tasks.sandboxed.reward import SandboxError, compute_score
from recipe.partial_rollout.worker.observed_worker import ObservedAgentLoopWorker, RewardError

PROBLEM = "3?4=_?2=_-8=0"
RIGHT, WRONG = "3*4=2*2=4!**", "3+4=7+2=9!++"
PYTHON = (sys.executable, "-I", "-S", "-c")
RUN_THE_RESPONSE = "import sys; exec(sys.stdin.read())"


def score(response, **kwargs):
    return asyncio.run(compute_score("clock10", response, PROBLEM, **kwargs))


def ended(code, given=b"", **limits):
    return asyncio.run(run_limited([*PYTHON, code], given, Limits(**limits)))


def check(tmp_path, code):
    path = tmp_path / "check.py"
    path.write_text(code)
    return path


def test_right_answer_scores_1_and_a_wrong_one_0():
    problem = "3?4=_?2=_-4=0"
    right = asyncio.run(compute_score("clock10", RIGHT, problem))
    assert right == {"score": 1.0, "acc": 1.0, "over_limit": 0.0}
    assert asyncio.run(compute_score("clock10", WRONG, problem)) == {"score": 0.0, "acc": 0.0, "over_limit": 0.0}


def test_check_agrees_with_the_reward_that_needs_no_process():
    rng = random.Random(0)
    scores = set()
    for _ in range(40):
        problem = draw_problem(rng)
        for operators in product("+-*", repeat=problem.operator_count):
            answer = "".join(operators)
            for response in ("!{}", "{}", "!{} ", "!{}+", "!+!{}", "!{}/", "!", "! {}"):
                response = response.format(answer)
                expected = in_process.compute_score("", response, problem.prompt)
                assert clock10_check.score(problem.prompt, response) == expected
                scores.add(expected)
    assert scores == {0.0, 1.0}


def test_verl_finds_the_function_and_awaits_it():
    found = load_extern_object("pkg://recipe.partial_rollout.tasks.sandboxed.reward", "compute_score")
    assert found is compute_score and asyncio.iscoroutinefunction(found)


def test_many_are_scored_at_once(tmp_path):
    # Each check waits until all are there, which none would be if one were awaited before the next starts.
    meets = """
import os, sys, time
os.symlink("here", sys.argv[1] + str(os.getpid()))
while len(os.listdir(sys.argv[1])) < 8:
    time.sleep(0.01)
print(1)
"""
    path, room = check(tmp_path, meets), tmp_path / "room"
    room.mkdir()

    async def score_all():
        return await asyncio.gather(*[compute_score("", RIGHT, f"{room}/", check=path, timeout_s=60) for _ in range(8)])

    assert [scored["score"] for scored in asyncio.run(score_all())] == [1.0] * 8


def test_pause_comes_before_the_check_and_counts_towards_the_timeout():
    began = time.monotonic()
    assert score(RIGHT, pause_s=0.2)["over_limit"] == 0.0
    assert time.monotonic() - began >= 0.2
    assert score(RIGHT, pause_s=60, timeout_s=0.2)["over_limit"] == 1.0


@pytest.mark.parametrize(
    ("response", "limits"),
    [
        ("import time; time.sleep(60)", {"timeout_s": 0.3}),
        ("print(len(bytearray(1 << 30)))", {"memory_mb": 128}),
    ],
)
def test_response_that_reaches_a_limit_scores_0(tmp_path, response, limits):
    path = check(tmp_path, RUN_THE_RESPONSE)
    assert score(response, check=path, **limits) == {"score": 0.0, "acc": 0.0, "over_limit": 1.0}


def test_limit_that_ended_a_process_is_named():
    assert ended("import time; time.sleep(60)", timeout_s=0.3).over is Limit.TIME
    stubborn = "import signal; signal.signal(signal.SIGXCPU, print)\nwhile 1: pass"
    assert ended(stubborn, cpu_s=0.5, timeout_s=90).over is Limit.CPU
    assert ended("bytearray(1 << 30)", memory_mb=128).over is Limit.MEMORY
    # One in nine hung while asyncio's own pipe took the output, and nobody read it to its end.
    for line in (10, 1_000, 1_000, 1_000, 1_000, 1_000_000):
        flooded = ended(f"while 1: print('x' * {line})")
        assert flooded.over is Limit.OUTPUT and len(flooded.output) == MOST_OUTPUT
    assert ended("print(7)").over is None


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "sandbox check check.py ended with exit status 1: ZeroDivisionError: division by zero"),
        ("import os; os.abort()", "sandbox check check.py ended with SIGABRT: it printed nothing"),
        ("print('no idea')", "sandbox check check.py printed 'no idea': want a score, a number"),
        ("", "sandbox check check.py printed '': want a score, a number"),
    ],
)
def test_check_that_fails_is_an_error_in_one_line(tmp_path, code, message):
    with pytest.raises(SandboxError) as error:
        score(RIGHT, check=check(tmp_path, code))
    assert str(error.value) == message


def test_sandbox_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SandboxError, match=r"sandbox did not start for clock10_check\.py: .*No such file"):
        score(RIGHT)


def test_user_sees_the_failed_check_with_its_prompt(monkeypatch, tmp_path):
    path = check(tmp_path, "import json; json.loads('{')")

    async def in_sandbox(*_):
        await compute_score("clock10", RIGHT, PROBLEM, check=path)

    monkeypatch.setattr(AgentLoopWorker, "_compute_score", in_sandbox)
    worker = ObservedAgentLoopWorker.__new__(ObservedAgentLoopWorker)
    worker.config = SimpleNamespace(partial_rollout=SimpleNamespace(deadlines=SimpleNamespace(reward_s=20)))
    with pytest.raises(
        RewardError, match=r"failed on prompt 0/7: SandboxError: sandbox check check\.py ended .*: json"
    ):
        asyncio.run(worker._compute_score([], {"uid": "0/7"}))


def test_deadline_of_the_call_ends_the_process_and_what_it_started(tmp_path):
    told = tmp_path / "pid"
    code = f"""
import os, subprocess, time
child = subprocess.Popen(["/bin/sleep", "60"])
os.symlink(str(child.pid), {str(told)!r})
time.sleep(60)
"""

    async def call():
        await asyncio.wait_for(run_limited([*PYTHON, code], b"", Limits()), 1.0)

    with pytest.raises(TimeoutError):
        asyncio.run(call())
    assert_ends(int(os.readlink(told)))


def test_process_that_leaves_the_session_with_the_input_holds_nobody_up(tmp_path):
    told = tmp_path / "pid"
    code = f"""
import os, subprocess, time
child = subprocess.Popen(["/bin/sleep", "60"], start_new_session=True)
os.symlink(str(child.pid), {str(told)!r})
time.sleep(60)
"""
    try:
        # More input than a pipe holds, and nobody reads it.
        assert ended(code, given=bytes(1 << 20), timeout_s=1.0).over is Limit.TIME
    finally:
        os.kill(int(os.readlink(told)), signal.SIGKILL)


def assert_ends(pid):
    """A killed process goes once the system has time for it."""
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still alive"
        time.sleep(0.01)


def is_alive(pid):
    """Whether a process runs; nobody may have reaped it yet."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_response_cannot_read_the_environment_nor_write_files(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "secret")
    assert "secret" not in ended("import os; print(dict(os.environ))").output
    target = tmp_path / "left_behind"
    written = ended(f"with open({str(target)!r}, 'w') as file: file.write('x')")
    assert written.last_line.startswith("OSError") and not target.read_bytes()


@pytest.mark.parametrize("key", ["cpu_s", "memory_mb", "timeout_s"])
def test_limit_of_0_is_refused(key):
    with pytest.raises(ValueError, match=f"{key}=0: want a number above 0"):
        score(RIGHT, **{key: 0})
