"""The pages, and ``--help``: every link, command, option, file, test, metric and key that they name exists.

The site builds.
"""

import argparse
import ast
import doctest
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import nbformat
import pytest
from omegaconf import OmegaConf

import recipe.partial_rollout as package
from recipe.partial_rollout.config.keys import declarations
from recipe.partial_rollout.config.settings import ROOT, PartialRolloutConfig
from recipe.partial_rollout.tools.__main__ import TOOLS
from recipe.partial_rollout.tools.command_line import HERE

PACKAGE = Path(package.__file__).parent
REPOSITORY = PACKAGE.parents[1]
DOCS = REPOSITORY / "docs"
PAGES = sorted(
    path
    for files in ("*.md", "docs/**/*.md", "recipe/**/*.md", "tests/studies/results/*.md")
    for path in REPOSITORY.glob(files)
)
COMMENTED = sorted(
    path for files in ("run_scripts/*.sh", "tests/scripts/*.sh", "conf/**/*.yaml") for path in REPOSITORY.glob(files)
)

LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
MODULE = re.compile(r"python -m (recipe\.[\w.]+)(?: ([a-z]\w*))?")
SCRIPT = re.compile(r"(?:run_scripts|tests/scripts)/\w+\.sh")
FILE = re.compile(r"`((?:tests|conf|docs|recipe|run_scripts|verl_ext)/[\w/.]+\.(?:py|md|yaml|sh|json|png))`")
IN_PACKAGE = re.compile(r"`((?:training|rollout|worker|engine|manager|planner|records|checkpoint|config)/\w+\.py)`")
TEST = re.compile(r"`((?:unit|integration|e2e)/test_\w+\.py)::(test_\w+)`")


