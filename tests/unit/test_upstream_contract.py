"""verl and vLLM still have everything that ``upstream_contract.py`` lists, and it lists everything that we use.

CI checks one pair of releases, ``run_scripts/test_gpu_pins.sh`` the GPU's. A failure names the file of ours that leans on
what is missing. The ``test_table_has_every_...`` tests fail where we import, override or patch what the table lacks.
"""

import ast
import importlib
import inspect
import re
import runpy
import textwrap
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.usefixtures("no_garbage")

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "recipe").rglob("*.py"), *(ROOT / "verl_ext").rglob("*.py")])
MEASURES = [path for folder in ("bench", "chaos", "studies") for path in (ROOT / "tests" / folder).rglob("*.py")]
CONTRACT = runpy.run_path(str(Path(__file__).with_name("upstream_contract.py")))["CONTRACT"]
UPSTREAM = ("verl", "vllm")


# -- reading upstream and ourselves ------------------------------------------------------------------------------------


@cache
def found(owner):
    """The module, or the object ``module:Name``; a Ray actor's class is looked through."""
    module, _, name = owner.partition(":")
    thing = importlib.import_module(module)
    thing = getattr(thing, name) if name else thing
    return getattr(getattr(thing, "__ray_metadata__", None), "modified_class", thing)


@cache
def assigned(owner):
    """Names that the methods of a class, or of its bases, assign on ``self``."""
    sources = [inspect.getsource(base) for base in owner.__mro__ if base.__module__.split(".")[0] in UPSTREAM]
    trees = [ast.parse(textwrap.dedent(source)) for source in sources]
    stores = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {n.attr for n in stores if isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == "self"}


def has(owner, name):
    """Whether ``owner`` has it as a member, a field, or an attribute that it gives its instances."""
    if hasattr(owner, name):
        return True
    if not inspect.isclass(owner):
        return False
    return any(name in getattr(base, "__annotations__", {}) for base in owner.__mro__) or name in assigned(owner)


def parameters(function):
    """Of a function or, as its instances are called, of a method; without what ``ray.remote`` adds to a class."""
    taken = [p for p in inspect.signature(function).parameters.values() if not p.name.startswith("_ray_")]
    return taken[1:] if taken and taken[0].name in ("self", "cls") else taken


