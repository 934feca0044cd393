"""What this machine would do: a line each for versions, device, engine and surroundings, fine or with its remedy.

Exit code 1 if a line says FAIL: no run can start before its remedy is done. A note does not stop a run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from recipe.partial_rollout.preflight.inputs import INSTALL_GPU, PACKAGES, reach_hub
from recipe.partial_rollout.preflight.placement_check import CPUS_PER_TRAINER
from recipe.partial_rollout.tools.command_line import described
from recipe.partial_rollout.tools.host import (
    STATE,
    Finding,
    compiler,
    device,
    free_disk_gib,
    gpus,
    shared_memory,
    wants_gpu,
)
from recipe.partial_rollout.tools.memory import QWEN3
from recipe.partial_rollout.waits import one_line
from verl_ext import attention, check, command
from verl_ext.guard import GPU_PAIR, installed, installed_pair

_CHECKPOINT_GIB = {name: QWEN3[name].parameters * 4 * STATE / 2**30 for name in ("0.6B", "4B")}
"""in float32, with Adam's moments"""
_TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 512,
}
"""``config.json`` of a model of the recipes' kind, of which vLLM reads nothing else to plan its engine"""


def findings() -> Iterator[Finding]:
    """All of them, in the order in which they are mended."""
    found = gpus() if wants_gpu() else []
    yield versions()
    yield stack()
    if wants_gpu():
        yield device(found)
        yield compiler()
    else:
        yield Finding("device", "CPU" if os.environ.get("VERL_PLATFORM") else "no GPU: nvidia-smi is not found")
    yield flash_attention()
    yield from packages()
    yield engine()
    yield shared_memory()
    yield cpus(len(found))
    yield disk()
    yield hub()
    yield swanlab()


def versions() -> Finding:
    """The releases in place; ``stack`` refuses those that are no tested pair."""
    pair = installed_pair()
    said = f"verl {installed('verl')}, {pair}, transformers {installed('transformers')}, Ray {installed('ray')}"
    if wants_gpu() and pair != GPU_PAIR:
        return Finding("versions", said, f"for GPUs {GPU_PAIR} is tested; {INSTALL_GPU}", stops=True)
    return Finding("versions", f"{said}, Python {sys.version.split()[0]}")


def stack() -> Finding:
    """Whether all of it imports, fits together, and is of this distribution."""
    problem = check.failure()
    if problem is not None:
        return Finding("stack", problem, INSTALL_GPU if wants_gpu() else "bash run_scripts/setup.sh", stops=True)
    from verl.plugin.platform import get_platform

    return Finding("stack", f"imports; platform {get_platform().vendor_name}; {command.NAME} from {command.OURS}")


def flash_attention() -> Finding:
    """What the trainer's models are built with."""
    problem = attention.flash_attn_problem()
    said = attention.FLASH if problem is None else f"{attention.FALLBACK}, unpacked"
    if problem is None or not wants_gpu():
        return Finding("attention", said)
    return Finding("attention", f"{said}: {problem}", attention.INSTALL)


def packages() -> Iterator[Finding]:
    """What some configurations import, and others do not."""
    for module, key, value, brought_by in PACKAGES:
        need = f"{key.rpartition('.')[2]}={value} needs it"
        if find_spec(module) is not None:
            yield Finding(module, f"installed; {need}")
        elif wants_gpu() or brought_by != INSTALL_GPU:
            yield Finding(module, f"not installed; {need}", brought_by)
        else:
            yield Finding(module, f"not installed; {need}, on GPUs")


def engine() -> Finding:
    """Model runner and scheduler that vLLM itself chooses for a model of the recipes' kind."""
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs

        from recipe.partial_rollout.engine.replica import chosen_by

        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(_TINY))
            args = AsyncEngineArgs(
                model=directory, skip_tokenizer_init=True, max_model_len=128, distributed_executor_backend="mp"
            )
            chosen = chosen_by(args.create_engine_config())
    except Exception as error:
        return Finding("engine", "vLLM does not say what it would run", one_line(error))
    return Finding("engine", f"{chosen} (Qwen3, as vLLM decides here)")


def cpus(devices: int) -> Finding:
    """Whether Ray can place a trainer on every GPU."""
    have = os.cpu_count() or 1
    needed = CPUS_PER_TRAINER * devices + 1
    if have >= needed or not devices:
        return Finding("CPUs", f"{have}" + (f"; training on {devices} GPUs needs {needed} for Ray" if devices else ""))
    fit = (have - 1) // CPUS_PER_TRAINER
    remedy = f"{needed} CPUs" + (f", or train on {fit} (GPUS_PER_NODE={fit})" if fit else "")
    return Finding(
        "CPUs",
        f"{have}; Ray would wait for ever for those of {devices} GPU{'s' * (devices > 1)}",
        remedy,
        stops=not fit,
    )


def disk() -> Finding:
    """Room for checkpoints where runs write by default."""
    free = free_disk_gib(Path("outputs"))
    sizes = ", ".join(f"{gib:.0f} GiB for Qwen3-{name}" for name, gib in _CHECKPOINT_GIB.items())
    remedy = "" if free >= 3 * _CHECKPOINT_GIB["0.6B"] else "OUT=DIR on a larger disk, or trainer.save_freq=-1"
    return Finding("disk", f"{free:.0f} GiB free for outputs; a checkpoint takes {sizes}", remedy)


def hub() -> Finding:
    """Whether models and data can be fetched; the only request that the doctor sends."""
    try:
        reach_hub()
    except Exception as error:
        # The client raises what its transport raises.
        remedy = "local folders serve: MODEL=DIR, tools data --from DIR"
        return Finding("hub", f"not reached ({one_line(error)})", remedy)
    return Finding("hub", "answers")


def swanlab() -> Finding:
    """Where SwanLab would log."""
    from recipe.partial_rollout.training.swanlab_run import has_key

    return Finding("SwanLab", "a key: runs go to the cloud" if has_key() else "no key: runs go to the local board")


def main(arguments: list[str] | None = None) -> int:
    """Print a line a finding; the exit code of the module docstring."""
    argparse.ArgumentParser(
        **described(
            "doctor",
            "Say what this machine would do, and what it lacks.",
            "",
            more="Imports the whole stack, so it takes half a minute. Sends one request, to the model hub, unless "
            "HF_HUB_OFFLINE is set. Exit code: 0, or 1 if a line says FAIL.",
        )
    ).parse_args(arguments)
    # vLLM reads it when it is imported; its log would stand between the lines.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    stopped = False
    for finding in findings():
        print(finding, flush=True)
        stopped |= finding.stops
    return 1 if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
