"""Entry point ``verl.plugins``: verl loads this module at ``import verl`` in every process.

The CPU platform and its patches are installed only if the user asked for them with ``VERL_PLATFORM=cpu``; what every
platform needs (``install_everywhere``) is installed always. verl logs a plugin that fails to load at DEBUG and goes on;
``verl_ext.check`` and the recipe's start-up both look at the result.
"""

import os


def cpu_requested() -> bool:
    """Whether the user chose the CPU platform, by verl's own switch."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def install() -> None:
    """Register the CPU platform and the import hooks of the CPU patches. Safe to call twice."""
    from verl_ext import cpu_platform, fsdp_engine, gloo_backend, megatron_cpu, unpinned_reference, vllm_version

    cpu_platform.register()
    vllm_version.install()
    gloo_backend.install()
    fsdp_engine.install()
    megatron_cpu.install()
    unpinned_reference.install()


def install_everywhere() -> None:
    """Register the import hooks of the patches that have nothing to do with the platform. Safe to call twice."""
    from verl_ext import (
        chunked_log_probs,
        geometric_weights,
        like_length_batches,
        masked_weights,
        quick_weight_socket,
        reported_entropy,
        reward_workers,
        trained_rows,
        weight_socket,
    )

    like_length_batches.install()
    reward_workers.install()
    weight_socket.install()
    quick_weight_socket.install()
    geometric_weights.install()
    masked_weights.install()
    reported_entropy.install()
    trained_rows.install()
    chunked_log_probs.install()


if cpu_requested():
    install()
install_everywhere()
