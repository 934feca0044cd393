"""Patch: a reward model in a pool of its own scores samples while they are rolled out.

verl's agent-loop workers read ``reward_extra_info`` from every answer of a reward worker. ``compute_score_disrm``, which
asks a classifier, leaves it out, and each sample fails with a KeyError. Here the answer has it, empty.
"""

import wrapt

from verl_ext.guard import VERL, require

_TARGET = "verl.experimental.reward_loop.reward_loop"


def _patch(module) -> None:
    original = module.RewardLoopWorker.compute_score_disrm
    if getattr(original, "_with_extra_info", False):
        return

    async def compute_score_disrm(self, data) -> dict:
        return {"reward_extra_info": {}, **await original(self, data)}

    compute_score_disrm._with_extra_info = True  # type: ignore[attr-defined]
    module.RewardLoopWorker.compute_score_disrm = compute_score_disrm


def install() -> None:
    require("verl", VERL, "pooled_reward_model")
    wrapt.register_post_import_hook(_patch, _TARGET)
