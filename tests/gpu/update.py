"""The update alone, without engine or Ray: verl's FSDP engine on packed rows, with and without ``use_liger``."""

from __future__ import annotations

import gc
import re
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tests.gpu.figures import Figures
from tests.gpu.pair import LONG_TAIL
from tests.gpu.training import TINY
from verl_ext.guard import enter_recipe

VARIANTS = {"packed": False, "packed, liger": True}
"""by name: verl's ``use_liger``"""
_KINDS = {
    "matrix products": re.compile(r"gemm|nvjet|cutlass|cublas|aten::(mm|addmm|bmm)\b", re.IGNORECASE),
    "attention": re.compile(r"flash|fmha|attn|attention", re.IGNORECASE),
}
"""of kernels, by their names; the rest is norms, rotary embeddings, activations, losses and the optimizer"""


def run(options: Namespace, figures: Figures) -> int:
    """Time each variant on one batch of the pair's lengths; a variant that fails is a figure too."""
    enter_recipe()
    import torch
    import torch.distributed as dist

    from tests.gpu.actor import Batch

    trace = TINY if options.tiny else LONG_TAIL
    task = trace.write(options.scratch)
    batch = Batch.of(task, trace)
    meeting = options.scratch / "rendezvous"
    meeting.unlink(missing_ok=True)
    dist.init_process_group("gloo" if options.tiny else "nccl", init_method=f"file://{meeting}", rank=0, world_size=1)
    try:
        for name, liger in VARIANTS.items():
            try:
                _measure(name, liger, batch, task / "model", options.tiny, figures)
            except Exception as error:
                figures.emit(variant=name, error=f"{type(error).__name__}: {error}"[:500])
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    finally:
        dist.destroy_process_group()
    return 0


def _measure(name: str, liger: bool, batch: Any, model: Path, tiny: bool, figures: Figures) -> None:
    import torch

    from tests.gpu.actor import build_engine, update_loss

    engine, loss = build_engine(model, liger=liger, tiny=tiny, micro_batch=batch.micro_batch), update_loss()
    config, optimizer = engine.model_config.hf_config, list[float]()
    engine.optimizer_step = _timed(engine.optimizer_step, optimizer)
    passes, updates = list[float](), list[float]()

    def emit(pass_s: float, update_s: float, optimizer_s: float, **more: Any) -> None:
        mfu = {"pass_mfu": batch.mfu(config, pass_s, backward=False)}
        mfu["update_mfu"] = batch.mfu(config, update_s, backward=True)
        seconds = {"pass_s": pass_s, "update_s": update_s, "optimizer_s": optimizer_s}
        figures.emit(variant=name, tokens=sum(batch.lengths), **seconds, **mfu, **more)

    for repeat in range(2 if tiny else 4):
        with engine.eval_mode():
            passes.append(_seconds(engine.infer_batch, batch.packed()))
        with engine.train_mode():
            updates.append(_seconds(engine.train_batch, batch.packed(), loss))
        emit(passes[-1], updates[-1], optimizer[-1], repeat=repeat)
    # The first repeat finds kernels and memory.
    medians = [median(seconds[1:]) for seconds in (passes, updates, optimizer)]
    gib = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    with engine.train_mode():
        shares = _kernel_shares(engine.train_batch, batch.packed(), loss)
    emit(*medians, median=True, kernel_shares=shares, gib=gib)


def _timed(work: Callable[[], Any], into: list[float]) -> Callable[[], Any]:
    """``work`` that notes its seconds."""

    def timed() -> Any:
        results: list[Any] = []
        into.append(_seconds(lambda: results.append(work())))
        return results[0]

    return timed


def _seconds(work: Callable[..., Any], *arguments: Any) -> float:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work(*arguments)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _kernel_shares(work: Callable[..., Any], *arguments: Any) -> dict[str, float]:
    """Shares of the time in kernels, by kind; on a CPU of the time in operators."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_device = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU]) as seen:
        _seconds(work, *arguments)
    spent = dict.fromkeys([*_KINDS, "rest"], 0.0)
    for event in seen.key_averages():
        kind = next((kind for kind, names in _KINDS.items() if names.search(event.key)), "rest")
        spent[kind] += event.self_device_time_total if on_device else event.self_cpu_time_total
    return {kind: round(each / sum(spent.values()), 3) for kind, each in spent.items()}
