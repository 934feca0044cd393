"""The recipes of conf/experiment: arms differ in placement alone, all pass the checks, recipe.sh names what is missing."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.config.keys import leaves
from recipe.partial_rollout.tools.check import command as checks

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "run_scripts"
EXPERIMENTS = sorted(path.stem for path in (main_ppo.CONF_DIR / "experiment").glob("*.yaml"))
ARMS = ("nopr", "pr", "colocate_async")
MISSING = "FAIL  missing         "
PLACEMENT = {
    "partial_rollout.enable",
    "trainer.use_v1",
    "trainer.v1.trainer_mode",
    "trainer.experiment_name",
    # follows the name
    "trainer.default_local_dir",
    "actor_rollout_ref.rollout.trace.experiment_name",
}


@pytest.fixture
def build(resolved_config):
    return lambda experiment, arm, *more: resolved_config("recipe", f"experiment={experiment}", f"arm={arm}", *more)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_arms_differ_in_placement_alone_and_the_longest_sample_fits(build, experiment):
    keys = {arm: dict(leaves(OmegaConf.to_container(build(experiment, arm)))) for arm in ARMS}
    for one, other in pairwise(keys):
        names = sorted({*keys[one], *keys[other]})
        differing = {name for name in names if keys[one].get(name) != keys[other].get(name)}
        assert differing and differing <= PLACEMENT
    data, node = build(experiment, "pr").data, build(experiment, "pr").actor_rollout_ref
    longest = data.max_prompt_length + data.max_response_length
    assert node.rollout.max_model_len == longest <= node.actor.ppo_max_token_len_per_gpu


BESIDE_PR = [("gsm8k_8gpu_4b", "nopr"), ("gsm8k_8gpu_4b", "colocate_async")]


@pytest.mark.parametrize(("experiment", "arm"), [*((experiment, "pr") for experiment in EXPERIMENTS), *BESIDE_PR])
def test_check_passes_where_nothing_but_data_and_model_is_missing(
    build, capsys, monkeypatch, tmp_path, experiment, arm
):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = build(experiment, arm, f"recipe.data={tmp_path}")
    nodes = ["trainer.nnodes"] if config.trainer.nnodes > 1 else []
    assert checks.check_run(config) == (checks.WRONG if nodes else checks.MISSING)
    lines = capsys.readouterr().out.splitlines()
    missing = [line.split("=")[0].split()[-1] for line in lines if line.startswith("FAIL")]
    files = config.data.val_files
    validated = ["data.val_files"] * (1 if isinstance(files, str) else len(files))
    # The tests' environment asks for the CPU.
    assert missing == ["trainer.device", *nodes, "actor_rollout_ref.model.path", "data.train_files", *validated]
    said = {line[6:22].strip() for line in lines if line.startswith("ok")}
    assert {"run", "model", "devices", "batch", "writes"} <= said


def test_published_pairs_have_scripts_under_their_names():
    found = {path.stem: path.read_text() for path in SCRIPTS.glob("run_*_*.sh")}
    for experiment in ("gsm8k_4b_bs128", "dapo_math17k_4b_2node"):
        for arm in ("nopr", "pr"):
            text = found.pop(f"run_{experiment.replace('_4b', f'_{arm}_4b')}")
            assert text.endswith(f'recipe.sh" {experiment} {arm} "$@"\n')
    assert not found


def test_script_lists_experiments_and_arms_when_called_bare():
    done = run_script()
    assert done.returncode == 0 and not done.stderr
    said = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("  "))
    assert {*said} == {*EXPERIMENTS, *ARMS}
    assert said["gsm8k_1gpu_0.6b"] == "GSM8K, Qwen3-0.6B, one GPU: batches of 32 x 8."


def run_script(*arguments, **variables):
    env = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "VERL_PLATFORM", "PYTHON")}
    command = ["bash", str(SCRIPTS / "recipe.sh"), *arguments]
    return subprocess.run(command, env={**env, **variables}, capture_output=True, text=True, timeout=300)


NO_GPU = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("experiment", "arm", "variables", "message"),
    [
        ("gsm8k", "pr", {}, "experiment 'gsm8k': one of dapo_math17k_1gpu_0.6b"),
        ("gsm8k_8gpu_4b", "pr", {"PYTHON": "/nowhere/python"}, "no Python at /nowhere/python: run PARTIAL_ROLLOUT_EX"),
        ("gsm8k_8gpu_4b", "pr", NO_GPU, "no GPU (nvidia-smi not found)"),
    ],
)
def test_script_says_in_a_line_what_is_missing(experiment, arm, variables, message):
    if "no GPU" in message and Path("/usr/bin/nvidia-smi").exists():
        pytest.skip("this machine has a GPU")
    done = run_script(experiment, arm, **variables)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"recipe: {message}")


def test_variables_reach_the_config_and_trailing_overrides_win(tmp_path):
    model, data, out = (str(tmp_path / f"modèle, a=b (it's) {what}") for what in ("model", "data", "out"))
    variables = {"DRY_RUN": "1", "PYTHON": sys.executable, "MODEL": model, "DATA": data, "OUT": out}
    sizes = {"NNODES": "2", "GPUS_PER_NODE": "4", "LOGGER": "swanlab", "RAY_ADDRESS": "auto"}
    done = run_script("gsm8k_8gpu_4b", "nopr", "data.train_batch_size=16", **variables, **sizes)
    assert done.returncode == checks.MISSING, done.stderr[-2000:]
    assert "2 x 4 cuda" in done.stdout and "16 prompts x 8 samples" in done.stdout
    assert f"{out}/nopr: config, metrics" in done.stdout and "'file', 'swanlab'" in done.stdout
    assert f"{MISSING}data.train_files={data}/gsm8k/train.parquet: " in done.stdout
    assert f"{MISSING}actor_rollout_ref.model.path={model}: " in done.stdout
