"""A reward that runs a check in a process of its own for each response, as a sandbox for code does.

The check is a Python file: the response comes on its standard input, the ground truth is its argument, and the last line
that it prints is the score. ``clock10_check.py`` checks the embedded task. In the quick start::

    reward.custom_reward_function.path=pkg://recipe.partial_rollout.tasks.sandboxed.reward
    +reward.custom_reward_function.reward_kwargs.pause_s=1.5

The other ``reward_kwargs`` are ``check`` (a path), ``cpu_s``, ``memory_mb`` and ``timeout_s``. Keep ``timeout_s`` below
``partial_rollout.deadlines.reward_s``: past that, the call itself is given up.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipe.partial_rollout.tasks.sandboxed.limited_process import Ended, Limits, run_limited

CLOCK10_CHECK = Path(__file__).with_name("clock10_check.py")
_DEFAULTS = Limits()


class SandboxError(RuntimeError):
    """The check itself failed, so the response has no score."""


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    check: str | Path = CLOCK10_CHECK,
    pause_s: float = 0.0,
    cpu_s: float = _DEFAULTS.cpu_s,
    memory_mb: int = _DEFAULTS.memory_mb,
    timeout_s: float = _DEFAULTS.timeout_s,
    **kwargs: Any,
) -> dict[str, float]:
    """Score one response; many can be scored at once.

    Args:
        data_source: the row's; unused.
        solution_str: the response's text, the input of the check.
        ground_truth: the argument of the check.
        extra_info: the row's; unused.
        check: a Python file, which sees the standard library and nothing else.
        pause_s: seconds that the process sleeps first, to stand for a slow check.
        cpu_s, memory_mb, timeout_s: ``Limits`` of the process.
        kwargs: what verl adds when a reward model is configured; unused.

    Returns:
        ``score``, the same as ``acc``, and ``over_limit``: 1.0 for a response that reached a limit, whose score is 0.
        (If that were an error, the sample would be masked, and a response could choose to be.)

    Raises:
        SandboxError: the check did not start, failed, or printed no score.
    """
    limits = Limits(cpu_s, memory_mb, timeout_s)
    command = [*_paused(pause_s), sys.executable, "-I", "-S", str(check), ground_truth]
    try:
        ended = await run_limited(command, solution_str.encode(errors="replace"), limits)
    except OSError as error:
        raise SandboxError(f"sandbox did not start for {Path(check).name}: {error}") from error
    score = 0.0 if ended.over else _score_of(ended, Path(check).name)
    return {"score": score, "acc": score, "over_limit": float(ended.over is not None)}


def _paused(pause_s: float) -> Sequence[str]:
    """What sleeps, and then becomes the command behind it: a shell, which is smaller than an idle Python."""
    return ("/bin/sh", "-c", 'sleep "$0" && exec "$@"', f"{pause_s:g}") if pause_s else ()


def _score_of(ended: Ended, check: str) -> float:
    if ended.status:
        raise SandboxError(f"sandbox check {check} ended with {ended.how}: {ended.last_line or 'it printed nothing'}")
    try:
        return float(ended.last_line)
    except ValueError:
        raise SandboxError(f"sandbox check {check} printed {ended.last_line[:80]!r}: want a score, a number") from None
