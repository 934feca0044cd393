"""Patch: one gloo backend where verl asks for two.

verl builds the backend string ``cpu:gloo,<device>:<backend>``; on the CPU platform it reads ``cpu:gloo,cpu:gloo``,
which torch refuses as a duplicate.
"""

import functools

import wrapt

from verl_ext.guard import VERL, require

_DUPLICATE = "cpu:gloo,cpu:gloo"


def _patch(module) -> None:
    original = module.init_process_group
    if getattr(original, "_merges_gloo", False):
        return

    @functools.wraps(original)
    def init_process_group(backend=None, *args, **kwargs):
        return original("gloo" if backend == _DUPLICATE else backend, *args, **kwargs)

    init_process_group._merges_gloo = True  # type: ignore[attr-defined]
    module.init_process_group = init_process_group


def install() -> None:
    require("verl", VERL, "gloo_backend")
    wrapt.register_post_import_hook(_patch, "torch.distributed")
