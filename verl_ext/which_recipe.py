"""Which ``recipe.partial_rollout`` Python imports: this distribution's, or another one of the same name.

verl's collection of recipes has a module at the same path. Python takes the first on ``sys.path``, and a Ray worker puts
the driver's working directory first, before ``PYTHONPATH``. Inside a verl checkout with its recipes, a driver can therefore
run one recipe and its workers the other. ``problem`` says so before anything starts.
"""

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

NAME = "recipe.partial_rollout"
OURS = Path(__file__).resolve().parents[1].joinpath(*NAME.split("."))
"""the recipe that is installed with this file"""


def imported_here() -> Path | None:
    """What this process imports as ``recipe.partial_rollout``; ``recipe`` itself where another package of that name hides
    it; None where there is neither.
    """
    try:
        spec = importlib.util.find_spec(NAME)
    except ModuleNotFoundError:
        return None
    if spec is None:
        # A namespace package has no file, and hides nothing.
        file = importlib.import_module("recipe").__file__
        return Path(file).resolve().parent if file else None
    places = spec.submodule_search_locations
    return Path(places[0] if places else str(spec.origin)).resolve()


def imported_by_workers() -> Path | None:
    """What a Ray worker on this machine imports, for a driver in this directory.

    A fresh interpreter answers, because this one may have imported its own.
    """
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    last = (done.stdout.splitlines() or [""])[-1]
    return Path(last) if done.returncode == 0 and last else None


def problem() -> str | None:
    """Why a training started here would not run this distribution's recipe, in one line, or None."""
    for who, place in (("this process", imported_here()), ("a Ray worker", imported_by_workers())):
        if place not in (None, OURS):
            name = NAME if place.name != "recipe" else "recipe"
            return f"{who} would import {name} from {place}, not from {OURS}: {_remedy(place)}"
    return None


def _remedy(place: Path) -> str:
    root = next((parent.parent for parent in (place, *place.parents) if parent.name == "recipe"), place.parent)
    if root == Path.cwd():
        return "start from another directory"
    if root in (Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry):
        return f"take {root} off PYTHONPATH"
    return f"take {root} off Python's search path"


if __name__ == "__main__":
    # As Ray does in its workers.
    sys.path.insert(0, os.getcwd())
    print(imported_here() or "")
