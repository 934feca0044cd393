"""The pages: every link, image, command and file they name exists. Examples in docstrings give what they say."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

import recipe.partial_rollout as package
from recipe.partial_rollout.tools.__main__ import TOOLS

REPOSITORY = Path(package.__file__).parents[2]
PAGES = sorted(
    path
    for files in ("*.md", "docs/**/*.md", "recipe/**/*.md", "tests/studies/results/*.md")
    for path in REPOSITORY.glob(files)
)
COMMENTED = sorted(
    path for files in ("run_scripts/*.sh", "tests/scripts/*.sh", "conf/**/*.yaml") for path in REPOSITORY.glob(files)
)

LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#[^)\s]+)?\)")
MODULE = re.compile(r"python -m (recipe\.[\w.]+)(?: ([a-z]\w*))?")
SCRIPT = re.compile(r"(?:run_scripts|tests/scripts)/\w+\.sh")
FILE = re.compile(r"`((?:tests|conf|docs|recipe|run_scripts|verl_ext)/[\w/.]+\.(?:py|md|yaml|sh|json|png))`")
IN_PACKAGE = re.compile(r"`((?:training|rollout|worker|engine|manager|planner|records|checkpoint|config)/\w+\.py)`")


def named(path):
    return str(path.relative_to(REPOSITORY))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    """MkDocs checks pages and anchors (``test_site``), but no link that leaves the site."""
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES + COMMENTED, ids=named)
def test_named_commands_and_files_exist(page):
    text = page.read_text()
    for module, tool in MODULE.findall(text):
        path = REPOSITORY.joinpath(*module.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
        assert not (module.endswith(".tools") and tool) or tool in TOOLS, tool
    for file in SCRIPT.findall(text) + FILE.findall(text):
        assert (REPOSITORY / file).exists(), file
    for file in IN_PACKAGE.findall(text):
        assert (REPOSITORY / "recipe/partial_rollout" / file).exists(), file


def test_every_page_of_docs_is_linked_from_the_readme_or_a_page_it_links():
    linked = {(page.parent / target).resolve() for page in PAGES for target in LINK.findall(page.read_text())}
    assert {path.resolve() for path in PAGES if path.is_relative_to(REPOSITORY / "docs")} <= linked


WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    for path in REPOSITORY.glob("recipe/**/*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_hold(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted and not results.failed


def words(text):
    return len(re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).split())


def test_front_page_is_read_in_minutes_and_the_pages_in_an_hour():
    assert words((REPOSITORY / "README.md").read_text()) <= 700
    pages = sorted((REPOSITORY / "docs").rglob("*.md"))
    assert len(pages) <= 13 and sum(len(page.read_text().split()) for page in pages) <= 15_000
