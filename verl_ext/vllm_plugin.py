"""Entry point ``vllm.general_plugins``: vLLM calls ``register`` in every one of its processes before a model loads."""

from verl_ext import vllm_preemptions
from verl_ext.guard import require_tested_pair, when_imported
from verl_ext.plugin import cpu_requested


def register() -> None:
    """Patch vLLM's scheduler, and on the CPU platform its layers."""
    vllm_preemptions.install()
    if cpu_requested():
        from verl_ext import cpu

        when_imported("vllm.model_executor.layers.utils", cpu.keep_weights, require_tested_pair)