def anchors(page):
    """As GitHub and the site make them of headings, and those that are given."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="(.+?)">', text))


@pytest.mark.parametrize("page", PAGES + COMMENTED, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_commands_and_files_of_a_page_exist(page):
    """MkDocs checks pages and anchors (below), but no link that leaves the site."""
    text = page.read_text()
    for target, anchor in LINK.findall(text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or linked.suffix != ".md" or anchor in anchors(linked), f"{target}#{anchor}"
    for module, tool in MODULE.findall(text):
        path = REPOSITORY.joinpath(*module.split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
        assert not (module.endswith(".tools") and tool) or tool in TOOLS, tool
    for file in SCRIPT.findall(text) + FILE.findall(text):
        assert (REPOSITORY / file).exists(), file
    for file in IN_PACKAGE.findall(text):
        assert (PACKAGE / file).exists(), file
    for file, name in TEST.findall(text):
        assert f"def {name}(" in (REPOSITORY / "tests" / file).read_text(), name


OPTIONS = {
    (tool, option)
    for page in PAGES + COMMENTED
    # Studies tell what was typed at an earlier commit.
    if "studies" not in page.parts
    for tool, rest in re.findall(r"partial_rollout\.tools ([a-z]+) ((?:\\\n|[^`\n])+)", page.read_text())
    for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", re.split(r" -- |&&", rest)[0])
}
"""tool and option, of the commands of pages and scripts"""
COMMANDS = {
    **{f"{HERE} {name}": f"{HERE}.{tool.module}" for name, tool in TOOLS.items()},
    **{name: f"{name}.__main__" for name in ("tests.bench", "tests.chaos", "tests.studies")},
}
"""what follows ``python -m``, and the module whose ``main`` it is"""


class Made(Exception):
    """A parser is made; nothing is parsed."""


def made(parser, *_):
    raise Made(parser)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_has_the_options_of_the_pages_and_of_its_own_examples(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    with monkeypatch.context() as patch, pytest.raises(Made) as caught:
        patch.setattr(argparse.ArgumentParser, "parse_args", made)
        patch.setattr(sys, "argv", [command, "x"])
        importlib.import_module(COMMANDS[command]).main(["x"])
    parsers = {command: caught.value.args[0]}
    for action in parsers[command]._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers |= {f"{command} {name}": parser for name, parser in action.choices.items()}
    known = {option for parser in parsers.values() for option in parser._option_string_actions}
    assert {option for tool, option in OPTIONS if command == f"{HERE} {tool}"} <= known
    for name, parser in parsers.items():
        assert parser.format_help().startswith(f"usage: python -m {name} ")
        assert not [action.dest for action in parser._actions if not action.help and not action.choices], name
        title, *examples = parser.epilog.splitlines()
        assert title == "examples:" and examples
        for example in examples:
            # A command without options has itself for an example.
            assert f"{example.strip()} ".startswith(f"python -m {name} "), example
            parser.parse_args(shlex.split(example.strip().removeprefix(f"python -m {name}")))


def test_every_page_of_docs_is_linked_from_the_readme_or_a_page_it_links():
    linked = {(page.parent / target).resolve() for page in PAGES for target, _ in LINK.findall(page.read_text())}
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


def test_notebook_names_what_exists_and_stops_at_a_command_that_fails(monkeypatch):
    """``e2e/test_notebook.py`` runs it."""
    notebook = nbformat.read(DOCS / "quickstart.ipynb", as_version=nbformat.NO_CONVERT)
    text = "\n".join(cell.source for cell in notebook.cells)
    for name in re.findall(r"\b(?:run_scripts|docs|tests|recipe)/[\w/]+\.(?:sh|py|md)", text):
        assert (REPOSITORY / name).exists(), name
    monkeypatch.chdir(DOCS)
    defined = {}
    for cell in notebook.cells:
        if cell.id in ("settings", "checkout"):
            exec(compile(cell.source, cell.id, "exec"), defined)
    with pytest.raises(RuntimeError, match="exit code 3: exit 3"):
        defined["sh"]("exit 3")


# -- the site, its metrics and keys ------------------------------------------------------------------------------------


mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install -r requirements-docs.txt"
)


@mkdocs
def test_site_builds_without_a_warning(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    assert 'href="gpu.html"' in (tmp_path / "index.html").read_text()
    assert "deadlines.stall_s" in (tmp_path / "keys.html").read_text()
    assert (tmp_path / "runs.png").exists() and 'src="runs.png"' in (tmp_path / "learning.html").read_text()


SECTION = (
    "(?:rollout|gpu|timing|staleness|segments_per_sample|trust_region|proximal|mismatch|length|trained"
    "|inflight|buffer|filter|failures|agent)"
)


def test_metrics_that_are_logged_are_those_that_the_pages_document():
    source = "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))
    working, tuning = (
        set(re.findall(rf"`({SECTION}/\w+)`", (DOCS / page).read_text())) for page in ("working.md", "tuning.md")
    )
    logged = set(re.findall(rf'"(?:partial_rollout/)?({SECTION}/\w+)"', source))
    assert len(logged) > 30 and logged <= working
    for metric in working | tuning:
        # A few are made of a section and a name: f"timing/{name}_s".
        name = metric.partition("/")[2]
        assert any(quoted in source for quoted in (f'{metric}"', f'"{name}"', f'"{name.removesuffix("_s")}"')), metric


def test_keys_of_the_tuning_page_exist(composed_config):
    ours = {declared.name for declared in declarations(PartialRolloutConfig)}
    config = composed_config("ppo_partial_rollout")
    tables = re.findall(
        r"^\| look at \| if \| change \|\n((?:\|.*\n)+)", (DOCS / "tuning.md").read_text(), re.MULTILINE
    )
    cells = [row.split("|")[3] for table in tables for row in table.splitlines()]
    named = {name for cell in cells for name in re.findall(r"`([a-z]\w*(?:\.\w+)*)(?:=\S*)?`", cell)}
    assert len(named) > 10
    for name in named - ours:
        missing = object()
        assert OmegaConf.select(config, name, default=missing) is not missing, f"neither {ROOT}.{name} nor verl's"


def test_architecture_quotes_the_driver_and_its_files_exist():
    driver = PACKAGE / "rollout/driver.py"
    head = ast.get_docstring(ast.parse(driver.read_text()))
    quoted = (REPOSITORY / "docs/architecture.md").read_text()
    blocks = [textwrap.dedent(block).strip("\n") for block in re.findall(r"::\n\n((?:    .*\n|\n)+)", head + "\n")]
    assert len(blocks) == 3 and all(block in quoted for block in blocks)
    files = re.findall(r"\b[a-z_]+/[a-z_/0-9]+\.py\b", blocks[0])
    assert len(files) > 15 and all((PACKAGE / name).is_file() or (REPOSITORY / name).is_file() for name in files)
