"""Patch: an update's forward pass reports the policy's entropy without a gradient.

verl's engine gives entropies with ``calculate_entropy`` only, and then for an entropy bonus: they have a gradient, whose
backward pass keeps one more tensor of [tokens, vocabulary] and runs over it, even with a coefficient of 0. Where a batch
says ``ASKED``, its micro-batches get the same numbers under ``torch.no_grad``, from the logits that are there anyway. It
may go when verl's engine reports entropies that no loss asks for.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

ASKED = "report_entropy"
"""non-tensor datum of a batch, bool"""
REPORTED = "reported_entropy"
"""the engine's output, shaped as its log-probs; missing where verl computes ``entropy`` itself"""


def patch(module: Any) -> None:
    """Have ``FSDPEngineWithLMHead`` report entropies where a batch asks for them."""
    engine = module.FSDPEngineWithLMHead
    original = engine.prepare_model_outputs
    from verl.utils import tensordict_utils as tu

    @functools.wraps(original)
    def prepare_model_outputs(self: Any, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any):
        made = original(self, output, output_args, micro_batch, logits_processor_func)
        if "entropy" not in made and tu.get_non_tensor_data(micro_batch, ASKED, default=False):
            entropy_only = micro_batch.copy()
            tu.assign_non_tensor(
                entropy_only, calculate_entropy=True, distillation_only=True, distillation_use_topk=False
            )
            with torch.no_grad():
                again = original(self, output, output_args, entropy_only, logits_processor_func)
            made[REPORTED] = again["entropy"]
        return made

    engine.prepare_model_outputs = prepare_model_outputs
