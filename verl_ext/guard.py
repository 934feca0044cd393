"""Functions that the patches share. They keep a patch from other releases, and from being made twice in a process."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import wrapt

VERL = "0.9.1"

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


RECIPE = "PARTIAL_ROLLOUT_RECIPE"
"""environment variable of the recipe's processes: ``enter_recipe`` sets it, their children and Ray workers inherit
it"""


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
    """Call ``patch(module)`` when ``module`` is imported; now, if it already is.

    A second call with the same two does nothing.
    """
    if (module, patch) not in _planned:
        wrapt.register_post_import_hook(patch, module)
        _planned.add((module, patch))


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function takes the place of ``owner.name``.

    It is called with the original, then the call's arguments.
    """

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
