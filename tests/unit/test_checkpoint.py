"""Old checkpoints outlive the sealing of the next one, whatever verl's keys ask for; torn ones are not passed over, and
weights are saved first.

verl's own trainer and checkpoint manager save and delete here; only the workers that hold the weights are left out.
"""

from datetime import datetime
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from recipe.partial_rollout.checkpoint import manifest
from recipe.partial_rollout.checkpoint import run_checkpoints as checkpoint
from recipe.partial_rollout.checkpoint.manifest import write_snapshot
from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints, claim_retention
from recipe.partial_rollout.config.keys import ConfigError
from recipe.partial_rollout.preflight.rows import check_rows
from recipe.partial_rollout.rollout.prompt_source import SlotLoader
from recipe.partial_rollout.rollout.session import RunSession, TrainingSteps
from recipe.partial_rollout.training.trainer_run import PartialRolloutRayPPOTrainer


class Killed(BaseException):
    """The process ends here."""


def kill(*args, **kwargs):
    raise Killed


class Weights(BaseCheckpointManager):
    """A worker group that saves as verl's FSDP and Megatron managers do."""

    def __init__(self):
        self.previous_saved_paths = []

    def save_checkpoint(self, path, remote, step, max_ckpt_to_keep=None):
        self.ensure_checkpoint_capacity(max_ckpt_to_keep)
        Path(path).mkdir(parents=True)
        (Path(path) / "weights").write_text(str(step))
        self.register_checkpoint(path, max_ckpt_to_keep)

    def load_checkpoint(self, path, del_local_after_load):
        assert (Path(path) / "weights").exists()


class Saves:
    """A driver whose manager has ``state``."""

    def __init__(self, state):
        self.state = state

    async def save(self, path):
        write_snapshot(path, self.state)

    async def load(self, path, step):
        pass


def trainer(run_dir, **keys):
    """A process of the training that has just started, or resumed by itself."""
    ours = object.__new__(PartialRolloutRayPPOTrainer)
    unset = dict.fromkeys(["default_hdfs_dir", "max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"])
    config = {"trainer": {"default_local_dir": str(run_dir), **unset, **keys}}
    ours.config = OmegaConf.create(config | {"actor_rollout_ref": {"actor": {"checkpoint": {"async_save": False}}}})
    keep = claim_retention(ours.config.trainer, critic=True)
    ours.session = session = RunSession(SimpleNamespace(enable=True), RunCheckpoints(run_dir, keep=keep))
    ours.actor_rollout_wg, ours.critic_wg, ours.use_critic = Weights(), Weights(), True
    ours.train_dataloader = SlotLoader(session)
    session.source = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
    session.begin()
    session.log = Mock()
    session.driver = Saves({})
    if session.checkpoints.chosen is not None:
        session.load()
    return ours


def save(ours, *steps):
    for step in steps:
        ours.global_steps = ours.session.completed_step = step
        ours._save_checkpoint()


def steps_of(run_dir):
    return sorted(int(path.name.rpartition("_")[2]) for path in run_dir.glob("global_step_*"))


KEYS = [
    ({"max_actor_ckpt_to_keep": 1, "max_critic_ckpt_to_keep": 2}, 2),
    ({"remove_previous_ckpt_in_save": True}, 1),
]


@pytest.mark.parametrize(("keys", "kept"), KEYS)
def test_kill_between_verls_save_and_the_seal_leaves_the_older_checkpoints_whole(tmp_path, monkeypatch, keys, kept):
    ours = trainer(tmp_path, **keys)
    save(ours, 1, 2, 3, 4)
    assert steps_of(tmp_path) == list(range(5 - kept, 5))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "seal", kill)
        with pytest.raises(Killed):
            save(ours, 5)
    assert steps_of(tmp_path) == list(range(5 - kept, 6)), "nothing is removed before the next one is whole"
    found = RunCheckpoints(tmp_path).chosen
    assert found == tmp_path / "global_step_4" and (found / "critic" / "weights").read_text() == "4"


def test_resume_checks_each_file_once(tmp_path, monkeypatch):
    save(trainer(tmp_path), 1, 2)
    read = []
    monkeypatch.setattr(manifest, "_checksum", lambda path, of=manifest._checksum: read.append(path.name) or of(path))
    trainer(tmp_path)
    assert len(read) == 2 and {name.partition("-")[0] for name in read} == {"manager", "source"}


