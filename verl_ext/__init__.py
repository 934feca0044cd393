"""What the pinned verl and vLLM need beyond their own registries; one file for each thing.

``plugin`` (entry point ``verl.plugins``) and ``vllm_plugin`` (``vllm.general_plugins``) load the CPU parts, and only
where ``VERL_PLATFORM=cpu``. Every patch names the version it is written for and refuses any other.
"""
