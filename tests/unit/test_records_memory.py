"""Memory of who reads a run: the audit's does not grow with the run, the report's by a little for each engine call."""

import subprocess
import sys

from recipe.partial_rollout.tools.audit import audit
from tests.unit.runs import large_run

_TRACED = """
import gc, sys, tracemalloc
from pathlib import Path
from recipe.partial_rollout.tools.{module} import {name}

# Beside all that was imported Python's collector would pass by what the call drops.
gc.collect()
gc.freeze()
for _ in range(3):
    tracemalloc.start()
    {name}(Path(sys.argv[1]))
    print(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    gc.collect()
"""


def peak(module, name, run):
    """Most bytes that Python held at once during a call, in a process without other tests' threads.

    The least of three: numpy imports some parts when they are first used, and Python's table of strings grows at once.
    """
    command = [sys.executable, "-c", _TRACED.format(module=module, name=name), str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    return min(map(int, done.stdout.split()))


def test_memory_of_the_audit_does_not_grow_with_the_steps(tmp_path):
    short, long = (large_run(tmp_path / str(steps), steps, calls=200, groups=20) for steps in (5, 45))
    result, _ = audit(long)
    assert result.violations == [] and len(result.entries) == 45
    # 40 steps more: 8,000 calls, of 500 bytes each as objects. What it knows of a step takes some 2.5 KB.
    assert peak("audit", "audit", long) - peak("audit", "audit", short) < 200_000


def test_a_run_is_read_in_little_memory_a_call(tmp_path):
    run = large_run(tmp_path, 10, calls=2000, groups=200)
    assert peak("run_record", "load_run", run) / 20_000 < 330