@pytest.mark.parametrize(("keys", "kept"), KEYS)
def test_process_that_resumes_removes_what_the_one_before_could_not(tmp_path, monkeypatch, keys, kept):
    first = trainer(tmp_path, **keys)
    save(first, *range(1, kept + 1))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", kill)
        with pytest.raises(Killed):
            save(first, kept + 1)
    second = trainer(tmp_path, **keys)
    save(second, kept + 2)
    assert steps_of(tmp_path) == list(range(3, kept + 3))


@pytest.mark.parametrize("keys", [{}, {"max_critic_ckpt_to_keep": 1}])
def test_without_a_limit_of_the_whole_everything_stays_also_under_a_later_limit(tmp_path, keys):
    first = trainer(tmp_path, **keys)
    save(first, 1, 2, 3)
    assert steps_of(tmp_path) == [1, 2, 3]
    second = trainer(tmp_path, remove_previous_ckpt_in_save=True)
    save(second, 4, 5, 5)
    assert steps_of(tmp_path) == [1, 2, 3, 5], "what was saved without a limit is not the limit's to remove"
    assert claim_retention(OmegaConf.create({"max_actor_ckpt_to_keep": 1}), critic=False) == 1


def test_column_that_no_checkpoint_can_hold_is_refused_by_name_before_ray_starts():
    def check(*made, enable=True, save_freq=5):
        ours = {"partial_rollout": {"enable": enable}, "trainer": {"save_freq": save_freq}}
        config = OmegaConf.create({"data": {"train_files": "train.parquet"}, **ours})
        check_rows(config, [{"dummy_tensor": torch.zeros(1), "extra_info": {"made": value}} for value in made])

    check("2026-01-01", None)
    with pytest.raises(
        ConfigError, match=r"^data.train_files=train.parquet: row 1, column extra_info.made: .*\."
    ) as error:
        check(None, datetime(2026, 1, 1))
    assert "datetime.datetime cannot be saved: only plain values" in str(error.value) and "\n" not in str(error.value)
    for keys in ({"save_freq": -1}, {"enable": False}):
        check(datetime(2026, 1, 1), **keys)


@pytest.mark.parametrize("step", [2, 1], ids=["new step", "same step again"])
def test_weights_are_saved_where_what_is_in_flight_cannot_be(tmp_path, step):
    ours = trainer(tmp_path)
    save(ours, 1)
    ours.session.driver = Saves({"row": {"created": object()}})
    with pytest.raises(RuntimeError, match=r"row.created: builtins.object cannot be saved") as caught:
        save(ours, step)
    step_dir, message = tmp_path / f"global_step_{step}", str(caught.value)
    assert (step_dir / "actor" / "weights").read_text() == str(step)
    assert f"{step_dir}/actor" in message and "verl.model_merger" in message and "\n" not in message
    assert RunCheckpoints(tmp_path).chosen == tmp_path / "global_step_1"


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step", [2, 4, 7, 8], ids=["mid", "end of an epoch", "mid of the second", "end of the second"])
def test_resumed_baseline_sees_the_rows_in_the_order_of_one_that_never_stopped(tmp_path, workers, step):
    def process():
        ours = object.__new__(PartialRolloutRayPPOTrainer)
        keys = {"default_hdfs_dir": None, "max_actor_ckpt_to_keep": None, "max_critic_ckpt_to_keep": None}
        trainer = {"default_local_dir": str(tmp_path), "resume_mode": "auto", "resume_from_path": None, **keys}
        trainer["del_local_ckpt_after_load"] = False
        config = {"trainer": trainer, "actor_rollout_ref": {"actor": {"checkpoint": {"async_save": False}}}}
        ours.config, ours.use_critic, ours.actor_rollout_wg = OmegaConf.create(config), False, Weights()
        ours.session = RunSession(SimpleNamespace(enable=False), RunCheckpoints(tmp_path))
        ours.session.begin()
        ours.session.log = Mock()
        rows = list(range(8))
        sampler = create_rl_sampler(OmegaConf.create({"shuffle": True, "seed": 1}), rows)
        loader = StatefulDataLoader(rows, batch_size=2, num_workers=workers, drop_last=True, sampler=sampler)
        ours.session.offer(loader, TrainingSteps(4, 3, 12))
        ours.train_dataloader, ours.global_steps = loader, 0
        ours._load_checkpoint()
        return ours

    def batches(ours):
        """As in verl's ``fit``."""
        for _ in range(ours.global_steps // 4, 3):
            for batch in ours.train_dataloader:
                ours.global_steps = ours.session.completed_step = ours.global_steps + 1
                yield batch.tolist()

    whole = list(batches(process()))
    first = process()
    begun = list(islice(batches(first), step))
    first._save_checkpoint()
    again = process()
    assert again.global_steps == step and begun + list(batches(again)) == whole
