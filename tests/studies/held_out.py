"""How long a run takes to learn, by its rewards on held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence

QUALITY = 0.9
"""held-out reward that counts as learnt"""
WARM_UP = 2
"""steps whose seconds do not count: vLLM compiles in them, for noPR inside the timed rollout, for PR partly before it"""


def seconds_to(
    level: float, validated_at: Sequence[int], held_out: Sequence[float], step_s: Sequence[float]
) -> float | None:
    """Training seconds after the warm-up, without validations, until two in a row reach ``level``; None: never.

    One validation of 512 responses is off by 0.013 (a standard error), so a single one proves little.

    Args:
        level: a reward, such as ``QUALITY``.
        validated_at: [V] steps, the first is 1.
        held_out: [V] reward under the weights after each of them.
        step_s: [steps] seconds.
    """
    for first, second, step in zip(held_out, held_out[1:], validated_at, strict=False):
        if first >= level and second >= level:
            return float(sum(step_s[WARM_UP:step]))
    return None
