"""On two cores: the trainer's processes run on theirs, and whatever starts meanwhile runs on the others."""

import json
import os
import subprocess
import sys

import pytest

from verl_ext import cores

TWO = len(cores.available()) >= 2
pytestmark = pytest.mark.skipif(not TWO, reason="needs two cores")

LIFE = """
import json, os, subprocess, sys, threading
from verl_ext import cores
from verl_ext.fsdp_engine import training_threads

def of_child(code="import os; print(sorted(os.sched_getaffinity(0)))", **env):
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True)
    return json.loads(done.stdout)

waiting = threading.Event()
threading.Thread(target=waiting.wait).start()
given = cores.available()[:2]
cores.move_to(given)
environment = cores.environment(1)
with cores.starting_others(1):
    child = of_child()
threads = [sorted(os.sched_getaffinity(int(tid))) for tid in os.listdir("/proc/self/task")]
before = training_threads(1)
os.environ |= environment
print(json.dumps([given, child, threads, cores.of_the_trainer(), before, training_threads(1), training_threads(2)]))
waiting.set()
"""


def test_processes_split_the_cores():
    done = subprocess.run([sys.executable, "-c", LIFE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    (first, second), child, threads, trainer, before, own, each = json.loads(done.stdout.splitlines()[-1])
    assert child == [second], "what starts in the context"
    assert threads == [[first]] * len(threads) and len(threads) >= 2, "all threads of the driver, afterwards"
    assert trainer == [first]
    assert (before, own, each) == (os.cpu_count(), 1, 1), "training threads: all cores, its own, at least one"
