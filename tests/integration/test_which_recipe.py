"""What the start-up check foretells of a Ray worker is what a Ray worker does; the patches are in force there."""

import os
import subprocess
import sys
from pathlib import Path

import ray

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import pathlib, ray
from verl_ext import which_recipe

ray.init(log_to_driver=False)

@ray.remote
def imported():
    import recipe.partial_rollout
    return recipe.partial_rollout.__file__

worker = pathlib.Path(ray.get(imported.remote())).parent
print(which_recipe.imported_here(), which_recipe.imported_by_workers(), worker)
"""


def driver(tmp_path, cwd):
    """What a driver started in ``cwd`` imports, what the check says of its workers, and what a worker imports."""
    script = tmp_path / "bin" / "driver.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(DRIVER)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return [Path(place) for place in done.stdout.splitlines()[-1].split()]


def test_worker_of_a_driver_in_a_foreign_checkout_imports_theirs_as_the_check_says(tmp_path):
    theirs = tmp_path / "foreign" / "recipe" / "partial_rollout"
    theirs.mkdir(parents=True)
    (theirs / "__init__.py").touch()
    ours = ROOT / "recipe" / "partial_rollout"
    assert driver(tmp_path, cwd=theirs.parents[1]) == [ours, theirs, theirs]
    assert driver(tmp_path, cwd=tmp_path) == [ours, ours, ours]


def test_worker_that_imports_verls_engine_has_the_patches_of_the_plugin():
    @ray.remote
    def module_of_log_probs():
        from verl.workers.engine.fsdp.transformer_impl import logprobs_from_logits, verl_F

        assert logprobs_from_logits.__globals__["logprobs_from_logits_v2"] is verl_F.logprobs_from_logits_v2
        return verl_F.logprobs_from_logits_v2.__module__, verl_F.entropy_from_logits.__module__

    assert ray.get(module_of_log_probs.remote(), timeout=120) == ("verl_ext.chunked_log_probs",) * 2
