"""Clusters: the SLURM job against commands that stand in for SLURM and Ray, the YAML files, the Ray that a run joins."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import yaml
from omegaconf import OmegaConf

from recipe.partial_rollout import task_runner
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight import inputs
from verl_ext import sockets

ROOT = Path(__file__).resolve().parents[2]
SLURM = ROOT / "run_scripts" / "slurm_recipe.sh"
RECIPE = ("dapo_math17k_4b_2node", "pr")

# Each logs its arguments. `srun` ends its step when it gets SIGTERM, as SLURM's does.
STAND_INS = {
    "scontrol": 'if [[ $1 == show ]]; then echo "$3" | tr , "\\n"; fi',
    "scancel": "",
    "hostname": "echo 10.0.0.1 10.0.0.2",
    "srun": """
while [[ $1 == --* ]]; do shift; done
"$@" & trap 'rm -f "$STAND_INS/up"' TERM
wait || true; wait
""",
    "python": """
case "$*" in
  *" start "*)
    trap 'echo "Ray SIGTERM" >>"$STAND_INS/log"' TERM
    while [[ -e $STAND_INS/up ]]; do sleep 0.1; done ;;
  *recipe.partial_rollout*)
    trap 'echo "trainer SIGTERM" >>"$STAND_INS/log"; sleep 0.5; exit 143' TERM
    touch "$STAND_INS/trains"
    while [[ ! -e $STAND_INS/finish ]]; do sleep 0.1; done
    exit "$(<"$STAND_INS/finish")" ;;
