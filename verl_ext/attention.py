"""Which attention verl's models can be built with on this machine.

verl asks transformers for flash-attn unless told otherwise. No extra of this project brings it: it is compiled against the
machine's own torch and CUDA. Without it, torch's own attention (``sdpa``) serves.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version

FLASH = "flash_attention_2"
"""verl's default"""
FALLBACK = "sdpa"
INSTALL = "pip install flash-attn --no-build-isolation"
"""it compiles for long; docs/gpu.md has the wheel that verl takes for the ``gpu`` extra"""


def failure(flash_runs: bool) -> str | None:
    """Why no model can be built with the attention that the recipe gives models that name none, or None.

    Args:
        flash_runs: transformers refuses flash-attn where it sees no GPU, as in the build of a container image.
    """
    implementation = FLASH if flash_attn_problem() is None else FALLBACK
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
