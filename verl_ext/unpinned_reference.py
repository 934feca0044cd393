"""Reference policies on the CPU: verl keeps their weights in pinned memory, which needs an accelerator.

A model that is never updated waits in the host's memory and goes to its device a layer at a time
(``FSDPEngine._build_fsdp_module``, ``CPUOffloadPolicy(pin_memory=True)``). Pinning makes that copy faster. Where host and
device are the same, torch refuses it.
"""

import wrapt

from verl_ext.guard import VERL, require

_TARGET = "verl.workers.engine.fsdp.transformer_impl"


def _unpin(module) -> None:
    policy = module.CPUOffloadPolicy

    def unpinned(pin_memory: bool = False):
        return policy(pin_memory=False)

    module.CPUOffloadPolicy = unpinned


def install() -> None:
    require("verl", VERL, "unpinned_reference")
    wrapt.register_post_import_hook(_unpin, _TARGET)
