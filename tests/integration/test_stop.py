"""A signal ends a start in one line while Ray comes up and while the driver waits for an engine."""

import signal
import subprocess
import sys

import pytest

STARTING = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
import ray
from omegaconf import OmegaConf
from recipe.partial_rollout import main_ppo, task_runner

task_runner.check_cluster = lambda *_: None

class Runner(task_runner.TaskRunner):
    def __init__(self, config):
        self.config = config
        self.files = SimpleNamespace(trains=False, directory=Path())

    def _train(self):
        ray.get(ray.remote(lambda: print("waiting", flush=True) or time.sleep(600)).remote())

def run(config):
    OmegaConf.set_struct(config, False)
    config.ray_kwargs.ray_init = {"num_cpus": 2, "include_dashboard": False, "address": "local"}
    print("init", flush=True)
    Runner(config).train()

main_ppo.run = run
sys.argv[1:] = ["--config-name", "quickstart_cpu", "trainer.logger=[console,file]"]
main_ppo.main()
"""


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [("init", signal.SIGHUP, 129), ("waiting", signal.SIGTERM, 143)],
)
def test_signal_while_ray_and_engines_start_ends_the_run_in_one_line(moment, number, code):
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", STARTING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert any(moment in line for line in process.stdout)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code
    assert errors.splitlines()[-1] == f"training stopped by {number.name}"
    assert "Traceback" not in errors and "*** SIG" not in errors
