"""A made-up run with separate placement, whose figures can be worked out by hand; ``runpy`` loads this file.

Times are seconds after ``ZERO``. Batches are taken at 10, 22 and 42; engines are held from 18 to 19 and from 30 to 31::

    replica 0 |==40 s, 400 tokens=====================================|
    replica 1 |==10 s, 100==|  |12 to 21, 90|     |25 to 35, 100|
    trainer   |wait 0 to 10 |train 10 to 20 |wait|train 22 to 32|wait 32 to 42|train 42 to 50|
                               stage 16 to 18, hold to 19          stage 28 to 30, hold to 31
"""

import json

ZERO = 1_700_000_000.0
TAKEN = (10, 22, 42)
CALLS = ([(1, 0, 10, 100, 0)], [(1, 12, 21, 90, 0)], [(0, 0, 40, 400, 1), (1, 25, 35, 100, 1)])
"""replica, start, end, tokens and version, by the round that saw the call end"""
PHASES = [
    ("wait", 1, 0, 10), ("stage", 1, 16, 18), ("hold", 1, 18, 19), ("sync", 1, 16, 19), ("train", 1, 10, 20),
    ("wait", 2, 20, 22), ("stage", 2, 28, 30), ("hold", 2, 30, 31), ("sync", 2, 28, 31), ("train", 2, 22, 32),
    ("wait", 3, 32, 42), ("train", 3, 42, 50),
]  # fmt: skip
SETTINGS = {
    "arm": "PR", "experiment": "separate", "batch_groups": 2, "samples_per_group": 2, "replicas": 2,
    "slots_per_replica": 8, "max_staleness": 4, "mode": "window", "policy": "bounded", "verl": "0.9.1", "vllm": "0",
    "placement": "separate", "complete": True,
}  # fmt: skip


def build_round(step, **changed):
    start = TAKEN[step - 2] if step > 1 else 0
    calls = [
        [replica, ZERO + begin, ZERO + end, tokens, version, 0, 10, 0.0, f"0/{begin}#{replica}", False]
        for replica, begin, end, tokens, version in CALLS[step - 1]
    ]
    trained = [
        {
            "group": index, "prompt": str(index), "epoch": 0, "lengths": [50, 50], "staleness": [0, 0],
            "segments": [1, 1], "tokens": 100, "off_policy_tokens": 0,
        }
        for index in (2 * step - 2, 2 * step - 1)
    ]  # fmt: skip
    return {
        "event": "round", "step": step, "version": step - 1, "start": ZERO + start, "end": ZERO + TAKEN[step - 1],
        "calls": calls, "interrupt_s": None, "resume_s": None, "trained": trained, "carried_groups": 1,
        "lost_samples": 0, **changed,
    }  # fmt: skip


def write_run(path, *, rounds=None, phases=PHASES, **settings):
    """``path``, now the directory of the run."""
    path.mkdir(parents=True)
    rounds = [build_round(step) for step in (1, 2, 3)] if rounds is None else rounds
    lines = [{"event": "probe", "start": 0.0, "end": 1.0, "tokens": 20, "tokens_per_s": 20.0, "concurrency": 4}]
    lines += [
        {"event": "begin", "step": step, "start": ZERO + start} for name, step, start, _ in phases if name == "wait"
    ]
    lines += rounds
    lines += [
        {"event": "phase", "name": name, "step": step, "start": ZERO + start, "end": ZERO + end}
        for name, step, start, end in phases
    ]
    timers = {1: (10, 20), 2: (2, 12), 3: (10, 18)}
    metrics = [
        {"step": step, "data": {"timing_s/gen": gen, "timing_s/step": whole, "critic/score/mean": 0.5}}
        for step, (gen, whole) in timers.items()
    ]
    (path / "run.json").write_text(json.dumps({**SETTINGS, **settings}))
    (path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return path
