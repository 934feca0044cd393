"""One readable line per step; verl's full metrics go to the file and the tracker backends."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


class StepLine:
    """Prints a step's main figures above the progress bar.

    Args:
        total_steps: steps of the training.
        separate: whether engines decode while the trainer updates; it then waits for a batch, not for a rollout.
    """

    def __init__(self, total_steps: int, *, separate: bool = False) -> None:
        self._total = total_steps
        self._got = "wait" if separate else "rollout"

    def show(self, data: dict[str, Any], step: int) -> None:
        """Print step ``step`` of metrics ``data``; a validation without training metrics gets a line of its own."""
        if "training/global_step" not in data:
            scores = [f"{key.split('/', 1)[1]} {value:.3f}" for key, value in data.items() if "val-core" in key]
            tqdm.write(f"step {step:>3}  validation  {'  '.join(scores)}")
            return
        tqdm.write(self.line(data, step))

    def line(self, data: dict[str, Any], step: int) -> str:
        """The line itself."""

        def get(key: str) -> float:
            return float(data.get(key, float("nan")))

        rollout, total = get("timing_s/gen"), get("timing_s/step")
        parts = [
            f"step {step:>3}/{self._total}",
            f"reward {get('critic/score/mean'):.3f}",
            f"length {get('response_length/mean'):.0f}",
            f"{total:.1f} s = {self._got} {rollout:.1f} + train {total - rollout:.1f}",
            f"{get('partial_rollout/rollout/tokens_per_s'):,.0f} tok/s",
        ]
        if "partial_rollout/rollout/efficiency" in data:
            parts.append(f"efficiency {get('partial_rollout/rollout/efficiency'):.2f}")
        if "partial_rollout/staleness/mean" in data:
            parts.append(
                f"stale {get('partial_rollout/staleness/mean'):.2f} (max {get('partial_rollout/staleness/max'):.0f})"
            )
            parts.append(f"carried {get('partial_rollout/buffer/carried_groups'):.0f}")
        return " | ".join(parts)
