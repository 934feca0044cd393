"""Every example in a docstring of the package gives what it says."""

import doctest
import importlib
from pathlib import Path

import pytest

import recipe.partial_rollout as package

ROOT = Path(package.__file__).parent
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_of_a_module_hold(name):
    results = doctest.testmod(importlib.import_module(f"recipe.partial_rollout.{name}"))
    assert results.attempted and not results.failed


def test_structures_of_the_manager_are_explained_by_examples():
    explained = {"admission", "policies", "groups", "prompts_manager", "scheduling"}
    assert {f"manager.{name}" for name in explained} <= set(WITH_EXAMPLES)
