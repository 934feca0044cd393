"""noPR and PR on prompts with a picture: the embedded task, whose tiny Qwen3-VL ships with the recipe."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from recipe.partial_rollout.tasks.ready_start import Parameters, make_task
from tests.gpu.figures import Figures
from tests.gpu.training import ARMS, TINY, Lesson, Sizes

PICTURES = Sizes(prompts=8, samples=8, seats=128, cap=768, prompt_length=64)
"""of the quick start with images, whose figures on a CPU are in tests/studies/results/log.md"""


def run(options: Namespace, figures: Figures) -> int:
    """Train each arm for its half of the time."""
    pictures = lesson(options.scratch, tiny=options.tiny)
    for arm in options.arms or ARMS:
        for step in pictures.train(arm, options):
            figures.emit(**step)
    return 0


def lesson(scratch: Path, *, tiny: bool) -> Lesson:
    """Write model and prompts, unless they are there. The recipe chooses the attention, which pads rows with images."""
    task = scratch / "pictures"
    make_task(task, Parameters(), task="pictures")
    return Lesson(
        task / "model",
        task / "data",
        TINY.sizes if tiny else PICTURES,
        reward="pkg://recipe.partial_rollout.tasks.clock10.reward",
        lr=2e-4,
        # vLLM would measure its memory with a video too.
        more=("+actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt={image: 1, video: 0}",),
    )
