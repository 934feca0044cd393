"""verl and vLLM still have everything that ``upstream_contract.py`` lists: overridden, patched, reached by an actor.

Pyright sees the rest: what is imported from verl by name, and how it is called. CI checks each tested release of vLLM. A
failure names the file of ours that leans on what is missing, or what the table lacks.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from recipe.partial_rollout.preflight.vllm_contract import UPSTREAM, found, missing, parameters
from tests.unit.upstream_contract import CONTRACT

pytestmark = pytest.mark.usefixtures("no_garbage")

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "recipe").rglob("*.py"), *(ROOT / "verl_ext").rglob("*.py")])
MEASURES = [path for folder in ("bench", "chaos", "studies") for path in (ROOT / "tests" / folder).rglob("*.py")]
MADE_BY_US = ("TaskRunner", "PartialRolloutRayPPOTrainer", "PartialRolloutPPOTrainer")
"""classes whose constructors verl never calls"""


# -- reading upstream and ourselves ------------------------------------------------------------------------------------


def is_async(function):
    """Also of a generator, which verl's abstract methods declare without a ``yield``."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def names(uses):
    return [*uses.has, *uses.calls, *uses.reads]


def our_module_names():
    """Those that import verl or vLLM."""
    for path in SOURCES:
        if path.stem != "__main__" and re.search(rf"^(from|import) ({'|'.join(UPSTREAM)})\b", path.read_text(), re.M):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


def overrides(modules):
    """(our class, upstream's class, name) of every member that one of our classes replaces."""
    for module in modules:
        for cls in vars(module).values():
            if not inspect.isclass(cls) or cls.__module__ != module.__name__:
                continue
            bases = [base for base in cls.__mro__[1:] if base.__module__.split(".")[0] in UPSTREAM]
            # What stands before upstream's classes and is none of theirs replaces their members too.
            before = cls.__mro__[: cls.__mro__.index(bases[0])] if bases else ()
            own = [each for each in before if each is cls or not any(issubclass(each, base) for base in bases)]
            for name in dict.fromkeys(name for each in own for name in vars(each)):
                base = next((base for base in bases if name in vars(base)), None)
                if base is not None and name != "_abc_impl" and (not name.startswith("__") or name == "__init__"):
                    yield cls, base, name


def misfit(cls, base, name):
    """What an override does not take as the method that it replaces does, or requires beyond it; None if it fits."""
    mine, theirs = inspect.getattr_static(cls, name), inspect.getattr_static(base, name)
    if isinstance(theirs, property) or not callable(getattr(base, name)):
        return None if isinstance(mine, property) == isinstance(theirs, property) else "is a property in one of them"
    mine, theirs = getattr(cls, name), getattr(base, name)
    if is_async(mine) != is_async(theirs):
        return "is awaited in one of them"
    taken, given = parameters(mine), parameters(theirs)
    accepted, kinds = {p.name for p in taken}, {p.kind for p in taken}
    variadic = {kind: kind in kinds for kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)}
    keywords = variadic[inspect.Parameter.VAR_KEYWORD]
    refused = [p.name for p in given if not variadic.get(p.kind, p.name in accepted or keywords)]
    if refused or (name == "__init__" and cls.__name__ in MADE_BY_US):
        return f"does not take {refused}" if refused else None
    required = {p.name for p in taken if p.default is p.empty and p.kind not in variadic}
    added = required - {p.name for p in given if p.default is p.empty}
    return f"requires {added}" if added else None


def misfits(modules):
    """A line for each override of theirs that does not fit."""
    judged = ((cls, base, name, misfit(cls, base, name)) for cls, base, name in overrides(modules))
    return [f"{cls.__name__}.{name}, beside {base.__name__}'s, {wrong}" for cls, base, name, wrong in judged if wrong]


def test_upstream_has_what_we_take_and_we_take_what_is_listed():
    texts = [(path.stem, path.read_text()) for path in [*SOURCES, *MEASURES]]
    for uses in CONTRACT:
        used = "".join(text for stem, text in texts if stem in uses.by)
        unused = [f"{name} is not used" for name in names(uses) if not re.search(rf"\b{name}\b", used)]
        assert missing(uses) + unused == [], f"{uses.owner}, used in {uses.by}"


def test_override_accepts_every_call_of_what_it_replaces_and_is_listed():
    found_owners = [(found(uses.owner), names(uses)) for uses in CONTRACT]
    modules = list(map(importlib.import_module, our_module_names()))
    assert misfits(modules) == []
    for cls, base, name in overrides(modules):
        ours = f"{cls.__module__}: {cls.__name__}.{name}"
        listed = any(inspect.isclass(owner) and issubclass(owner, base) and name in its for owner, its in found_owners)
        assert listed, f"{ours} overrides {base.__module__}:{base.__name__}: list it in CONTRACT"


def test_table_has_every_module_that_is_named_in_a_string():
    modules = {uses.owner.partition(":")[0] for uses in CONTRACT}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                path_like = re.fullmatch(r"(verl|vllm)(\.\w+)+", node.value)
                assert not path_like or node.value in modules, f"{path.stem}.py names {node.value}: list it in CONTRACT"
