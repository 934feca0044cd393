"""The site is whole, and its pages name metrics and keys that there are."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import recipe.partial_rollout as package
from recipe.partial_rollout.config.keys import declarations
from recipe.partial_rollout.config.settings import ROOT, PartialRolloutConfig

PACKAGE = Path(package.__file__).parent
REPOSITORY = PACKAGE.parents[1]
DOCS = REPOSITORY / "docs"
SECTION = (
    "(?:rollout|gpu|timing|staleness|segments_per_sample|trust_region|proximal|mismatch|length|trained"
    "|inflight|buffer|filter|failures|agent)"
)
METRIC = re.compile(rf"`({SECTION}/\w+)`")
mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install -r requirements-docs.txt"
)


def code():
    return "\n".join(path.read_text() for path in sorted(PACKAGE.rglob("*.py")))


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


def test_every_metric_is_documented():
    logged = set(re.findall(rf'"(?:partial_rollout/)?({SECTION}/\w+)"', code()))
    assert len(logged) > 30
    assert logged - set(METRIC.findall((DOCS / "working.md").read_text())) == set()


@pytest.mark.parametrize("page", ["working.md", "tuning.md"])
def test_documented_metrics_are_logged(page):
    source = code()
    for metric in METRIC.findall((DOCS / page).read_text()):
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
