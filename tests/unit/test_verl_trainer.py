"""verl's own trainer on the recipe's configs, as an arm of a study starts it."""

import os
import subprocess

import pytest
from omegaconf import OmegaConf

from tests.studies.learning.arms import at_rates
from tests.studies.runner import Study

SEPARATE = (
    "trainer.use_v1=True",
    "trainer.v1.trainer_mode=separate_async",
    "actor_rollout_ref.hybrid_engine=False",
    "partial_rollout.placement=separate",
)


@pytest.mark.parametrize(("cores", "moves", "trainer"), [("1", [[1], [0]], "0"), ("null", [], "")])
def test_verls_processes_start_beside_the_trainers_core(monkeypatch, composed_config, cores, moves, trainer):
    from recipe.partial_rollout.tools import verl_trainer

    config = composed_config("quickstart_cpu", *SEPARATE, f"partial_rollout.trainer_cores={cores}")
    moved, started = [], []
    monkeypatch.setenv(verl_trainer.cores.VARIABLE, "")
    monkeypatch.setattr(verl_trainer.cores, "available", lambda: [0, 1])
    monkeypatch.setattr(verl_trainer.cores, "move_to", lambda cores: moved.append(list(cores)))

    def start(config):
        started.append((list(moved), os.environ[verl_trainer.cores.VARIABLE]))

    monkeypatch.setattr(verl_trainer.main_ppo.main, "__wrapped__", start)
    monkeypatch.setattr(verl_trainer, "size_bucket", lambda config: None)
    verl_trainer.main.__wrapped__(config)
    assert started == [(moves[:1], trainer)] and moved == moves


def test_verls_own_trainer_composes_in_a_process_of_its_own(tmp_path):
    """Whether it finds the recipe's keys shows only where nothing else has registered them."""
    (arm,) = at_rates(["v1_colocate_async"], [1e-4])
    command = Study(tmp_path, (arm,), (1,), 4, "quickstart_cpu").command(arm, 1)
    done = subprocess.run([*command, "--cfg", "job"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    config = OmegaConf.create(done.stdout)
    assert config.trainer.v1.trainer_mode == "colocate_async" and config.partial_rollout.enable
