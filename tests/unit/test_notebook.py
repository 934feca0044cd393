"""The notebook of the quick start: valid, without outputs, and naming only what there is."""

import re
from pathlib import Path

import nbformat
import pytest

from recipe.partial_rollout.config.keys import declarations
from recipe.partial_rollout.config.settings import PartialRolloutConfig

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = nbformat.read(ROOT / "docs" / "quickstart.ipynb", as_version=nbformat.NO_CONVERT)
TEXT = "\n".join(cell.source for cell in NOTEBOOK.cells)


def test_a_command_that_fails_stops_the_notebook(monkeypatch):
    monkeypatch.chdir(ROOT / "docs")
    defined = {}
    for cell in NOTEBOOK.cells:
        if cell.id in ("settings", "checkout"):
            exec(compile(cell.source, cell.id, "exec"), defined)
    with pytest.raises(RuntimeError, match="exit code 3: exit 3"):
        defined["sh"]("exit 3")


def test_notebook_is_valid_and_has_no_outputs():
    nbformat.validate(NOTEBOOK)
    code = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]
    assert code and all(cell.outputs == [] and cell.execution_count is None for cell in code)


def test_files_and_keys_that_the_notebook_names_exist():
    files = set(re.findall(r"\b(?:run_scripts|docs|tests|recipe)/[\w/]+\.(?:sh|py|md)", TEXT))
    assert files and not [name for name in files if not (ROOT / name).exists()]
    keys = set(re.findall(r"partial_rollout\.(\w+)=", TEXT))
    assert keys and keys <= {declared.name for declared in declarations(PartialRolloutConfig)}
