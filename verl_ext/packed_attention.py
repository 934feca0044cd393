"""Attention of packed rows without flash-attn, registered with transformers as ``packed``.

verl packs a micro-batch's sequences into one row (``use_remove_padding=True``). With torch's own attention,
transformers separates them by a mask whose size is the square of the row's tokens, 1 GiB for 32k. Here each sequence
attends within itself: on CUDA in half precision by torch's kernel for packed rows (``varlen_attn``), elsewhere one
sequence after another. It may go when transformers' ``sdpa`` does so.

By default verl asks transformers for flash-attn. No extra of this project installs that, because it is compiled against
the machine's own torch and CUDA. For a critic verl asks for it whatever the critic's config names. ``build_critics``
mends this; it may go when ``load_valuehead_model`` reads the config's attention.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakIdKeyDictionary

from verl_ext.guard import around, installed

NAME = "packed"
"""``attn_implementation`` of a model that is trained so"""
FLASH = "flash_attention_2"
"""verl's default"""
PADDED = "sdpa"
"""torch's own attention, where nothing is packed"""
INSTALL = "pip install flash-attn --no-build-isolation"
"""compiles for a long time; docs/gpu.md has a wheel that fits the ``gpu`` extra"""
_REMEDY = "set override_config.attn_implementation=sdpa and use_remove_padding=False"
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""argument with which ``varlen_attn`` takes fewer heads of keys than of queries; torch 2.11 does so without it"""
Row = tuple[list[int], torch.Tensor]
"""lengths of a packed row's sequences, and their bounds (int32 [sequences + 1])"""
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""query, key and value [1, heads, tokens, size]"""
_rows: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""results of ``row_of`` by position ids, whose tensor all layers of a pass share"""


def row_of(positions: torch.Tensor) -> Row:
    """The sequences of a row, given its position ids [1, tokens]."""
    if positions not in _rows:
        flat = positions[0]
        starts = torch.ones_like(flat, dtype=torch.bool)
        starts[1:] = flat[1:] != flat[:-1] + 1
        bounds = torch.cat([starts.nonzero()[:, 0], flat.new_tensor([len(flat)])])
        _rows[positions] = bounds.diff().tolist(), bounds.int()
    return _rows[positions]


def _in_one_kernel(heads: Heads, row: Row, scale: float, window: int | None) -> torch.Tensor:
    """Attend with torch's kernel for packed rows, on CUDA in half precision; return [tokens, heads, size]."""
    lengths, bounds = row
    query, key, value = (each[0].transpose(0, 1) for each in heads)
    left = -1 if window is None else window - 1
    longest = max(lengths)
    attended: Any = varlen_attn(
        query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=(left, 0), **_GROUPED
    )
    return attended


def _one_by_one(heads: Heads, row: Row, scale: float, window: int | None) -> torch.Tensor:
    """Attend within one sequence after the other; return [tokens, heads, size]."""
    results = []
    for q, k, v in zip(*(each.split(row[0], dim=2) for each in heads), strict=True):
        mask = None
        if window is not None and q.shape[2] > window:
            mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril().triu(1 - window)
        results.append(
            scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True)
        )
    return torch.cat(results, dim=2)[0].transpose(0, 1)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: [1, tokens, heads, size] of query, key and value [1, heads, tokens, size].

    Keys and values may have fewer heads. ``scaling`` of the products defaults to size ** -.5. ``sliding_window`` is the
    most tokens that a token attends to, itself included.

    Raises:
        NotImplementedError: the model needs more than causal attention within the sequences of one packed row.
    """
    if position_ids is None or position_ids.shape[0] != 1 or query.shape[0] != 1 or attention_mask is not None:
        raise NotImplementedError(f"attention '{NAME}' takes one packed row with its position ids: {_REMEDY}")
    if not getattr(module, "is_causal", True):
        raise NotImplementedError(f"attention '{NAME}' is causal only, and the model needs another: {_REMEDY}")
    for name, option in (("dropout", dropout or None), *((name, others.get(name)) for name in ("softcap", "s_aux"))):
        if option is not None:
            raise NotImplementedError(
                f"the model asks for {name}, which attention '{NAME}' does not support: {_REMEDY}"
            )
    kernel = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    attended = _in_one_kernel if kernel else _one_by_one
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Some models take a view of it.
    return attended((query, key, value), row_of(position_ids), scale, sliding_window)[None].contiguous(), None


def register(module: Any) -> None:
    """Register ``attend`` with transformers; ``module`` is ``transformers.modeling_utils``."""
    module.AttentionInterface.register(NAME, attend)


def build_critics(module: Any) -> None:
    """Let ``module`` (``verl.utils.model``) build critics with another attention than flash-attn, as token classifiers.

    Without this patch verl's FSDP engine cannot build such a critic, and blames a missing trl.
    """

    @around(module, "load_valuehead_model")
    def load_valuehead_model(
        verls: Any, local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool
    ) -> Any:
        from transformers import AutoModelForTokenClassification

        attention = model_config._attn_implementation
        if attention in (None, FLASH):
            return verls(local_path, torch_dtype, model_config, trust_remote_code)
        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation=attention,
            trust_remote_code=trust_remote_code,
        )


def flash_attn_problem() -> str | None:
    """Why flash-attn cannot be used here, or None."""
    # By its distribution: others bring modules of the same name.
    if installed("flash-attn") == "none":
        return "flash-attn is not installed"
    try:
        importlib.import_module("flash_attn")
    except Exception as error:
        # A build for another torch fails with whatever its loader says.
        return f"flash-attn does not import ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    return None
