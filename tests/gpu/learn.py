"""noPR and PR on a real model whose responses stay long, until held-out reward reaches a fixed level."""

from __future__ import annotations

import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

from recipe.partial_rollout.records.metrics import held_out_rewards
from tests.gpu import counting
from tests.gpu.figures import Figures
from tests.gpu.training import ARMS, TINY, Sizes, command, speed, steps_of

REWARD = 0.8
SMOLLM2 = Sizes(prompts=16, samples=8, seats=128, cap=3072)
_TINY_STEPS, _STEPS = 2, 200


def run(options: Namespace, figures: Figures) -> int:
    """Train each arm until it reaches ``REWARD``, or for its half of the time."""
    model, data = options.scratch / "smollm2", options.scratch / ("tiny_counting" if options.tiny else "counting")
    if options.tiny:
        model = TINY.write(options.scratch) / "model"
    elif not (model / "config.json").exists():
        write = [sys.executable, "-m", "recipe.partial_rollout.tools", "model", "smollm2", "--out", str(model)]
        subprocess.run(write, check=True)
    counting.write(data, median=3 if options.tiny else 40)
    for arm in options.arms or ARMS:
        _train(arm, model, data, options, figures)
    return 0


def _train(arm: str, model: Path, data: Path, options: Namespace, figures: Figures) -> None:
    sizes, steps = (TINY.sizes, _TINY_STEPS) if options.tiny else (SMOLLM2, _STEPS)
    until = time.monotonic() + options.seconds / len(options.arms or ARMS)
    directory = options.scratch / "runs" / f"learn_{arm}"
    overrides = [
        *sizes.overrides(),
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'val.parquet'}",
        f"data.val_max_samples={4 if options.tiny else counting.HELD_OUT}",
        f"reward.custom_reward_function.path={counting.__file__}",
        "reward.custom_reward_function.name=compute_score",
        "actor_rollout_ref.actor.optim.lr=2e-5",
        f"trainer.test_freq={2 if options.tiny else 4}",
    ]
    asked = command(arm, directory, steps, overrides, tiny=options.tiny)
    trained_s = 0.0
    for metrics in steps_of(asked, directory, until):
        found = speed(metrics, sizes.prompts * sizes.samples)
        held_out = next(iter(held_out_rewards([metrics])), None)
        trained_s += metrics["timing_s/step"] - metrics.get("timing_s/testing", 0.0)
        reached = held_out is not None and held_out >= REWARD
        figures.emit(
            arm=arm, step=metrics["step"], trained_s=trained_s, score=metrics["critic/score/mean"],
            held_out=held_out, wanted=REWARD, reached=reached, **found,
        )  # fmt: skip
        if reached:
            return
