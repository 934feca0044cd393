"""How an engine fares without each replacement of ``tests.megatron``: ``python megatron_without.py MODEL OUT``.

Each is left out in a forked process of one rank, since importing takes longer than the trial. ``OUT/<name>.txt`` holds the
largest difference of ``megatron_rank.trial``, or the error.
"""

import os
import sys
from pathlib import Path

import megatron_rank
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from verl.workers.engine.megatron.transformer_impl import MegatronEngine

from tests.megatron import engine, layers
from verl_ext import cpu

NAMES = {
    "nothing": (torch.cuda, "is_available"),
    **{f"torch.cuda.{name}": (torch.cuda, name) for name in engine._CALLED},
    "_get_cuda_rng_state": (random, "_get_cuda_rng_state"),
}
UPSTREAM = {name: (*place, getattr(*place)) for name, place in NAMES.items()} | {
    "PackedAttention": (layers, "PackedAttention", DotProductAttention),
    "NormedColumnParallelLinear": (layers, "NormedColumnParallelLinear", ColumnParallelLinear),
    "decoder_block_spec": (engine, "_replace_layers", lambda: None),
    "initialize": (engine.OnTheCPU, "initialize", cpu.CPUThreads.initialize),
    "load_checkpoint": (engine.OnTheCPU, "load_checkpoint", MegatronEngine.load_checkpoint),
    "steps": (engine.OnTheCPU, "load_checkpoint", torch.no_grad()(MegatronEngine.load_checkpoint)),
}
"""by what is left out: object, name, and what is there without it"""
CALLS = {
    "Tensor.cuda": lambda func, kwargs: func is torch.Tensor.cuda,
    "Tensor.type": lambda func, kwargs: func is torch.Tensor.type,
    "device=cuda": lambda func, kwargs: "cuda" in str(kwargs.get("device")),
}
"""by what is left out: the calls that the mode then leaves as they are"""


def leave_out(name):
    replaces = engine.CUDAIsTheCPU.__torch_function__

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return func(*args, **kwargs) if CALLS[name](func, kwargs) else replaces(self, func, types, args, kwargs)

    if name in CALLS:
        engine.CUDAIsTheCPU.__torch_function__ = __torch_function__
    engine._replace_cuda()
    if name in UPSTREAM:
        setattr(*UPSTREAM[name])


def outcome(name, model, out):
    dist.init_process_group("gloo", init_method=f"file://{out}/{name}.store", rank=0, world_size=1)
    try:
        leave_out(name)
        return max(megatron_rank.trial("language_model", model, 1, 1, f"{out}/{name}").values())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(model, out):
    for name in (*UPSTREAM, *CALLS):
        if (child := os.fork()) == 0:
            Path(out, f"{name}.txt").write_text(str(outcome(name, model, out)))
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
