"""Patch: without flash-attn, log-probs and entropy are exact to float32, and are computed by chunks of many tokens.

If flash-attn's cross-entropy is missing or switched off, verl computes log-probs one token after another, with several
operators for each. Its entropy makes copies larger than the logits, even in chunks, because autograd keeps every chunk.
Both have the precision of the logits (bfloat16: off by up to 0.05 nats) unless autocast raises it, as on CUDA. Here
both are in float32 with sums in float64, within 1e-6 of a float64 reference. The backward pass computes each chunk
again.

Peak memory beside the logits, for R token rows and a vocabulary of V, on an accelerator:

======== =================================================================================================================
forward  one chunk: ``BYTES`` x ``DEVICE_CHUNK`` = 1 GiB, for any R and V
backward one chunk, and a gradient in the logits' type (bfloat16: 2 x R x V bytes) for the log-probs, and a second one
         for the entropy if it is in the loss; any implementation needs these gradients
======== =================================================================================================================

verl's FSDP engine needs more memory: it copies unpacked logits into packed rows (2 x R x V bytes in bfloat16, and as
much for their gradient) and divides them by a temperature other than 1 (as much again).

The patch may go when verl's own log-probs without flash-attn are as exact and as quick.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

BYTES = 16
"""most bytes allocated for each element (one logit) of a chunk"""
DEVICE_CHUNK = 1 << 26
"""elements of a chunk on an accelerator: 441 rows of a vocabulary of 151,936, 2,048 of 32,768"""
CPU_CHUNK = 1 << 18
"""elements of a chunk on a CPU: few enough to stay in the cache, without which it is no faster than verl's loop"""


def _chunks(rows: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of ``rows`` rows of each tensor at a time."""
    return zip(*(each.split(rows) for each in tensors), strict=True)


def _columns(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two columns [N, 1] to fill, in float32, or in float64 where the logits are."""
    column = torch.empty_like(logits[:, :1], dtype=torch.promote_types(logits.dtype, torch.float32))
    return column, torch.empty_like(column)


class _LogProbs(torch.autograd.Function):
    """``logits[label] - logsumexp(logits)`` [N, 1] of logits [N, V] and labels [N, 1]."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, rows: int) -> torch.Tensor:
        log_probs, norms = _columns(logits)
        for chunk, label, result, norm in _chunks(rows, logits, labels, log_probs, norms):
            top = chunk.amax(-1, keepdim=True).to(norm.dtype)
            shifted = chunk - top
            chosen = shifted.gather(-1, label)
            log_total = shifted.exp_().sum(-1, keepdim=True, dtype=torch.float64).log_()
            result.copy_(chosen - log_total)
            norm.copy_(top + log_total)
        ctx.save_for_backward(logits, labels, norms)
        ctx.rows = rows
        return log_probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, labels, norms = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for chunk, label, norm, given, result in _chunks(ctx.rows, logits, labels, norms, upstream[0], gradient):
            share = (chunk - norm).exp_().mul_(-given)
            result.copy_(share.scatter_add_(-1, label, given))
        return gradient, None, None


class _Entropy(torch.autograd.Function):
    """Entropy [N, 1] of the softmax of logits [N, V], in nats."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, rows: int) -> torch.Tensor:
        entropy, norms = _columns(logits)
        for chunk, result, norm in _chunks(rows, logits, entropy, norms):
            top = chunk.amax(-1, keepdim=True).to(norm.dtype)
            shifted = chunk - top
            weight = shifted.exp()
            total = weight.sum(-1, keepdim=True, dtype=torch.float64)
            mean = weight.mul_(shifted).sum(-1, keepdim=True, dtype=torch.float64) / total
            log_total = total.log_()
            result.copy_(log_total - mean)
            norm.copy_(top + log_total)
        ctx.save_for_backward(logits, entropy, norms)
        ctx.rows = rows
        return entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, entropies, norms = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for chunk, entropy, norm, given, result in _chunks(ctx.rows, logits, entropies, norms, upstream[0], gradient):
            log_prob = chunk - norm
            share = log_prob.exp().mul_(-given)
            result.copy_(share.mul_(log_prob.add_(entropy)))
        return gradient, None


def _apply(function: Any, logits: torch.Tensor, *columns: torch.Tensor, most: int | None = None) -> torch.Tensor:
    """Apply ``function`` to ``logits`` [..., V] and ``columns`` [...], at most ``most`` rows a chunk; return [...]."""
    shape, vocabulary = logits.shape[:-1], logits.shape[-1]
    rows = max(1, (CPU_CHUNK if logits.device.type == "cpu" else DEVICE_CHUNK) // vocabulary)
    parts = (logits.reshape(-1, vocabulary), *(column.reshape(-1, 1) for column in columns))
    return function.apply(*parts, rows if most is None else min(rows, most)).view(shape)


# verl compiles the two functions below. Each number of chunks would then be a graph of its own, which costs a minute of an
# H200's update. ``torch.compile`` ignores ``disable`` as their decorator, so the function that they call is disabled.
_in_chunks: Any = torch.compiler.disable(_apply)


def log_probs_of_labels(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probs [...] in float32 of ``labels`` [...] under ``logits`` [..., V]; for verl's ``logprobs_from_logits_v2``."""
    return _in_chunks(_LogProbs, logits, labels)


def entropy_of_logits(logits: torch.Tensor, chunk_size: int | None = None) -> torch.Tensor:
    """Entropy [...] of ``logits`` [..., V], in float32, or in float64 where the logits are.

    It replaces verl's ``entropy_from_logits`` and ``entropy_from_logits_with_chunking``.

    ``chunk_size``: most rows of a chunk; None: only ``DEVICE_CHUNK`` or ``CPU_CHUNK`` limits them.
    """
    return _in_chunks(_Entropy, logits, most=chunk_size)


def patch(module: Any) -> None:
    """Replace verl's functions in ``module`` by those above. With flash-attn, verl keeps its own entropies."""
    module.logprobs_from_logits_v2 = log_probs_of_labels
    if not module.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
        module.entropy_from_logits = module.entropy_from_logits_with_chunking = entropy_of_logits
