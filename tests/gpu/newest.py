"""Another release of vLLM: its figure is a step of PR, or the error with which the recipe refuses it."""

from __future__ import annotations

import time
from argparse import Namespace

from recipe.partial_rollout.config import releases
from tests.gpu.figures import Figures
from tests.gpu.pair import LONG_TAIL
from tests.gpu.training import TINY, TrainingError, command, speed, steps_of
from verl_ext.guard import installed

WRONG_RELEASE = 5


def reason(terminal: str) -> str:
    """The last line of ``terminal`` that says why the training ended."""
    lines = terminal.strip().splitlines()
    return next((line for line in reversed(lines) if ": " in line and not line.startswith("(traceback:")), terminal)


def run(options: Namespace, figures: Figures) -> int:
    """Train one step of PR on the release that is installed.

    ``--vllm`` names the release that is meant: another one that is installed is an error, with ``WRONG_RELEASE``.
    """
    found, torch = releases.vllm(), installed("torch")
    if options.vllm and options.vllm != found:
        figures.emit(vllm=found, error=f"vLLM {options.vllm} was asked for: pack it with --vllm {options.vllm}")
        return WRONG_RELEASE
    trace = TINY if options.tiny else LONG_TAIL
    task = trace.write(options.scratch)
    asked = command("PR", options.scratch / "runs" / "newest", 1, trace.overrides(task), tiny=options.tiny)
    try:
        for metrics in steps_of(asked, options.scratch / "runs" / "newest", time.monotonic() + options.seconds):
            figures.emit(vllm=found, torch=torch, step=metrics["step"], **speed(metrics, trace.sizes))
    except TrainingError as error:
        figures.emit(vllm=found, torch=torch, refused=reason(str(error)))
    return 0
