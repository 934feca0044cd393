"""The arms of the convergence study."""

from __future__ import annotations

from collections.abc import Sequence

from recipe.partial_rollout.study import Arm

BASELINE = "noPR"


def arms(staleness: Sequence[int], *, behaviour_clipping: bool = False) -> list[Arm]:
    """The baseline, then PR with correction and without at each bound.

    Spare groups in flight are as many as the bound allows (``overlap = max_staleness``), so that the bound is felt.

    Args:
        staleness: values of ``partial_rollout.max_staleness``.
        behaviour_clipping: also PPO that clips to the behaviour policy, AReaL's "naive PPO".
    """
    found = [Arm(BASELINE, ("partial_rollout.enable=False",))]
    for bound in staleness:
        sizes = (f"partial_rollout.max_staleness={bound}", f"partial_rollout.overlap={bound}")
        off = (*sizes, "partial_rollout.correction=none")
        found.append(Arm(f"corrected_{bound}", (*sizes, "partial_rollout.correction=decoupled")))
        found.append(Arm(f"uncorrected_{bound}", off))
        if behaviour_clipping:
            found.append(Arm(f"clipped_{bound}", (*off, "algorithm.rollout_correction.bypass_mode=True")))
    return found
