"""noPR and PR on a real model whose responses stay long, until held-out reward reaches a fixed level."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace

from tests.gpu import counting
from tests.gpu.figures import Figures
from tests.gpu.training import ARMS, TINY, Lesson, Sizes

REWARD = 0.8
SMOLLM2 = Sizes(prompts=16, samples=8, seats=128, cap=3072)


def run(options: Namespace, figures: Figures) -> int:
    """Train each arm until it reaches ``REWARD``, or for its half of the time."""
    model, data = options.scratch / "smollm2", options.scratch / ("tiny_counting" if options.tiny else "counting")
    if options.tiny:
        model = TINY.write(options.scratch) / "model"
    elif not (model / "config.json").exists():
        write = [sys.executable, "-m", "recipe.partial_rollout.tools", "model", "smollm2", "--out", str(model)]
        subprocess.run(write, check=True)
    counting.write(data, median=3 if options.tiny else 40)
    sizes = TINY.sizes if options.tiny else SMOLLM2
    lesson = Lesson(model, data, sizes, reward=counting.__file__, lr=2e-5)
    for arm in options.arms or ARMS:
        for step in lesson.train(arm, options):
            reached = step["held_out"] is not None and step["held_out"] >= REWARD
            figures.emit(**step, wanted=REWARD, reached=reached)
            if reached:
                break
    return 0
