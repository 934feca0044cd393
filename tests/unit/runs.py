"""Made-up runs whose figures can be worked out by hand. Times are seconds after ``ZERO``.

In ``separate_run`` batches are taken at 10, 22 and 42; engines are held from 18 to 19 and from 30 to 31::

    replica 0 |==40 s, 400 tokens=====================================|
    replica 1 |==10 s, 100==|  |12 to 21, 90|     |25 to 35, 100|
    trainer   |wait 0 to 10 |train 10 to 20 |wait|train 22 to 32|wait 32 to 42|train 42 to 50|
                               stage 16 to 18, hold to 19          stage 28 to 30, hold to 31
"""

import json

import msgspec

from recipe.partial_rollout.records.run_log import (
    Arm,
    Ended,
    EngineCall,
    Phase,
    RolloutPhase,
    Round,
    RunLog,
    RunSettings,
    TrainedGroup,
)

ZERO = 1_700_000_000.0
SETTINGS = {
    "arm": "noPR", "experiment": "tiny", "batch_groups": 2, "samples_per_group": 2, "replicas": 2,
    "slots_per_replica": 8, "max_staleness": 4, "mode": "window", "policy": "bounded", "verl": "0.9.1", "vllm": "0.0",
    "epoch_prompts": 4, "total": 4, "offered": 4,
}  # fmt: skip
TAKEN = (10, 22, 42)
CALLS = ([(1, 0, 10, 100, 0)], [(1, 12, 21, 90, 0)], [(0, 0, 40, 400, 1), (1, 25, 35, 100, 1)])
"""replica, start, end, tokens and version, by the round that saw the call end"""
PHASES = [
    ("wait", 1, 0, 10), ("stage", 1, 16, 18), ("hold", 1, 18, 19), ("sync", 1, 16, 19), ("train", 1, 10, 20),
    ("wait", 2, 20, 22), ("stage", 2, 28, 30), ("hold", 2, 30, 31), ("sync", 2, 28, 31), ("train", 2, 22, 32),
    ("wait", 3, 32, 42), ("train", 3, 42, 50),
]  # fmt: skip
TIMERS = {1: (10, 20), 2: (2, 12), 3: (10, 18)}
"""seconds of a step, by its number: for its batch, and in all"""


def build_group(index, lengths, *, epoch=0, staleness=0, off_policy=0, segments=1):
    return {
        "uid": f"{epoch}/{index}",
        "order": index,
        "prompt": str(index),
        "lengths": lengths,
        "staleness": [staleness] * len(lengths),
        "segments": [segments] * len(lengths),
        "tokens": sum(lengths),
        "off_policy_tokens": off_policy,
    }


def build_round(step, *, start, end, calls=(), trained=(), interrupt=None, resume=None):
    """A call is (replica, start, end, tokens) and, if they matter, what else the log says of one."""
    noted = [
        EngineCall(replica, ZERO + begin, ZERO + stop, tokens, *(rest or (step - 1,)))
        for replica, begin, stop, tokens, *rest in calls
    ]
    return {
        "event": "round", "step": step, "phase": {"start": ZERO + start, "end": ZERO + end, "calls": noted},
        "interrupt_s": interrupt, "resume_s": resume, "trained": list(trained), "carried_groups": 0,
        "lost_samples": 0,
    }  # fmt: skip


def default_rounds(steps=2):
    """Each round lasts 10 s, runs 4 samples of 100 tokens for 5 s, and trains two groups in dispatch order."""
    return [
        build_round(
            step,
            start=20 * (step - 1),
            end=20 * (step - 1) + 10,
            calls=[(i % 2, 20 * (step - 1), 20 * (step - 1) + 5, 100) for i in range(4)],
            trained=[build_group(2 * step - 2, [100, 100]), build_group(2 * step - 1, [100, 100])],
        )
        for step in range(1, steps + 1)
    ]


def begun(**settings):
    """A process of a run begins."""
    return {"event": "run", **SETTINGS, **settings}


def ended(step=0, *, complete=True, **more):
    return {"event": "ended", "step": step, "complete": complete, **more}


def build_run(path, *, rounds=None, metrics=None, step_s=20.0, phases=(), more=(), complete=True, **settings):
    """``path``, now the directory of the run. ``metrics`` replaces what is logged for a step; None leaves it out."""
    rounds = default_rounds() if rounds is None else rounds
    lines = {
        r["step"]: {
            "timing_s/step": step_s,
            "timing_s/gen": r["phase"]["end"] - r["phase"]["start"],
            "timing_s/update_actor": 4.0,
            "critic/score/mean": float(r["step"]),
        }
        for r in rounds
        if r["event"] == "round"
    }
    lines = {step: data for step, data in {**lines, **(metrics or {})}.items() if data is not None}
    ran = [
        {"event": "phase", "name": name, "step": step, "start": ZERO + start, "end": ZERO + end}
        for name, step, start, end in phases
    ]
    path.mkdir(parents=True)
    write_lines(path / "metrics.jsonl", [{"step": step, "data": data} for step, data in sorted(lines.items())])
    write_lines(path / "run.jsonl", [begun(**settings), *more, *rounds, *ran, *([ended()] if complete else [])])
    return path


def write_lines(path, objects):
    path.write_bytes(b"".join(msgspec.json.encode(o) + b"\n" for o in objects))


