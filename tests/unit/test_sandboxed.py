"""The sandboxed reward: right and wrong responses, those that reach a limit, and a check that fails."""

import asyncio
import os
import random
import subprocess
import sys
import time
from itertools import product
from uuid import uuid4

import psutil
import pytest
import uvloop
from verl.utils.import_utils import load_extern_object

from recipe.partial_rollout.tasks.clock10 import reward as in_process
from recipe.partial_rollout.tasks.clock10.expression import draw_problem
from recipe.partial_rollout.tasks.sandboxed import clock10_check, limited_process, supervisor
from recipe.partial_rollout.tasks.sandboxed.limited_process import Limit, Limits, SandboxError, run_limited
from recipe.partial_rollout.tasks.sandboxed.reward import compute_score
from recipe.partial_rollout.tasks.sandboxed.supervisor import MOST_OUTPUT

PROBLEM = "3?4=_?2=_-4=0"
RIGHT, WRONG = "3*4=2*2=4!**", "3+4=7+2=9!++"
PYTHON = (sys.executable, "-I", "-S", "-c")
BURN = """
import time
began = time.process_time()
while time.process_time() - began < {seconds}:
    pass
"""


@pytest.fixture(params=["as permitted", "without"])
def namespace(request, monkeypatch):
    """The pid namespace that this machine permits, if any, and then none: the supervisor sweeps."""
    if request.param == "without":
        monkeypatch.setattr(limited_process, "namespace", lambda python: ())


def score(response, **kwargs):
    return asyncio.run(compute_score("clock10", response, PROBLEM, **kwargs))


def ended(code, given=b"", **limits):
    return asyncio.run(run_limited([*PYTHON, code], given, Limits(**limits)))


def check(tmp_path, code):
    path = tmp_path / "check.py"
    path.write_text(code)
    return path


def test_right_answer_scores_1_and_a_wrong_one_0(tmp_path):
    found = load_extern_object("pkg://recipe.partial_rollout.tasks.sandboxed.reward", "compute_score")
    assert found is compute_score and asyncio.iscoroutinefunction(found), "verl awaits it"
    right = score(RIGHT)
    assert right == {"score": 1.0, "acc": 1.0, "over_limit": 0.0, "limit": ""}
    assert score(WRONG) == {**right, "score": 0.0, "acc": 0.0}
    # A ground truth may be longer than an argument.
    path = check(tmp_path, "import sys; print(len(open(sys.argv[1]).read()))")
    assert asyncio.run(compute_score("", "", "x" * 200_000, check=path))["score"] == 200_000


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


def test_pause_comes_before_the_check_and_counts_towards_the_timeout():
    assert score(RIGHT, pause_s=0.2)["over_limit"] == 0.0
    assert score(RIGHT, pause_s=60, timeout_s=0.2)["over_limit"] == 1.0


def test_response_that_reaches_a_limit_scores_0(tmp_path):
    # Asleep by its own choice: were that an error, it would be masked.
    runs_it = check(tmp_path, "import sys; exec(sys.stdin.read())")
    scored = score("import time; time.sleep(60)", check=runs_it, timeout_s=0.5)
    assert scored == {"score": 0.0, "acc": 0.0, "over_limit": 1.0, "limit": "time"}


def test_check_that_gets_no_core_in_time_is_an_error_not_a_0(tmp_path, monkeypatch):
    """Eight at once on the core of this process: each wants half a second of it, and has a second."""
    path, cores = check(tmp_path, BURN.format(seconds=0.5) + "print(1)"), os.sched_getaffinity(0)

    async def score_all():
        calls = [compute_score("", "", "", check=path, timeout_s=1.0) for _ in range(8)]
        return await asyncio.gather(*calls, return_exceptions=True)

    os.sched_setaffinity(0, {min(cores)})
    try:
        scored = asyncio.run(score_all())
    finally:
        os.sched_setaffinity(0, cores)
    errors = [error for error in scored if isinstance(error, Exception)]
    assert errors and all(isinstance(error, SandboxError) for error in errors)
    assert "the machine is busy; lower partial_rollout.reward_concurrency" in str(errors[0])
    assert all(each["score"] == 1.0 for each in scored if not isinstance(each, Exception))


def test_limit_that_ended_a_process_is_named():
    stubborn = "import signal; signal.signal(signal.SIGXCPU, print)\nwhile 1: pass"
    assert ended(stubborn, cpu_s=0.5, timeout_s=90).over is Limit.CPU
    assert ended("print(len(bytearray(1 << 30)))", memory_mb=128).over is Limit.MEMORY
    # One in nine hung while asyncio's own pipe took the output, and nobody read it to its end.
    for line in (10, 1_000, 1_000, 1_000_000):
        flooded = ended(f"while 1: print('x' * {line})")
        assert flooded.over is Limit.OUTPUT and len(flooded.output) == MOST_OUTPUT
    with pytest.raises(ValueError, match="cpu_s=0: want a number above 0"):
        Limits(cpu_s=0)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "ended with exit status 1: ZeroDivisionError: division by zero"),
        # As the machine's out-of-memory killer does: no limit of the response explains it.
        ("import os; os.kill(os.getpid(), 9)", "ended with SIGKILL: it printed nothing"),
        ("print('no idea')", "printed 'no idea': want a score, a number"),
        ("", "printed '': want a score, a number"),
    ],
)
def test_check_that_fails_is_an_error_in_one_line(tmp_path, code, message):
    with pytest.raises(SandboxError) as error:
        score(RIGHT, check=check(tmp_path, code))
    assert str(error.value) == f"sandbox check check.py {message}"


