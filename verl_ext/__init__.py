"""Patches that verl and vLLM need beyond their own registries. Each file says what it mends, and when it may go.

``plugin`` (entry point ``verl.plugins``) and ``vllm_plugin`` (``vllm.general_plugins``) list the patches, and load those of
the CPU only where ``VERL_PLATFORM=cpu``. Patches of verl are written for one release, and none is made to another
(``guard``). A patch of vLLM looks for the name or the argument that it is about.
``command`` is the console script. It lies here because another package can hide what is in ``recipe``.
"""