esac
""",
}


@pytest.fixture
def slurm(tmp_path):
    """``slurm(*arguments, **variables)`` starts the batch script of a job on two nodes."""
    for name, body in STAND_INS.items():
        path = tmp_path / name
        path.write_text(f'#!/usr/bin/env bash\necho "{name} $*" >>"$STAND_INS/log"\n{body}')
        path.chmod(0o755)
    (tmp_path / "up").touch()
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2", "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "64"}
    ours = {"STAND_INS": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": f"{tmp_path}/python"}
    hidden = ("DRY_RUN", "RAY_ADDRESS", "NNODES", "GPUS_PER_NODE")
    inherited = {key: value for key, value in os.environ.items() if key not in hidden}
    started = []

    def start(*arguments, **variables):
        env = {**inherited, **job, **ours, "SLURM_SUBMIT_DIR": str(ROOT), **variables}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        started.append(subprocess.Popen(["bash", str(SLURM), *arguments], env=env, **pipes))
        return started[-1]

    yield start
    (tmp_path / "up").unlink(missing_ok=True)
    (tmp_path / "finish").write_text("1")
    for process in started:
        process.kill()
        process.wait(10)


@pytest.fixture
def log(tmp_path):
    """``log()`` has what the script called."""
    (tmp_path / "log").touch()
    return lambda: (tmp_path / "log").read_text().splitlines()


def until(condition, process=None, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and (process is None or process.poll() is None)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ((), {}, "experiment '', arm '': bash run_scripts/recipe.sh lists what there is"),
        (RECIPE, {"SLURM_GPUS_ON_NODE": ""}, "no GPUs: sbatch --gpus-per-node=8 ..., or GPUS_PER_NODE"),
        (RECIPE, {"SLURM_SUBMIT_DIR": "/"}, "/: submit from the root of the repository"),
    ],
)
def test_slurm_script_says_in_a_line_what_is_missing(slurm, arguments, variables, message):
    process = slurm(*arguments, **variables)
    (line,) = process.communicate(timeout=30)[1].splitlines()
    assert process.returncode == 2 and line.startswith(f"slurm_recipe: {message}")


@pytest.mark.parametrize(("started", "trained", "mode"), [(0, 1, "disable"), (1, 0, "disable"), (1, 1, "auto")])
def test_requeued_job_resumes_what_it_has_trained(slurm, log, tmp_path, started, trained, mode):
    arm = RECIPE[1]
    tracker = tmp_path / "out" / arm / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir(parents=True)
    if started:
        (tmp_path / "out" / f".job_7_{arm}").touch()
    if trained:
        tracker.touch()
        os.utime(tracker, (time.time() + 60,) * 2)
    process = slurm(*RECIPE, "trainer.resume_mode=disable", OUT=str(tmp_path / "out"))
    until((tmp_path / "trains").exists, process)
    (trainer,) = [call for call in log() if "main_ppo" in call]
    assert trainer.split("trainer.resume_mode=")[-1] == mode, "hydra takes the last value"


def test_job_starts_ray_on_every_node_and_ends_with_the_trainers_exit_code(slurm, log, tmp_path):
    process = slurm(*RECIPE, "trainer.save_freq=5")
    until((tmp_path / "trains").exists, process)
    # The nodes start in the background, and may say so later than the trainer.
    until(lambda: sum(call.startswith("srun") for call in log()) == 2, process)
    calls = log()
    common = "srun --nodes=1 --ntasks=1 --cpus-per-task=64"
    node, size = "bash run_scripts/slurm_recipe.sh --node", "--num-gpus=8 --num-cpus=64"
    assert sorted(call for call in calls if call.startswith("srun")) == [
        f"{common} --nodelist=n1 {node} --head --node-ip-address=10.0.0.1 --port=6379 {size}",
        f"{common} --nodelist=n2 {node} --address=10.0.0.1:6379 {size}",
    ]
    trainer = next(call for call in calls if "main_ppo" in call)
    assert "trainer.nnodes=2 trainer.n_gpus_per_node=8 trainer.save_freq=5" in trainer
    (tmp_path / "finish").write_text("3")
    process.communicate(timeout=30)
    assert process.returncode == 3
    assert not (tmp_path / "up").exists() and "scontrol requeue 7" not in log()


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_signal_reaches_the_trainer_once_and_end_of_time_requeues(slurm, log, tmp_path, number, requeued):
    process = slurm(*RECIPE)
    until((tmp_path / "trains").exists, process)
    process.send_signal(number)
    until(lambda: "trainer SIGTERM" in log(), process)
    # SLURM follows up with SIGTERM when the time is over; the trainer is still saving.
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert log().count("trainer SIGTERM") == 1
    assert ("scontrol requeue 7" in log()) is requeued


def test_manifest_runs_a_recipe_on_the_nodes_that_it_asks_for():
    job = yaml.safe_load((ROOT / "deploy" / "kuberay.yaml").read_text())["spec"]
    cluster, variables = job["rayClusterSpec"], yaml.safe_load(job["runtimeEnvYAML"])["env_vars"]
    (workers,) = cluster["workerGroupSpecs"]
    pods = [each["template"]["spec"] for each in (cluster["headGroupSpec"], workers)]
    (worker,) = pods[1]["containers"]
    gpus = worker["resources"]["limits"]["nvidia.com/gpu"]
    assert cluster["rayVersion"] == ray.__version__
    assert int(variables["NNODES"]) == workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    assert variables["GPUS_PER_NODE"] == gpus == workers["rayStartParams"]["num-gpus"]
    assert {pod["terminationGracePeriodSeconds"] for pod in pods} == {int(variables["RAY_JOB_STOP_WAIT_TIME_S"])}


# -- a run joins the Ray that it is given --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ray_address", "options", "given"),
    [
        # The cluster that it joins keeps its own resources.
        ("10.0.0.1:6379", {"num_cpus": 32, "num_gpus": 1, "log_to_driver": False}, {"log_to_driver": False}),
        # It sizes its Ray, and joins no other by chance.
        (None, {"num_cpus": 4}, {"address": "local", "num_cpus": 4}),
        # Without sizes it finds its Ray as verl does.
        (None, {"num_cpus": None}, {"num_cpus": None}),
    ],
)
def test_run_joins_the_ray_that_it_is_given_or_starts_its_own(monkeypatch, ray_address, options, given):
    asked = {}
    monkeypatch.setattr(task_runner.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(task_runner.ray, "init", lambda **kwargs: asked.update(kwargs))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if ray_address is not None:
        monkeypatch.setenv("RAY_ADDRESS", ray_address)
    task_runner.start_ray(OmegaConf.create({"ray_kwargs": {"ray_init": options}}))
    del asked["runtime_env"]
    assert asked == given


@pytest.mark.parametrize(
    ("ray_address", "address", "refused"),
    [
        ("127.0.0.1:1", "auto", "RAY_ADDRESS=127.0.0.1:1: "),
        (None, "127.0.0.1:1", "ray_kwargs.ray_init.address=127.0.0.1:1: "),
        ("127.0.0.1:1", "local", None),
        (None, "ray://127.0.0.1:1", "ray_kwargs.ray_init.address=ray://127.0.0.1:1: "),
        (None, "auto", None),
        ("head:port", None, "RAY_ADDRESS=head:port: "),
        (None, "anyscale://head", None),
        ("127.0.0.1:{open}", None, None),
        (None, "ray://127.0.0.1:{open}", None),
    ],
)
def test_ray_that_does_not_answer_is_refused_by_its_key(monkeypatch, ray_address, address, refused):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if ray_address is not None:
            monkeypatch.setenv("RAY_ADDRESS", ray_address.format(open=port))
        options = {"address": address and address.format(open=port)}
        config = OmegaConf.create({"ray_kwargs": {"ray_init": options}})
        with pytest.raises(ConfigError) if refused else contextlib.nullcontext() as caught:
            inputs.check_ray_address(config)
    if refused:
        assert str(caught.value).startswith(f"{refused}HOST:PORT of a Ray") and "\n" not in str(caught.value)


def test_trainers_meet_at_a_port_that_the_kernel_does_not_hand_out():
    patched = type("RayWorkerGroup", (), {"__init__": lambda self, **options: self.__dict__.update(options)})
    sockets.choose_port(SimpleNamespace(RayWorkerGroup=patched))
    first, end = patched().master_port_range
    assert 10_000 <= first < end <= 32_768
    assert patched(master_port_range=[1, 2]).master_port_range == [1, 2]
