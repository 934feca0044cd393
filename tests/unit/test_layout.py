"""The rooms: what import-linter (pyproject.toml) cannot say."""

import ast
from pathlib import Path

import pytest

import recipe.partial_rollout as package

ROOT = Path(package.__file__).parent
KNOWS_RAY = ("actor", "condition", "output_store", "state_file")
"""files that may import Ray and asyncio, in rooms that otherwise do not"""


def imports(path):
    """Roots of all that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("room", ["manager", "checkpoint", "records", "planner", "config"])
def test_pure_rooms_know_nothing_of_ray_torch_verl_or_vllm(room):
    for path in sorted((ROOT / room).rglob("*.py")):
        allowed = {"asyncio", "ray"} if path.stem in KNOWS_RAY else set()
        assert imports(path) & {"ray", "asyncio", "torch", "verl", "vllm"} <= allowed, path


def test_patches_of_verl_and_vllm_live_in_verl_ext():
    for path in ROOT.rglob("*.py"):
        assert "register_post_import_hook" not in path.read_text(), path
