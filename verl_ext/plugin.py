"""Entry point ``verl.plugins``: verl loads this module at ``import verl`` in every process.

Nothing happens unless the user asked for the CPU with ``VERL_PLATFORM=cpu``, so a GPU machine is untouched. verl logs a
plugin that fails to load at DEBUG and goes on; ``verl_ext.check`` and the recipe's start-up both look at the result.
"""

import os


def cpu_requested() -> bool:
    """Whether the user chose the CPU platform, by verl's own switch."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def install() -> None:
    """Register the CPU platform and the import hooks of the CPU patches. Safe to call twice."""
    from verl_ext import cpu_platform, fsdp_engine, gloo_backend, like_length_batches, vllm_version

    cpu_platform.register()
    vllm_version.install()
    gloo_backend.install()
    like_length_batches.install()
    fsdp_engine.install()


if cpu_requested():
    install()
