"""The notebook of the quick start, run by Jupyter from an empty folder: clone, set-up, both arms, report."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "quickstart.ipynb"
# Set-up from nothing, then two trainings.
pytestmark = [pytest.mark.timeout(2400), pytest.mark.nightly]


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory):
    """A Jupyter in an environment of its own: the notebook's kernel has none of the recipe's packages, as on Colab."""
    environment = tmp_path_factory.mktemp("jupyter")
    subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True, timeout=120)
    install = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "nbclient", "ipykernel"]
    subprocess.run(install, check=True, timeout=300)
    return environment / "bin"


def test_notebook_runs_from_an_empty_folder_and_shows_the_report(jupyter, count_start, read_run, tmp_path):
    count_start()
    count_start()
    shutil.copy(NOTEBOOK, tmp_path)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "OUT")}
    done = subprocess.run(
        [jupyter / "jupyter-execute", "--output", "executed.ipynb", "--timeout", "2200", "quickstart.ipynb"],
        cwd=tmp_path,
        env={**kept, "REPOSITORY": str(ROOT), "PATH": f"{jupyter}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2300,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    for arm in ("noPR", "PR"):
        assert sorted(read_run(tmp_path / "partial_rollout" / "outputs" / "notebook" / arm).steps) == list(range(1, 9))
    executed = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    shown = [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]
    kinds = [kind for output in shown for kind in output.get("data", {})]
    assert kinds.count("image/png") == 2 and "text/markdown" in kinds
    assert any("<iframe srcdoc=" in output.get("data", {}).get("text/html", "") for output in shown)
