"""Entry point ``vllm.general_plugins``: vLLM calls ``register`` in every one of its processes before a model loads."""

from verl_ext import vllm_preemptions
from verl_ext.plugin import cpu_requested


def register() -> None:
    """Install the count of preemptions, and on the CPU platform its patches."""
    vllm_preemptions.install()
    if cpu_requested():
        from verl_ext import vllm_keep_weights

        vllm_keep_weights.install()
