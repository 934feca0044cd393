"""noPR and PR in turn, with nothing else on the machine: a step's parts where responses have a long tail."""

from __future__ import annotations

import time
from argparse import Namespace
from itertools import count
from pathlib import Path

from tests.gpu.figures import Figures
from tests.gpu.stacks import Sampler
from tests.gpu.training import ARMS, TINY, Sizes, Trace, command, speed, steps_of

LONG_TAIL = Trace("0.6b", 151_936, median=1000, sigma=0.9, sizes=Sizes(prompts=8, samples=16, seats=128, cap=16_384))
STEPS = {"noPR": 4, "PR": 6}
"""PR's pipeline is full from step 3 on"""


def run(options: Namespace, figures: Figures) -> int:
    """Train the arms in turn for as long as another training fits the time."""
    trace = TINY if options.tiny else LONG_TAIL
    task = trace.write(options.scratch)
    until, took = time.monotonic() + options.seconds, dict.fromkeys(ARMS, 0.0)
    for repeat in count(1):
        for arm in options.arms or ARMS:
            began = time.monotonic()
            if began + took[arm] > until or repeat > options.repeats:
                return 0
            steps = _train(arm, repeat, trace, task, until, options, figures)
            took[arm] = time.monotonic() - began
            figures.emit(arm=arm, repeat=repeat, steps=steps, of=STEPS[arm], took_s=took[arm])
    raise AssertionError("count does not end")


def _train(arm: str, repeat: int, trace: Trace, task: Path, until: float, options: Namespace, figures: Figures) -> int:
    """Train ``arm``; how many steps it came to."""
    directory = options.scratch / "runs" / f"pair_{arm}_{repeat}"
    asked = command(arm, directory, STEPS[arm], trace.overrides(task), tiny=options.tiny)
    sampler = Sampler(options.out / f"stacks_{arm}_{repeat}.txt") if options.stacks else None
    began, step = time.monotonic(), 0
    for metrics in steps_of(asked, directory, until, sampler):
        step, at_s = metrics["step"], time.monotonic() - began
        figures.emit(arm=arm, repeat=repeat, step=step, at_s=at_s, **speed(metrics, trace.sizes))
    return step