def write_training(path, *steps, complete=True, **facts):
    """What is read of a run whose ``steps`` logged these metrics."""
    path.mkdir(parents=True, exist_ok=True)
    lines = [{"step": i, "data": {"training/global_step": i, **step}} for i, step in enumerate(steps, 1)]
    write_lines(path / "metrics.jsonl", lines)
    write_lines(path / "run.jsonl", [begun(**facts), *[ended(len(steps))] * complete])


def halves(step):
    """The groups of a step of 200 tokens."""
    return [build_group(index, [50, 50]) for index in (2 * step - 2, 2 * step - 1)]


def separate_rounds():
    return [
        build_round(
            step,
            start=start,
            end=end,
            calls=[(*call, 0, 10, 0.0, f"0/{call[1]}#{call[0]}", False) for call in CALLS[step - 1]],
            trained=halves(step),
        )
        for step, (start, end) in enumerate(zip((0, *TAKEN), TAKEN, strict=False), start=1)
    ]


def separate_run(path, *, rounds=None, phases=PHASES, **settings):
    begins = [
        {"event": "begin", "step": step, "start": ZERO + start} for name, step, start, _ in phases if name == "wait"
    ]
    timed = {step: {"timing_s/gen": gen, "timing_s/step": whole} for step, (gen, whole) in TIMERS.items()}
    logged = {step: {**timers, "critic/score/mean": 0.5} for step, timers in timed.items()}
    rounds = separate_rounds() if rounds is None else rounds
    placed = {"arm": "PR", "placement": "separate", **settings}
    return build_run(path, rounds=rounds, metrics=logged, phases=phases, more=begins, **placed)


ROUND_S, STEP_S = 20.0, 30.0


def interrupted_run(path, *, steps=3):
    """Rounds that finish eight samples each; two more are interrupted, and finish in the next round.

    A sample ``5#0`` is the first of round 5. An interrupted one has a tool call of 1 s in the round that it finishes in.
    """
    rounds, phases, carried = [], [], []
    for step in range(1, steps + 1):
        start, version = STEP_S * (step - 1), step - 1
        calls = []
        for i, name in enumerate(carried):
            calls.append((i % 2, start, start + 2, 20, version, 5, 50, 0.0, name, False))
            calls.append((i % 2, start + 3, start + 4, 10, version, 0, 70, 0.0, name, False))
        spans = [1.5 + 2 * i for i in range(8)]
        for i, span in enumerate(spans):
            calls.append((i % 2, start, start + span, int(10 * span), version, 0, 10, 0.0, f"{step}#{i}", False))
        carried = [f"{step}#{8 + i}" for i in range(2)]
        for i, name in enumerate(carried):
            calls.append((i % 2, start + 5, start + ROUND_S, 90, version, 0, 10, 0.0, name, True))
        groups = [[int(10 * span) for span in spans[at : at + 4]] for at in (0, 4)]
        trained = [build_group(2 * version + at, lengths, staleness=at) for at, lengths in enumerate(groups)]
        waits = {"interrupt": 0.5, "resume": 0.01}
        rounds.append(build_round(step, start=start, end=start + ROUND_S, calls=calls, trained=trained, **waits))
        phases += [("train", step, start + ROUND_S, start + STEP_S), ("sync", step, start + 28, start + 29)]
    own = {"arm": "PR", "samples_per_group": 4, "slots_per_replica": 4}
    return build_run(path, rounds=rounds, step_s=STEP_S, phases=phases, **own)


def large_group(order, staleness, birth=0):
    lengths = [3000 + 17 * (order % 40) + i for i in range(8)]
    return TrainedGroup(
        uid=f"0/{order}", order=order, prompt=f"{order}-0123456789ab", birth=birth, lengths=lengths,
        staleness=[staleness] * 8, segments=[1 + staleness] * 8, tokens=sum(lengths), off_policy_tokens=100 * staleness,
    )  # fmt: skip


def pr_settings(groups, samples, replicas, **more):
    """Those of a run of PR whose steps train so many groups of so many samples."""
    sizes = {"batch_groups": groups, "samples_per_group": samples, "replicas": replicas, "offered": more["total"]}
    return RunSettings(**{**SETTINGS, "arm": Arm.PR, **sizes, **more})


def large_run(path, steps, calls, groups):
    """A run in ``path``: ``calls`` engine calls and ``groups`` trained groups in each of its ``steps``."""
    total = steps * groups
    log = RunLog(path, pr_settings(groups, 8, 8, epoch_prompts=total, total=total), [str(i) for i in range(8)])
    with (path / "metrics.jsonl").open("w") as metrics:
        for step in range(1, steps + 1):
            start, old = ZERO + 60.0 * step, int(step > 1)
            ran = (
                EngineCall(str(i % 8), start + i % 7, start + 7 + 30 * (i % 19) / 19, 3000 + i, step - 1, 1234, 2345,
                           0.0123456789, f"0/{(step - 1) * groups + i // 8 % groups}#{i % 8}", i % 9 == 0)
                for i in range(calls)
            )  # fmt: skip
            batch = [large_group((step - 1) * groups + i, old, step - 1 - old) for i in range(groups)]
            phase = RolloutPhase(start, start + 40, tuple(ran))
            log.round(Round(step=step, phase=phase, trained=batch, admitted=[group.uid for group in batch]))
            log.add(Phase("train", step, start + 40, start + 60.0))
            values = {"timing_s/step": 60.0, "timing_s/gen": 40.0, "training/global_step": step}
            metrics.write(json.dumps({"step": step, "data": values}) + "\n")
    log.add(Ended(steps, complete=True), sync=True)
    return path
