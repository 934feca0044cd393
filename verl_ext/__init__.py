"""What the pinned verl and vLLM need beyond their own registries; one file for each thing.

``plugin`` (entry point ``verl.plugins``) and ``vllm_plugin`` (``vllm.general_plugins``) load the CPU parts only where
``VERL_PLATFORM=cpu``; patches that every platform needs are always loaded. Every patch names the versions it is tested on
and refuses any other. ``check`` ends the set-up; ``attention`` says which attention models can be built with.

``command`` is the console script, and ``which_recipe`` tells this distribution's recipe from another of its name. Both lie
here because another package can hide what is in ``recipe``.
"""
