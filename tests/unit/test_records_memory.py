"""Memory of who reads a run: the audit's does not grow with the run, the report's by a little for each engine call.

``python -m pytest tests/unit/test_records_memory.py -m benchmarks -s`` prints the figures for a run of a million calls.
"""

import gc
import json
import subprocess
import sys
import time
import tracemalloc

import pytest

from recipe.partial_rollout.records.calls import EngineCall, RolloutPhase
from recipe.partial_rollout.records.ledger import Admitted, Complete, RunSizes, Trained
from recipe.partial_rollout.records.ledger import to_json as ledger_line
from recipe.partial_rollout.records.run import load_run
from recipe.partial_rollout.records.trace import Arm, RoundRecord, RunSettings, RunTrace
from recipe.partial_rollout.records.trained_group import TrainedGroup
from recipe.partial_rollout.tools.audit import audit

ZERO, STEP_S, N = 1_700_000_000.123456, 60.0, 8


def trained_group(order, staleness):
    lengths = [3000 + 17 * (order % 40) + i for i in range(N)]
    return TrainedGroup(
        order=order, epoch=0, lengths=lengths, staleness=[staleness] * N, prompt=f"{order}-0123456789ab",
        segments=[1 + staleness] * N, tokens=sum(lengths), off_policy_tokens=100 * staleness, uid=f"0/{order}", birth=0,
        parts=[[length] * 4 for length in lengths], masked=[False] * N,
    )  # fmt: skip


def write_run(path, steps, calls, groups, **trace_options):
    """A run in ``path``: ``calls`` engine calls and ``groups`` trained groups in each of its ``steps``."""
    settings = RunSettings(Arm.PR, "large", groups, N, 8, 256, 4, "window", "bounded", "0", "0", complete=True)
    trace = RunTrace(path, [str(i) for i in range(8)], settings, **trace_options)
    total = steps * groups
    with (path / "ledger.jsonl").open("w") as ledger, (path / "metrics.jsonl").open("w") as metrics:

        def book(event):
            ledger.write(json.dumps(ledger_line(event)) + "\n")

        book(RunSizes("PR", N, groups, 4, total, total, total))
        for step in range(1, steps + 1):
            start, old = ZERO + STEP_S * step, int(step > 1)
            ran = (
                EngineCall(str(i % 8), start + i % 7, start + 7 + 30 * (i % 19) / 19, 3000 + i, step - 1, 1234, 2345,
                           0.0123456789, f"0/{(step - 1) * groups + i // N % groups}#{i % N}", i % 9 == 0)
                for i in range(calls)
            )  # fmt: skip
            batch = [trained_group((step - 1) * groups + i, old) for i in range(groups)]
            trace.round(RoundRecord(step, step - 1, RolloutPhase(start, start + 40, tuple(ran)), batch))
            trace.phase("train", step, start + 40, start + STEP_S)
            book(Admitted(step, step - 1, [group.uid for group in batch]))
            book(Trained(step, step - 1, batch))
            values = {"timing_s/step": STEP_S, "timing_s/gen": 40.0, "training/global_step": step}
            metrics.write(json.dumps({"step": step, "data": values}) + "\n")
        book(Complete())
    settings.write(path)
    return path


def peak(action):
    """Most bytes that Python held at once during ``action``, and its result."""
    # What other tests left behind would have Python's collector pass by what ``action`` drops.
    gc.collect()
    gc.freeze()
    tracemalloc.start()
    result = action()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    gc.unfreeze()
    return most, result


def test_memory_of_the_audit_does_not_grow_with_the_steps(tmp_path):
    short, long = (write_run(tmp_path / str(steps), steps, calls=200, groups=20) for steps in (5, 45))
    for run in (short, long):
        # numpy imports some parts when they are first used.
        peak(lambda run=run: audit(run))
    few, _ = peak(lambda: audit(short))
    many, (result, _) = peak(lambda: audit(long))
    assert result.violations == [] and result.rounds_compared == 45
    # 40 steps more: 8,000 calls, of 500 bytes each as objects, and 800 prompts.
    assert many - few < 100_000


def test_a_run_is_read_in_little_memory_a_call(tmp_path):
    path = write_run(tmp_path, 10, calls=2000, groups=200)
    load_run(path)
    # Threads that other tests have left may allocate meanwhile.
    most, run = min((peak(lambda: load_run(path)) for _ in range(3)), key=lambda found: found[0])
    assert most / sum(len(round_.phase.calls) for round_ in run.rounds) < 330


_MEASURED = """
import re, sys
from pathlib import Path
from recipe.partial_rollout.tools.{module} import main

def peak():
    # Unlike getrusage's, it does not begin with the parent's.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

base = peak()
assert main(sys.argv[1:]) == 0
print("peak", peak() - base)
"""


@pytest.mark.benchmarks
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("options", [{}, {"every": 10}], ids=["whole", "thinned"])
def test_a_million_calls(tmp_path, options):
    steps, calls = 500, 2000
    run = write_run(tmp_path / "run", steps, calls, groups=200, **options)
    sizes = {name: (run / name).stat().st_size for name in ("trace.jsonl", "ledger.jsonl")}
    print(f"\n{steps * calls:,} calls: " + ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.items()))
    for module in ("audit", "report.command"):
        began = time.monotonic()
        code = _MEASURED.format(module=module)
        done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
        kib = int(done.stdout.split()[-1])
        took = time.monotonic() - began
        a_call = kib * 1024 / (steps * calls)
        print(f"{module}: {took:.0f} s, {kib / 1024:,.0f} MiB beyond its imports, {a_call:.0f} bytes a call")
