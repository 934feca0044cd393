"""Patches that the pinned verl and vLLM need beyond their own registries. Each file says what it mends, and when it may go.

``plugin`` (entry point ``verl.plugins``) and ``vllm_plugin`` (``vllm.general_plugins``) list the patches, and load those of
the CPU only where ``VERL_PLATFORM=cpu``. Every patch names the versions it is tested on and refuses any other (``guard``).
``command`` is the console script. It lies here because another package can hide what is in ``recipe``.
"""
