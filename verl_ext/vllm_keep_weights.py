"""Patch: vLLM's CPU linear layers keep the weight that they pack.

After loading, ``UnquantizedLinearMethod`` packs each weight for the CPU and throws the original away
(``remove_weight=True``). The first weight sync of RL then has nothing to load into. Kept, the weight is filled by the
sync and packed again by ``process_weights_after_loading``, which verl calls afterwards.
"""

import functools

import wrapt

from verl_ext.guard import require_tested_pair

_TARGET = "vllm.model_executor.layers.utils"


def _patch(module) -> None:
    original = module.dispatch_cpu_unquantized_gemm
    if getattr(original, "_keeps_weight", False):
        return

    @functools.wraps(original)
    def dispatch_cpu_unquantized_gemm(layer, remove_weight: bool) -> None:
        original(layer, remove_weight=False)

    dispatch_cpu_unquantized_gemm._keeps_weight = True  # type: ignore[attr-defined]
    module.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def install() -> None:
    require_tested_pair("vllm_keep_weights")
    wrapt.register_post_import_hook(_patch, _TARGET)
