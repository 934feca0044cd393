"""verl's FSDP engine on one device, and a batch as its worker hands it over: the update without a trainer around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.flops_counter import FlopsCounter
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, PolicyLossConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.padding import left_right_2_no_padding

from recipe.partial_rollout.training.loss import VERSION, ProximalPolicy, corrected_ppo_loss
from tests.gpu.training import Trace

PROMPT = 64
"""tokens of the trace task's prompts"""
_FLOAT32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def build_engine(model: Path, *, liger: bool, tiny: bool, micro_batch: int) -> Any:
    """An engine with packed rows; ``micro_batch``: tokens of one, at most."""
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=HFModelConfig(
            path=str(model),
            use_remove_padding=True,
            use_liger=liger,
            enable_gradient_checkpointing=not tiny,
            override_config={"attn_implementation": "packed"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            use_dynamic_bsz=True,
            max_token_len_per_gpu=micro_batch,
            infer_max_token_len_per_gpu=micro_batch,
            use_torch_compile=not tiny,
            entropy_from_logits_with_chunking=True,
            **({"dtype": "float32", "mixed_precision": _FLOAT32} if tiny else {}),
        ),
        optimizer_config=FSDPOptimizerConfig(lr=0.0, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def update_loss() -> Callable[..., Any]:
    """The recipe's loss as noPR has it: verl's."""
    actor = ActorConfig(
        strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, policy_loss=PolicyLossConfig(loss_mode="vanilla")
    )
    policy = ProximalPolicy(from_update=False, granularity=None, threshold=None)
    return partial(corrected_ppo_loss, actor, policy=policy)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of a step."""

    padded: dict[str, torch.Tensor]
    """prompts padded to the left, responses to the right"""
    lengths: list[int]
    """[row]: tokens of prompt and response"""
    micro_batch: int

    @classmethod
    def of(cls, task: Path, trace: Trace) -> Batch:
        """The first batch of the trace task in ``task``, of random tokens."""
        infos = pd.read_parquet(task / "data" / "train.parquet").extra_info[: trace.sizes.prompts]
        lengths = [PROMPT + int(info["response_budget"]) for info in infos for _ in range(trace.sizes.samples)]
        there = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(4, trace.vocabulary, there.shape, generator=generator) * there
        response = (len(lengths), max(lengths) - PROMPT)
        padded = {
            "prompts": ids[:, :PROMPT],
            "responses": ids[:, PROMPT:],
            "input_ids": ids,
            "attention_mask": there,
            "position_ids": (there.cumsum(-1) - 1).clamp(min=0),
            "response_mask": there[:, PROMPT:],
            "old_log_probs": torch.full(response, -5.0),
            "rollout_log_probs": torch.full(response, -5.0),
            "rollout_versions": torch.zeros(response, dtype=torch.long),
            "advantages": torch.ones(response),
        }
        return cls(padded, lengths, trace.sizes.micro_batch)

    def packed(self) -> TensorDict:
        """The rows on the device, without padding, as verl's worker hands them to its engine."""
        rows = TensorDict(dict(self.padded), batch_size=[len(self.lengths)]).to(get_device_id())
        packed = left_right_2_no_padding(rows)
        packed["temperature"] = torch.ones(len(self.lengths))
        how = {"calculate_entropy": False, "use_remove_padding": True, "use_dynamic_bsz": True}
        how |= {"use_fused_kernels": False, "max_token_len_per_gpu": self.micro_batch}
        tu.assign_non_tensor(packed, **how, global_batch_size=len(self.lengths), **{VERSION: 0})
        return packed

    def mfu(self, config: Any, seconds: float, *, backward: bool) -> float:
        """Share of the device's peak that a pass, or an update, reaches in ``seconds`` on a model of ``config``."""
        reached, peak = FlopsCounter(config).estimate_flops(self.lengths, seconds)
        return reached / peak * (1 if backward else 1 / 3)