def refusal(function, passed):
    """Why ``function`` cannot be called with ``passed`` (as in ``Uses.calls``), or None."""
    taken = parameters(function)
    by_position, _, by_name = (passed if "*" in passed else f"{passed}*").partition("*")
    by_position, by_name = re.findall(r"\w+", by_position), re.findall(r"\w+", by_name)
    ordered = [p.name for p in taken if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if ordered[: len(by_position)] != by_position:
        return f"takes ({', '.join(ordered)}) by position, not ({', '.join(by_position)})"
    known = {p.name for p in taken if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    # What goes through **kwargs must be looked for there by its name.
    keywords = any(p.kind is p.VAR_KEYWORD for p in taken)
    gone = [name for name in by_name if name not in known and not (keywords and name in source_of(function))]
    if gone:
        return f"takes no {', '.join(gone)}"
    required = [p.name for p in taken if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = set(required) - set(by_position) - set(by_name)
    return f"also requires {', '.join(sorted(missing))}" if missing else None


def is_async(function):
    """Also of a generator, which verl's abstract methods declare without a ``yield``."""
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def source_of(function):
    """Of its whole module, where its ``**kwargs`` end."""
    return inspect.getsource(inspect.getmodule(function))


def names(uses):
    return [*uses.has.split(), *uses.calls, *uses.reads.split()]


def our_modules():
    """Those that import verl or vLLM, imported."""
    for path in SOURCES:
        if path.stem != "__main__" and re.search(rf"^(from|import) ({'|'.join(UPSTREAM)})\b", path.read_text(), re.M):
            yield importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def overrides():
    """(our class, upstream's class, name) of every member that one of our classes replaces."""
    for module in our_modules():
        for cls in vars(module).values():
            if not inspect.isclass(cls) or cls.__module__ != module.__name__:
                continue
            for name in vars(cls):
                bases = [base for base in cls.__mro__[1:] if base.__module__.split(".")[0] in UPSTREAM]
                base = next((base for base in bases if name in vars(base)), None)
                if base is not None and name != "_abc_impl" and (not name.startswith("__") or name == "__init__"):
                    yield cls, base, name


def imports(path):
    """(module, name or None, alias) of every import of verl and vLLM in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UPSTREAM:
            yield from ((node.module, alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            named = [alias for alias in node.names if alias.name.split(".")[0] in UPSTREAM]
            yield from ((alias.name, None, alias.asname or alias.name) for alias in named)


@pytest.fixture(scope="module")
def listed():
    """Every object that the table names, by identity."""
    objects = [found(uses.owner) for uses in CONTRACT]
    return [*objects, *(getattr(found(u.owner), name, None) for u in CONTRACT for name in (*u.has.split(), *u.calls))]


# -- upstream still has it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uses", CONTRACT, ids=str)
def test_upstream_has_what_we_take(uses):
    owner = found(uses.owner)
    wrong = [f"{name} is gone" for name in uses.has.split() if not has(owner, name)]
    for name, passed in uses.calls.items():
        function = getattr(owner, name, None)
        reason = "is gone" if function is None else refusal(function, passed)
        wrong += [f"{name} {reason}"] if reason else []
    source = inspect.getsource(owner) if uses.reads else ""
    wrong += [f"{name} is no longer read" for name in uses.reads.split() if name not in source]
    assert not wrong, f"{uses.owner}, used in {uses.by.replace(' ', '.py, ')}.py: {'; '.join(wrong)}"


OVERRIDES = list(overrides())
MADE_BY_US = ("TaskRunner",)
"""classes whose constructors verl never calls"""


@pytest.mark.parametrize("cls, base, name", OVERRIDES, ids=lambda value: getattr(value, "__name__", value))
def test_override_accepts_every_call_of_what_it_replaces(cls, base, name):
    mine, theirs = inspect.getattr_static(cls, name), inspect.getattr_static(base, name)
    if isinstance(theirs, property) or not callable(getattr(base, name)):
        assert isinstance(mine, property) == isinstance(theirs, property), f"{cls.__name__}.{name}"
        return
    mine, theirs = getattr(cls, name), getattr(base, name)
    assert is_async(mine) == is_async(theirs), f"{cls.__name__}.{name}"
    taken = parameters(mine)
    kinds = {p.kind for p in taken}
    accepted = {p.name for p in taken}
    rest, keywords = inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds
    for p in parameters(theirs):
        variadic = {p.VAR_POSITIONAL: rest, p.VAR_KEYWORD: keywords}
        fits = variadic.get(p.kind, p.name in accepted or keywords)
        assert fits, f"{cls.__module__}: {cls.__name__}.{name} does not take {p.name} as {base.__name__}'s does"
    if name == "__init__" and cls.__name__ in MADE_BY_US:
        return
    theirs_required = {p.name for p in parameters(theirs) if p.default is p.empty}
    for p in taken:
        added = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        assert not added or p.name in theirs_required, f"{cls.__module__}: {cls.__name__}.{name} requires {p.name}"


# -- the table is whole, and no longer than it must be ---------------------------------------------------------------------


@pytest.mark.parametrize("uses", CONTRACT, ids=str)
def test_what_is_listed_is_used(uses):
    texts = [path.read_text() for path in [*SOURCES, *MEASURES] if path.stem in uses.by.split()]
    assert len(texts) >= len(uses.by.split()), f"{uses.by}: no such file"
    unused = [name for name in names(uses) if not any(re.search(rf"\b{name}\b", text) for text in texts)]
    assert not unused, f"{uses.owner}: {unused} not found in {uses.by}"


def test_each_owner_is_listed_once():
    owners = [uses.owner for uses in CONTRACT]
    assert sorted(owners) == sorted(set(owners))


@pytest.mark.parametrize("path", [p for p in SOURCES if any(imports(p))], ids=lambda path: path.stem)
def test_table_has_every_import(path, listed):
    tree = ast.parse(path.read_text())
    for module, name, alias in imports(path):
        thing = importlib.import_module(module)
        if name is not None:
            thing = getattr(thing, name, None) or importlib.import_module(f"{module}.{name}")
        if not isinstance(thing, ModuleType):
            thing = getattr(getattr(thing, "__ray_metadata__", None), "modified_class", thing)
            assert any(thing is one for one in listed), f"{path.stem}.py imports {module}.{name}: list it in CONTRACT"
            continue
        taken = [
            node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == alias
        ]
        known = {member for uses in CONTRACT if found(uses.owner) is thing for member in names(uses)}
        assert set(taken) <= known, (
            f"{path.stem}.py uses {sorted(set(taken) - known)} of {thing.__name__}: list it in CONTRACT"
        )


@pytest.mark.parametrize("cls, base, name", OVERRIDES, ids=lambda value: getattr(value, "__name__", value))
def test_table_has_every_override(cls, base, name):
    known = {
        member
        for u in CONTRACT
        if inspect.isclass(found(u.owner)) and issubclass(found(u.owner), base)
        for member in names(u)
    }
    assert name in known, (
        f"{cls.__module__}: {cls.__name__} overrides {base.__module__}:{base.__name__}.{name}: list it in CONTRACT"
    )


def test_table_has_every_module_that_is_named_in_a_string():
    # The last needs megatron-core: tests/integration/test_megatron.py, nightly.
    modules = {uses.owner.partition(":")[0] for uses in CONTRACT} | {"verl.workers.engine.megatron.transformer_impl"}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                path_like = re.fullmatch(r"(verl|vllm)(\.\w+)+", node.value)
                assert not path_like or node.value in modules, f"{path.stem}.py names {node.value}: list it in CONTRACT"


def test_refusal_says_what_does_not_fit():
    def upstream(a, b, *, c, d=0, **rest):
        rest.pop("e")

    assert refusal(upstream, "a, b, *, c, e") is None
    assert refusal(upstream, "a, c") == "takes (a, b) by position, not (a, c)"
    nowhere = "no_such_" + "parameter"
    assert refusal(upstream, f"a, b, *, c, {nowhere}") == f"takes no {nowhere}"
    assert refusal(upstream, "a, *, c") == "also requires b"
