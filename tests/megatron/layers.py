"""Megatron-Core's local layers under Transformer Engine's names of weights, so that mbridge's mappings hold without it.

``engine`` imports it when it builds an engine: it needs Megatron-Core.
"""

from itertools import pairwise

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # pyright: ignore[reportMissingImports]
from megatron.core.tensor_parallel.layers import ColumnParallelLinear  # pyright: ignore[reportMissingImports]
from megatron.core.transformer.dot_product_attention import DotProductAttention  # pyright: ignore[reportMissingImports]
from megatron.core.transformer.identity_op import IdentityOp  # pyright: ignore[reportMissingImports]
from torch.nn.functional import rms_norm, scaled_dot_product_attention


class PackedAttention(DotProductAttention):
    """Causal attention over padded rows ``[s, b, h, d]`` or packed ones ``[t, h, d]``, which Megatron's own refuses."""

    def forward(self, query, key, value, attention_mask=None, packed_seq_params=None, **_):
        groups = query.shape[-2] // key.shape[-2]
        key, value = (x.repeat_interleave(groups, -2) for x in (key, value))
        if packed_seq_params is None:
            return self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value))).permute(2, 0, 1, 3).flatten(2)
        ends = packed_seq_params.cu_seqlens_q_padded
        ends = (packed_seq_params.cu_seqlens_q if ends is None else ends).tolist()
        rows = (
            self._attend(*(x[start:end].transpose(0, 1) for x in (query, key, value))).transpose(0, 1)
            for start, end in pairwise(ends)
        )
        return torch.cat(list(rows)).flatten(1)

    def _attend(self, query, key, value):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.softmax_scale)


class RMSNorm(torch.nn.RMSNorm):
    """torch's, marked for sequence parallelism, which Megatron's wrapper of it refuses."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class NormedColumnParallelLinear(ColumnParallelLinear):
    """A norm in front of the linear layer, its weight named as in Transformer Engine's fused layer."""

    def __init__(self, input_size, output_size, *, config, **kwargs):
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._eps = config.layernorm_epsilon

    def forward(self, input_, *args, **kwargs):
        normed = rms_norm(input_, input_.shape[-1:], self.layer_norm_weight, self._eps)
        return super().forward(normed, *args, **kwargs)


def decoder_block_spec(config, use_transformer_engine=True, **kwargs):
    """As Megatron-Core's ``get_gpt_decoder_block_spec`` for a dense model with RMSNorm, made of the layers above."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **kwargs)
    for layer in spec.layer_specs:
        attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
        attention.core_attention = PackedAttention
        attention.q_layernorm = attention.k_layernorm = RMSNorm
        attention.linear_qkv = mlp.linear_fc1 = NormedColumnParallelLinear
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = IdentityOp
    spec.layer_norm = RMSNorm
    return spec
