"""Entry point ``vllm.general_plugins``: vLLM calls ``register`` in every one of its processes before a model loads."""

from verl_ext import vllm_preempted_ids, vllm_preemptions
from verl_ext.plugin import cpu_requested


def register() -> None:
    """Install the count of preemptions, and their report to workers; on the CPU platform its patches too."""
    vllm_preemptions.install()
    vllm_preempted_ids.install()
    if cpu_requested():
        from verl_ext import vllm_keep_weights

        vllm_keep_weights.install()
