"""Candidates against a collapse at a constant learning rate: stale samples that failed are pushed down less.

An arm's trainer imports it (verl's ``model.external_lib``). Each candidate works beside the trust region of the recipe.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CANDIDATE = "STUDY_CANDIDATE"
"""environment variable: a value of ``Candidate``"""
SAMPLE_BOUND = 0.02
"""nats a token: a sample that failed and has become less likely by more trains nothing

In runs that held at 3e-4 with staleness 8, ``rollout_corr/kl`` was below .007 in nine of ten steps, and below .03 in all.
"""
DUAL_CLIP = 3.0
"""verl's default of ``clip_ratio_c``"""


class Candidate(StrEnum):
    SAMPLE = "sample"
    """a sample with a negative advantage trains nothing if the mean of ``log(pi_behav / pi_theta)`` is above the bound"""
    AGE = "age"
    """a negative advantage has the weight ``1 / (1 + age)``"""
    DUAL = "dual"
    """a negative advantage trains nothing where ``pi_theta / pi_behav`` is above ``DUAL_CLIP``"""
    RATE = "rate"
    """the learning rate is divided by ``1 + staleness / 2`` of the batch"""


def kept(
    candidate: Candidate,
    *,
    current: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    age: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Return the share of each token's weight that a candidate keeps, 0 to 1, [B, R].

    Args:
        current, behaviour: [B, R] log-probs. advantages: [B, R]. mask: [B, R], above 0 where the model generated.
        age: [B, R] int, versions between a token and the weights before the update.
    """
    import torch
    from verl.utils.torch_functional import masked_mean

    less_likely = behaviour - current
    if candidate is Candidate.SAMPLE:
        dropped = masked_mean(less_likely, mask > 0, axis=-1)[:, None] > SAMPLE_BOUND
        share = 1 - dropped.to(behaviour.dtype).expand_as(behaviour)
    elif candidate is Candidate.AGE:
        share = 1 / (1 + age.clamp(min=0).to(behaviour.dtype))
    else:
        share = (less_likely.neg().exp() <= DUAL_CLIP).to(behaviour.dtype)
    return torch.where((advantages < 0) & (mask > 0), share, 1.0)


def weigh(ppo_loss: Callable[..., Any], candidate: Candidate, version_key: str) -> Callable[..., Any]:
    """Return ``ppo_loss`` with the behaviour weights of ``candidate``."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import no_padding_2_padding

    def loss(config: Any, model_output: dict[str, Any], data: Any, dp_group: Any = None) -> Any:
        names = ("response_mask", "rollout_log_probs", "rollout_versions", "advantages", "rollout_is_weights")
        padded = data.select(*names).to_padded_tensor()
        version: Any = tu.get_non_tensor_data(data, version_key, default=None)
        data["rollout_is_weights"] = padded["rollout_is_weights"] * kept(
            candidate,
            current=no_padding_2_padding(model_output["log_probs"], data).detach(),
            behaviour=padded["rollout_log_probs"],
            advantages=padded["advantages"],
            age=version - padded["rollout_versions"],
            mask=padded["response_mask"],
        )
        return ppo_loss(config=config, model_output=model_output, data=data, dp_group=dp_group)

    return loss


def slow_down(engine_class: Any, loss_module: Any) -> None:
    """Have each update divide its learning rate by ``1 + staleness / 2``, of the samples that the loss has seen since."""
    import torch
    from verl.utils import tensordict_utils as tu

    seen: list[torch.Tensor] = []
    plain, step = loss_module.ppo_loss, engine_class.optimizer_step

    def noted(config: Any, model_output: dict[str, Any], data: Any, dp_group: Any = None) -> Any:
        padded = data.select("response_mask", "rollout_versions").to_padded_tensor()
        version: Any = tu.get_non_tensor_data(data, loss_module.VERSION, default=None)
        ages = (version - padded["rollout_versions"]).masked_fill(padded["response_mask"] == 0, 0)
        seen.append(ages.amax(dim=1))
        return plain(config=config, model_output=model_output, data=data, dp_group=dp_group)

    def slower(self: Any) -> Any:
        staleness = torch.cat(seen).float().mean().item() if seen else 0.0
        seen.clear()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate / (1 + staleness / 2)
        try:
            return step(self)
        finally:
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    loss_module.ppo_loss, engine_class.optimizer_step = noted, slower


if CANDIDATE in os.environ:
    from recipe.partial_rollout.training import loss as recipes

    chosen = Candidate(os.environ[CANDIDATE])
    if chosen is Candidate.RATE:
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

        slow_down(FSDPEngine, recipes)
    else:
        recipes.ppo_loss = weigh(recipes.ppo_loss, chosen, recipes.VERSION)