def test_sandbox_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(SandboxError, match=r"sandbox did not start for clock10_check\.py: .*No such file"):
        score(RIGHT)


def running(mark):
    """Command lines with ``mark`` of this machine's processes; a zombie has none."""
    lines = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [line for line in lines if mark in line]


ESCAPE = """
import os, time
for _ in range(3):
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.closerange(0, 3)
            time.sleep(300)
        os._exit(0)
"""


@pytest.mark.parametrize("then", ["print(1.0)", "time.sleep(300)"], ids=["ends", "is given up"])
def test_nothing_outlives_its_check(namespace, then):
    mark = uuid4().hex
    code = f"{ESCAPE}{then}  # {mark}"

    async def call():
        calling = asyncio.create_task(run_limited([*PYTHON, code], bytes(1 << 20), Limits(timeout_s=60)))
        if then == "print(1.0)":
            return await calling
        # The supervisor, the check, and three that have left its session and lost their parent.
        while len([line for line in running(mark) if "supervisor.py" not in line]) < 4:
            await asyncio.sleep(0.05)
        calling.cancel()
        await asyncio.wait([calling])

    answer = asyncio.run(asyncio.wait_for(call(), 60))
    assert answer is None or answer.last_line == "1.0"
    assert running(mark) == []


def test_nothing_outlives_the_reader_of_its_score(namespace, tmp_path):
    mark = uuid4().hex
    code = f"{ESCAPE}time.sleep(300)  # {mark}"
    within = limited_process.namespace(sys.executable)
    command = [*within, sys.executable, "-I", "-S", supervisor.__file__, "60", "512", "60", "64", "", *PYTHON, code]
    reader = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    wait_until(lambda: len(running(mark)) >= 5)
    reader.stdout.close()
    wait_until(lambda: not running(mark))
    reader.wait(10)


def wait_until(true, seconds=30):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("limit", "limits", "children", "each"),
    [
        # Each in its turn: 3.2 s of a processor.
        (Limit.CPU, {"cpu_s": 1}, 8, f"exec({BURN.format(seconds=0.4)!r}); os._exit(0)"),
        (Limit.MEMORY, {"memory_mb": 96}, 6, "held = bytearray(40 << 20); time.sleep(60)"),
        (Limit.PROCESSES, {"processes": 20}, 5000, "time.sleep(60); os._exit(0)"),
    ],
)
def test_limit_holds_for_all_processes_of_a_response_together(namespace, limit, limits, children, each):
    waits = "os.waitpid(pid, 0)" if limit is Limit.CPU else "pass"
    code = (
        f"import os, time\nfor i in range({children}):\n    if not (pid := os.fork()):\n        {each}\n    {waits}\n"
        "print('all')\ntime.sleep(60)"
    )
    answer = ended(code, timeout_s=60, **limits)
    assert answer.over is limit and "all" not in answer.output


def test_memory_that_forks_share_counts_once(namespace):
    code = (
        "import os, time\nheld = bytearray(60 << 20)\nfor i in range(6):\n    if not os.fork():\n"
        "        time.sleep(1); os._exit(0)\nfor i in range(6): os.wait()\nprint(7)"
    )
    assert ended(code, memory_mb=160).last_line == "7"


def test_response_makes_and_removes_no_file(tmp_path):
    """Needs Landlock (Linux 5.13); without it only their content is forbidden, and the sandbox says so."""
    (tmp_path / "mine").write_text("x")
    makes = ("os.mkdir('new')", "os.symlink('mine', 'new')", "open('new', 'w')")
    for change in (*makes, "open('mine', 'w')", "os.remove('mine')"):
        answer = ended(f"import os; os.chdir({str(tmp_path)!r}); {change}")
        if supervisor.landlock_version() < 1:
            assert all(not each.stat().st_size for each in tmp_path.glob("new") if each.is_file())
        else:
            assert answer.last_line.startswith("PermissionError") and os.listdir(tmp_path) == ["mine"]
    assert ended("open('/dev/null', 'w').write('x'); print(1)").last_line == "1"


@pytest.mark.parametrize("permitted, version, said", [(False, 7, "no pid namespace"), (True, 0, "no Landlock")])
def test_what_the_machine_does_not_permit_is_said(monkeypatch, permitted, version, said):
    monkeypatch.setattr(limited_process, "_works", lambda *_: permitted)
    monkeypatch.setattr(limited_process, "_namespaces", lambda: [("unshare",)])
    monkeypatch.setattr(supervisor, "landlock_version", lambda: version)
    # Not caplog: what another test imports may turn loggers off.
    warned = []
    monkeypatch.setattr(limited_process.logger, "warning", lambda text, *args: warned.append(text % args))
    assert limited_process.namespace.__wrapped__("python") == (("unshare",) if permitted else ())
    assert said in warned[0]


def test_input_that_nobody_reads_is_no_error_in_the_event_loop_of_ray():
    async def calls():
        sizes = (0, 1 << 20)
        calls = [run_limited(["/bin/true"], bytes(sizes[i % 2]), Limits(timeout_s=60)) for i in range(12)]
        return await asyncio.gather(*calls)

    assert [ended.status for ended in uvloop.run(calls())] == [0] * 12


def test_check_runs_where_its_caller_is_without_its_environment(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "secret")
    said = ended("import os; print(os.getcwd(), dict(os.environ))").output
    assert said.startswith(os.getcwd()) and "secret" not in said
