"""Console script ``partial-rollout``: trains, or runs a tool, with the recipe of this distribution and no other.

verl's collection of recipes has a module at the same path. Python takes the first on ``sys.path``, and a Ray worker
puts the driver's working directory first, before ``PYTHONPATH``. Inside a verl checkout with its recipes, a driver can
therefore run one recipe and its workers the other, and so for verl itself; ``foreign_recipe`` says so before anything
starts. This file lies outside ``recipe``, where no package of another distribution can hide it.

    partial-rollout train --config-name own_job actor_rollout_ref.model.path=... data.train_files=... --check
    partial-rollout tools report outputs/quickstart/noPR outputs/quickstart/PR
"""

import argparse
import importlib
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from verl_ext.guard import cpu_requested

NAME = "recipe.partial_rollout"
OURS = Path(__file__).resolve().parents[1].joinpath(*NAME.split("."))
"""the recipe that is installed with this file"""
COMMANDS = {
    "train": "train your model on your data, with verl's hydra overrides; --check only checks",
    "check": "say what this machine lacks; for a run: train --check",
    "tools": "report, audit and plan runs, write data, list keys",
}
_EXAMPLES = """

examples:
  partial-rollout train --config-name own_job actor_rollout_ref.model.path=... data.train_files=... --check
  partial-rollout tools report outputs/own_job/nopr outputs/own_job/pr
  partial-rollout tools keys"""
_IMPORTED = ("verl", "verl_ext", "vllm", "ray", "torch", "transformers", "datasets", "tensordict", "hydra", "omegaconf")
"""packages that a Ray worker imports, and that a file or folder of the working directory may hide"""
_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""device files of the drivers of NVIDIA, AMD and WSL"""
_NO_VARIABLE = "trainer.device=cpu: needs VERL_PLATFORM=cpu in the environment; source run_scripts/env_cpu.sh"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code, or 2 if another recipe of the same name would run in its place."""
    parser = argparse.ArgumentParser(
        prog="partial-rollout",
        description="Partial rollout for verl, from any directory.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n" + "\n".join(f"  {name:<6}  {what}" for name, what in COMMANDS.items()) + _EXAMPLES,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="its own options: COMMAND --help")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="options of the command")
    chosen = parser.parse_args(arguments)
    problem = foreign_recipe()
    if problem is not None:
        print(f"partial-rollout: error: {problem}", file=sys.stderr)
        return 2
    if chosen.command != "train":
        rest = chosen.rest if chosen.command == "tools" else ["check", *chosen.rest]
        return importlib.import_module(f"{NAME}.tools.__main__").main(rest)
    # verl warns five times that a critic nobody asked for is off. PYTHONWARNINGS and -W still choose.
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        os.environ["PYTHONWARNINGS"] = "ignore"
    # Hydra reads its overrides from there.
    sys.argv[1:] = chosen.rest
    importlib.import_module(f"{NAME}.main_ppo").main()
    return 0


def foreign_recipe() -> str | None:
    """Why a training started here would not run this distribution's recipe and the installed packages, in one line.

    None if it would.
    """
    # Ray puts the working directory first in its workers.
    for who, place in (("this process", imported_here()), ("a Ray worker", imported_here([os.getcwd()]))):
        if place not in (None, OURS):
            name = NAME if place.name != "recipe" else "recipe"
            return (
                f"{who} would import {name} from {place}, not from {OURS}: "
                "start from another directory, or remove the former from PYTHONPATH"
            )
    for name in _IMPORTED:
        theirs, ours = (PathFinder.find_spec(name, [*first, *sys.path]) for first in ([os.getcwd()], []))
        if theirs and ours and theirs.origin != ours.origin:
            where = f"{name} from {theirs.origin}, not from {ours.origin}"
            return f"a Ray worker would import {where}: start from another directory"
    return None


def no_device(device: str, cluster: str | None) -> str | None:
    """Why no training on ``device`` can start from this process, in one line, or None.

    Args:
        device: ``trainer.device``.
        cluster: Ray's address, if the run joins a cluster, whose devices cannot be seen from here.
    """
    if device == "cpu":
        return None if cpu_requested() else _NO_VARIABLE
    if cpu_requested():
        return f"trainer.device={device}: must be cpu, because the environment has VERL_PLATFORM=cpu; add platform=cpu"
    there = shutil.which("nvidia-smi") or any(map(os.path.exists, _DEVICES))
    if device == "cuda" and not (there or cluster or os.environ.get("RAY_ADDRESS")):
        return (
            "trainer.device=cuda: needs a GPU on this machine, or RAY_ADDRESS of a cluster with GPUs; to train on the CPU: "
            "source run_scripts/env_cpu.sh, and add platform=cpu"
        )
    return None


def imported_here(first: Sequence[str] = ()) -> Path | None:
    """Return the folder that this process would import as ``recipe.partial_rollout``; nothing is imported.

    If another package ``recipe`` hides ours, return the folder of that package. Return None if neither is found.

    Args:
        first: folders that are searched before ``sys.path``.
    """
    parent = PathFinder.find_spec("recipe", [*first, *sys.path])
    if parent is None:
        return None
    spec = PathFinder.find_spec(NAME, list(parent.submodule_search_locations or ()))
    if spec is None:
        # A namespace package has no file, and hides nothing.
        return Path(parent.origin).resolve().parent if parent.origin else None
    places = spec.submodule_search_locations
    return Path(places[0] if places else str(spec.origin)).resolve()


if __name__ == "__main__":
    sys.exit(main())
