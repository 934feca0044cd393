"""Memory of who reads a run does not grow with it; the manager's collections keep out of its rounds."""

import gc
import subprocess
import sys
import weakref

from recipe.partial_rollout.manager.actor import allow_full_collections, postpone_full_collections
from tests.unit.runs import large_run

TRACED = """
import gc, sys, tracemalloc
from pathlib import Path
from recipe.partial_rollout.tools.audit import audit

# Beside all that was imported Python's collector would pass by what the call drops.
gc.collect()
gc.freeze()
for _ in range(3):
    tracemalloc.start()
    audit(Path(sys.argv[1]))
    print(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    gc.collect()
"""


def test_memory_of_the_audit_does_not_grow_with_the_steps(tmp_path):
    peaks = []
    for steps in (5, 45):
        run = large_run(tmp_path / str(steps), steps, calls=200, groups=20)
        done = subprocess.run(
            [sys.executable, "-c", TRACED, str(run)], capture_output=True, text=True, timeout=100, check=True
        )
        # The first call is more: numpy imports some parts when they are first used.
        peaks.append(min(map(int, done.stdout.split())))
    # 40 steps more: 8,000 calls, of 500 bytes each as objects. It keeps some 5 KB of a step, 250 bytes a group.
    assert peaks[1] - peaks[0] < 300_000


class Cycle:
    def __init__(self):
        self.me = self


def test_no_full_collection_runs_within_a_round():
    # Another test of this process may have left a round open.
    allow_full_collections()
    usual, before, full = gc.get_threshold(), weakref.ref(Cycle()), []
    postpone_full_collections()
    within = weakref.ref(Cycle())
    gc.collect()
    gc.callbacks.append(lambda phase, info: full.append(info["generation"] == 2))
    try:
        assert before() is not None and within() is None
        kept = [[] for _ in range(len(gc.get_objects()) + 1_000_000)]
        assert kept and full and not any(full)
    finally:
        gc.callbacks.pop()
        allow_full_collections()
    assert gc.get_threshold() == usual and gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None
