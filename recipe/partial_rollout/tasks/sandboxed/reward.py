"""A reward that runs a check in a process of its own for each response, as a sandbox for code does.

The check is a Python file: the response comes on its standard input, its argument is the path of a file with the ground
truth, and the last line that it prints is the score. ``clock10_check.py`` checks the embedded task. In the quick start::

    reward.custom_reward_function.path=pkg://recipe.partial_rollout.tasks.sandboxed.reward
    +reward.custom_reward_function.reward_kwargs.pause_s=1.5

The other ``reward_kwargs`` are ``check`` (a path) and the ``Limits``. Keep ``timeout_s`` below
``partial_rollout.deadlines.reward_s``: past that, the call itself is given up.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipe.partial_rollout.tasks.sandboxed.limited_process import Ended, Limits, SandboxError, run_limited

CLOCK10_CHECK = Path(__file__).with_name("clock10_check.py")
_DEFAULTS = Limits()


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
    processes: int = _DEFAULTS.processes,
    **kwargs: Any,
) -> dict[str, Any]:
    """Score one response; many can be scored at once.

    Args:
        data_source: the row's; unused.
        solution_str: the response's text, the input of the check.
        ground_truth: what the file holds that the check has as its argument.
        extra_info: the row's; unused.
        check: a Python file, which sees the standard library and nothing else.
        pause_s: seconds that the process sleeps first, to stand for a slow check.
        cpu_s, memory_mb, timeout_s, processes: ``Limits`` of the process and what it starts.
        kwargs: what verl adds when a reward model is configured; unused.

    Returns:
        ``score``, the same as ``acc``; ``over_limit``: 1.0 for a response that reached a limit, whose score is 0; and
        ``limit``, the name of that limit, or nothing. (If that were an error, the sample would be masked, and a response
        could choose to be.)

    Raises:
        SandboxError: the check did not start, failed, printed no score, was killed by another, such as the machine's
            out-of-memory killer, or ran out of time because the machine was busy.
    """
    name, limits = Path(check).name, Limits(cpu_s, memory_mb, timeout_s, processes)
    # In memory: no file to sweep, and an argument ends at 128 KiB.
    with os.fdopen(os.memfd_create("ground_truth"), "wb") as truth:
        truth.write(ground_truth.encode(errors="replace"))
        truth.flush()
        command = [*_paused(pause_s), sys.executable, "-I", "-S", str(check), f"/dev/fd/{truth.fileno()}"]
        try:
            ended = await run_limited(command, solution_str.encode(errors="replace"), limits, [truth.fileno()])
        except (OSError, SandboxError) as error:
            raise SandboxError(f"sandbox did not start for {name}: {error}") from error
    if ended.starved:
        raise SandboxError(
            f"sandbox check {name} had {ended.cpu_s:.1f} s of a core in timeout_s={timeout_s:g} and wanted more: the "
            f"machine is busy; lower partial_rollout.reward_concurrency, or raise timeout_s"
        )
    score = 0.0 if ended.over else _score_of(ended, name)
    return {"score": score, "acc": score, "over_limit": float(ended.over is not None), "limit": str(ended.over or "")}


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
