"""Memory of who reads a run does not grow with it, or little; the manager's collections keep out of its rounds."""

import gc
import subprocess
import sys
import weakref

from recipe.partial_rollout.manager import garbage
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
    # 40 steps more: 8,000 calls, of 500 bytes each as objects. It keeps some 5 KB of a step, 250 bytes a group.
    assert peak("audit", "audit", long) - peak("audit", "audit", short) < 300_000


def test_a_run_is_read_in_little_memory_a_call(tmp_path):
    run = large_run(tmp_path, 10, calls=2000, groups=200)
    assert peak("run_record", "load_run", run) / 20_000 < 330


# -- the manager -------------------------------------------------------------------------------------------------------


class Cycle:
    def __init__(self):
        self.me = self


def test_what_lived_when_a_round_began_is_collected_after_it_and_python_starts_no_full_collection_within():
    # Another test of this process may have left a round open.
    garbage.release()
    usual, before, full = gc.get_threshold(), weakref.ref(Cycle()), []
    garbage.hold()
    within = weakref.ref(Cycle())
    gc.collect()
    gc.callbacks.append(lambda phase, info: full.append(info["generation"] == 2))
    try:
        assert before() is not None and within() is None
        kept = [[] for _ in range(len(gc.get_objects()) + 1_000_000)]
        assert kept and full and not any(full)
    finally:
        gc.callbacks.pop()
        garbage.release()
    assert gc.get_threshold() == usual and gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None
