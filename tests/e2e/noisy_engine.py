"""An engine whose log-probs differ from the trainer's as bfloat16's do: noise of 0.06 nats a token, a k3 of about 0.002.

``VERL_USE_EXTERNAL_MODULES=noisy_engine`` makes verl import this file, which must be on ``PYTHONPATH``, in every process.
The loss then sees the noise in the batch's behaviour log-probs, so weights and trust region do; tokens stay as sampled.
"""

from typing import Any

import torch
import wrapt

NATS = 0.06


def _disturb(module: Any) -> None:
    original = module.corrected_ppo_loss

    def corrected_ppo_loss(config, model_output, data, dp_group=None, region=None):
        data = data.clone(recurse=False)
        behaviour = data["rollout_log_probs"]
        noise = NATS * torch.randn_like(behaviour)
        data["rollout_log_probs"] = behaviour + noise
        return original(config=config, model_output=model_output, data=data, dp_group=dp_group, region=region)

    corrected_ppo_loss.__module__, corrected_ppo_loss.__qualname__ = original.__module__, original.__qualname__
    module.corrected_ppo_loss = corrected_ppo_loss


wrapt.register_post_import_hook(_disturb, "recipe.partial_rollout.training.loss")
