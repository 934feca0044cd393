"""The rooms: what import-linter (pyproject.toml) cannot say, and which modules know Ray."""

import ast
import functools
from pathlib import Path

import grimp
import pytest

import recipe.partial_rollout as package

pytestmark = pytest.mark.usefixtures("no_garbage")

ROOT = Path(package.__file__).parent
KNOWS_RAY = {"manager.output_store", "waits", "main_ppo", "task_runner"}
"""besides the rooms of the driver, the workers and the engine's server"""


def imports(path):
    """Roots of all that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def modules(room):
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", ["manager", "checkpoint", "records", "planner"])
def test_pure_rooms_know_nothing_of_ray_torch_verl_or_vllm(room):
    for path in modules(room):
        allowed = {"asyncio", "ray"} if path.stem in ("actor", "condition", "output_store", "state_file") else set()
        found = imports(path) & {"ray", "asyncio", "torch", "verl", "vllm"}
        assert found <= allowed, path


def test_only_the_outer_rooms_import_ray():
    users = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules(".") if "ray" in imports(path)}
    inner = {name for name in users if name.split(".")[0] not in ("training", "rollout", "worker", "engine", "tools")}
    assert inner <= KNOWS_RAY


def longest_import_chain():
    """Modules of the longest chain in which each one imports the next when it is loaded.

    Counts the modules of the recipe and of verl_ext, not the ``__init__`` of a package, and no import for types alone.
    """
    graph = grimp.build_graph("recipe.partial_rollout", "verl_ext", exclude_type_checking_imports=True, cache_dir=None)
    counted = {name for name in graph.modules if not graph.find_children(name)}

    @functools.cache
    def chain_from(name):
        below = graph.find_modules_directly_imported_by(name) & counted
        return (name, *max(map(chain_from, sorted(below)), key=len, default=()))

    return max(map(chain_from, sorted(counted)), key=len)


def test_longest_chain_of_imports_is_short():
    chain = longest_import_chain()
    print(len(chain), "modules:", " -> ".join(chain))
    assert len(chain) <= 10


def test_patches_of_verl_and_vllm_live_in_verl_ext():
    for path in modules("."):
        assert "register_post_import_hook" not in path.read_text(), path
