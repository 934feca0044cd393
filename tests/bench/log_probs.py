"""Log-probs and entropy of ``verl_ext.chunked_log_probs`` and of verl's own: operators, memory, time and error.

verl's own are loaded a second time, without the patch.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
import verl.utils.torch_functional as in_force
from torch.profiler import ProfilerActivity, profile

BOUND = "Exit code 1 if a result of ours is off by more than 1e-5."
BOUND_ERROR = 1e-5
_SPEC: Any = importlib.util.spec_from_file_location("verls_own", in_force.__file__)
VERL = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(VERL)

Function = Callable[[torch.Tensor], torch.Tensor]
MAKERS: dict[str, Callable[[Any, torch.Tensor], Function]] = {
    "log-probs": lambda module, labels: lambda logits: module.logprobs_from_logits(logits, labels),
    "entropy": lambda module, labels: module.entropy_from_logits,
    "chunked entropy": lambda module, labels: module.entropy_from_logits_with_chunking,
}
"""of a module and labels, each function of logits that verl's engines call"""


def inputs(rows: int, vocabulary: int, dtype=torch.bfloat16, device="cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Standard normal logits and random labels."""
    torch.manual_seed(0)
    return torch.randn(rows, vocabulary, device=device).to(dtype), torch.randint(0, vocabulary, (rows,), device=device)


def exact(what: str, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """In float64."""
    log_probs = logits.double().log_softmax(-1)
    if what == "log-probs":
        return log_probs.gather(-1, labels[:, None])[:, 0]
    return -(log_probs.exp() * log_probs).sum(-1)


def error(what: str, module: Any, logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Largest difference from float64's result."""
    return (MAKERS[what](module, labels)(logits).double() - exact(what, logits, labels)).abs().max().item()


def gradient(function: Function, logits: torch.Tensor, upstream: torch.Tensor) -> Any:
    leaf = logits.detach().requires_grad_()
    (function(leaf) * upstream).sum().backward()
    return leaf.grad


def profiled(what: str, module: Any, logits: torch.Tensor, labels: torch.Tensor, backward=False) -> tuple[int, int]:
    """(operators, peak bytes allocated beside the logits)."""
    function = MAKERS[what](module, labels)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen, torch.set_grad_enabled(backward):
        if backward:
            gradient(function, logits, logits.new_ones(len(logits), dtype=torch.float32))
        else:
            function(logits)
    profiler: Any = seen.profiler
    events = profiler.kineto_results.events()
    held = peak = 0
    for event in sorted((each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return sum(each.name().startswith("aten::") for each in events), peak


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="rows of the logits")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[1024, 32768], help="columns of the logits")


def _seconds(device: str) -> float:
    """Of one thread's CPU, so that what else the machine does counts little; with a GPU of the clock."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def run(options: argparse.Namespace) -> int:
    """Print a line for each function, size and type; 1 if one of ours is coarse."""
    torch.set_num_threads(1)
    device, coarse = "cuda" if torch.cuda.is_available() else "cpu", 0
    for vocabulary in options.vocabularies:
        for dtype in (torch.float32, torch.bfloat16):
            logits, labels = inputs(options.tokens, vocabulary, dtype, device)
            upstream = logits.new_ones(options.tokens, dtype=torch.float32)
            for what in ("log-probs", "entropy"):
                for backward in (False, True):
                    for name, module in (("verl", VERL), ("ours", in_force)):
                        function, best = MAKERS[what](module, labels), float("inf")
                        operators, peak = profiled(what, module, logits, labels, backward)
                        for _ in range(3):
                            began = _seconds(device)
                            with torch.set_grad_enabled(backward):
                                gradient(function, logits, upstream) if backward else function(logits)
                            best = min(best, _seconds(device) - began)
                        off = error(what, module, logits, labels)
                        coarse += name == "ours" and off > BOUND_ERROR
                        print(
                            f"{what}, {vocabulary:,} x {dtype}, {'with gradients' if backward else 'forward'}, {name}: "
                            f"{operators:,} operators, {peak / 2**20:,.0f} MiB, {best * 1e3:,.0f} ms, error {off:.1e}"
                        )
    return int(coarse > 0)
