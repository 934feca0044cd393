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


def run_cells(*names):
    """What the code cells of these ids define."""
    cells = {cell.id: cell.source for cell in NOTEBOOK.cells}
    defined = {}
    for name in names:
        exec(compile(cells[name], name, "exec"), defined)
    return defined


def test_notebook_is_valid_and_has_no_outputs():
    nbformat.validate(NOTEBOOK)
    code = [cell for cell in NOTEBOOK.cells if cell.cell_type == "code"]
    assert len(code) > 4
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


def test_files_and_keys_that_the_notebook_names_exist():
    files = set(re.findall(r"\b(?:run_scripts|docs|tests|recipe)/[\w/]+\.(?:sh|py|md)", TEXT))
    assert {"run_scripts/setup.sh", "run_scripts/quickstart_cpu.sh", "tests/e2e/test_notebook.py"} <= files
    assert not [name for name in files if not (ROOT / name).exists()]
    keys = set(re.findall(r"partial_rollout\.(\w+)=", TEXT))
    assert keys and keys <= {declared.name for declared in declarations(PartialRolloutConfig)}


def test_a_command_that_fails_stops_the_notebook_and_outside_a_checkout_it_asks_where_to_clone_from(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(ROOT / "docs")
    defined = run_cells("settings", "checkout")
    assert defined["ROOT"] == ROOT
    defined["sh"]("echo $WORD", WORD="shown")
    assert capsys.readouterr().out.endswith("shown\n")
    with pytest.raises(RuntimeError, match="exit code 3: exit 3"):
        defined["sh"]("exit 3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPOSITORY", raising=False)
    with pytest.raises(AssertionError, match="set REPOSITORY"):
        run_cells("settings", "checkout")
