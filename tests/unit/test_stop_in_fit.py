"""verl's own ``fit`` over the recipe's trainer, stopped or killed at its moments: the checkpoint is that of a whole step.

Workers, engines and the metrics' consumers are stand-ins; loop, hooks, manager state and checkpoints, verl's part of them
too, are real.
"""

import gc
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import DEFAULT, MagicMock, Mock

import pytest
import torch
from omegaconf import OmegaConf
from verl.protocol import DataProto
from verl.trainer.ppo import ray_trainer as verl_trainer
from verl.trainer.ppo.core_algos import get_kl_controller
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from recipe.partial_rollout import main_ppo
from recipe.partial_rollout.checkpoint import run_checkpoints
from recipe.partial_rollout.checkpoint.manifest import read_snapshot, write_snapshot
from recipe.partial_rollout.checkpoint.run_checkpoints import RunCheckpoints, claim_retention
from recipe.partial_rollout.config.settings import PartialRolloutConfig
from recipe.partial_rollout.manager.codec import restore
from recipe.partial_rollout.records.run_log import Checkpoint, Ended
from recipe.partial_rollout.rollout.prompt_source import TrainingSteps
from recipe.partial_rollout.rollout.run_files import RunFiles
from recipe.partial_rollout.rollout.stop import StopSignals, StopTraining
from recipe.partial_rollout.training.agent_loop_manager import assemble_batch
from recipe.partial_rollout.training.loss import ProximalPolicy
from recipe.partial_rollout.training.step_log import StepLog
from recipe.partial_rollout.training.trainer_run import PartialRolloutRayPPOTrainer, SlotLoader
from tests.unit.shared import state_of
from verl_ext import tracking_observer

STEPS = 4
OVERRIDES = (
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.prompt_length=8",
    "actor_rollout_ref.rollout.response_length=8",
    "actor_rollout_ref.model.path=none",
    "data.train_files=none",
    "data.val_files=none",
    "trainer.logger=[file]",
    "trainer.balance_batch=False",
    "trainer.resume_mode=auto",
)


class Rollout:
    """The agent-loop manager of the trainer and its driver, with a manager whose samples finish at once."""

    exhausted = False

    def __init__(self, trainer, manager, output, moment):
        self.trainer, self.manager, self.output, self.moment = trainer, manager, output, moment
        self.driver = self
        self.untrained = []
        self.asked = []
        self.begun = None

    def _require_trained(self, what):
        self.asked.append(what)
        assert not self.untrained

    def generate_sequences(self, slots):
        if slots.meta_info.get("validate"):
            self._require_trained("validation")
            self.moment("validating")
            self.trainer.stop.check()
            return None
        self._require_trained("the next batch")
        self.moment("round")
        self.trainer.stop.check()
        manager, step = self.manager, slots.meta_info["global_steps"]
        if self.begun != step - 1:
            manager.begin_version(step - 1)
        for lease in manager.claim("w0"):
            manager.finish(lease.sample_id, self.output(version=step - 1))
        groups = manager.take_batch(stop=True)
        self.untrained = [group.uid for group in groups]
        # As the manager actor does behind the update: the next version begins before this batch is trained.
        if step < STEPS:
            manager.begin_version(step)
            self.begun = step
        batch = assemble_batch(groups, slots.non_tensor_batch["uid"][::2], 8, 8, 0)
        batch.meta_info["timing"] = {}
        return batch

    async def finish_step(self):
        self.asked.append("finish")
        self.untrained = []
        self.manager.groups.train()

    def in_flight(self):
        return {"source": lambda path: write_snapshot(path, {}), "manager": self.save}

    def save(self, path):
        self._require_trained("a checkpoint")
        write_snapshot(path, state_of(self.manager))

    async def explain(self, error):
        error.add_note('File "my_loop.py", line 7')

    async def load(self, checkpoints):
        restore(self.manager, read_snapshot(checkpoints.resumed_state("manager")))


class Weights(BaseCheckpointManager):
    """The actor's workers, which save as verl's FSDP and Megatron managers do: the number of updates."""

    def __init__(self, moment):
        self.previous_saved_paths, self.updates, self.moment = [], 0, moment

    def save_checkpoint(self, path, remote, step, max_ckpt_to_keep=None):
        self.moment("save")
        self.ensure_checkpoint_capacity(max_ckpt_to_keep)
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "weights").write_text(str(self.updates))
        self.register_checkpoint(path, max_ckpt_to_keep)

    def load_checkpoint(self, path, del_local_after_load):
        self.updates = int((Path(path) / "weights").read_text())


def build_trainer(config, run_dir, manager, output, *, moment):
    """A trainer of ``STEPS`` steps, without workers; ``moment(name)`` is told where ``fit`` is."""
    main_ppo.apply_overrides(config)
    trainer = object.__new__(PartialRolloutRayPPOTrainer)
    trainer.config = config
    settings = PartialRolloutConfig.from_config(config)
    asked = config.trainer
    keep = claim_retention(asked, critic=False)
    checkpoints = RunCheckpoints(Path(asked.default_local_dir), asked.resume_mode, asked.get("resume_from_path"), keep)
    trainer.settings, trainer.stop = settings, StopSignals.of_process()
    trainer.files = files = RunFiles(checkpoints, trains=not config.trainer.get("val_only"))
    files.begin()
    trainer.steps = TrainingSteps(per_epoch=STEPS, epochs=1, last=STEPS)
    trainer._noted = 0
    trainer.proximal = ProximalPolicy.of(config, trainer.settings)
    trainer.recorder = SimpleNamespace(log=MagicMock(last_round=None), metrics={})
    trainer.step_log = StepLog(config, trainer.settings, STEPS)
    trainer.total_training_steps = STEPS
    loader = SlotLoader(STEPS, settings.batch_groups, lambda: files.completed_step, lambda: trainer.exhausted)
    trainer.train_dataloader, trainer.train_dataset = loader, object()
    trainer._dump_executor, trainer._shutdown_dump_executor = SimpleNamespace(_shutdown=False), lambda: None
    trainer.actor_rollout_wg, trainer.llm_server_manager = Weights(moment), object()
    if config.algorithm.use_kl_in_reward:
        trainer.kl_ctrl_in_reward = get_kl_controller(config.algorithm.kl_ctrl)
    trainer.use_rm = trainer.use_critic = trainer.use_reference_policy = False
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
    trainer.async_rollout_manager = Rollout(trainer, manager, output, moment)
    trainer.driver = trainer.async_rollout_manager

    def update_weights(step):
        trainer._end_step(step)
        moment("sync")

    trainer.checkpoint_manager = SimpleNamespace(update_weights=update_weights, sleep_replicas=lambda: None)
    return trainer


@pytest.fixture
def life(tmp_path, monkeypatch, resolved_config, manager, output, prompts):
    """One process of the training; ``stop_at``: moment and the step in which the signal comes there."""
    monkeypatch.setattr(verl_trainer, "extract_reward", lambda batch: (batch.batch["rm_scores"], {}))
    at = SimpleNamespace()

    def log_probs(self, batch):
        zeros = torch.zeros_like(batch.batch["rollout_log_probs"])
        return DataProto.from_single_dict({"old_log_probs": zeros, "entropys": zeros.clone()}), 0.0

    def update(self, batch):
        at.moment("update")
        self.actor_rollout_wg.updates += 1
        return DataProto.from_single_dict({}, meta_info={"metrics": {"actor/grad_norm": [1.0]}})

    def validate(self):
        at.moment("before validation")
        gen_batch = self._get_gen_batch(DataProto.from_single_dict({"slot": torch.zeros(2, 1)}))
        gen_batch.meta_info["validate"] = True
        self.async_rollout_manager.generate_sequences(gen_batch)
        return {"val-core/reward": 1.0}

    for name, fake in {"_compute_old_log_prob": log_probs, "_update_actor": update, "_validate": validate}.items():
        monkeypatch.setattr(RayPPOTrainer, name, fake)
    monkeypatch.setattr(gc, "freeze", lambda: None)

    def run(*overrides, stop_at=None):
        def moment(name):
            step = getattr(trainer, "global_steps", 0)
            if (name, step) == stop_at and trainer.stop._number is None:
                signal.raise_signal(signal.SIGTERM)

        at.moment = moment
        keys = *OVERRIDES, f"trainer.default_local_dir={tmp_path}", *overrides
        config = resolved_config("quickstart_cpu", *keys)
        trainer = build_trainer(config, tmp_path, manager(batch=2, n=2, prompts=0), output, moment=moment)
        if trainer.files.checkpoints.chosen is None:
            trainer.async_rollout_manager.manager.backlog.enqueue(prompts(2 * STEPS))
        trainer.stopped = False
        try:
            trainer.fit()
        except StopTraining:
            trainer.stopped = True
        return trainer

    return run


VALIDATES = ("trainer.test_freq=1",)


def log_of(trainer):
    """What its log says of checkpoints and of the end of each process."""
    events = [call.args[0] for call in trainer.recorder.log.add.mock_calls]
    names = {Checkpoint: lambda event: "checkpoint", Ended: lambda event: "complete" if event.complete else "stopped"}
    return [(names[type(event)](event), event.step) for event in events if type(event) in names]


def logged_steps(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "training/global_step" in line["data"]]


@pytest.mark.parametrize(
    ("moment", "step", "freq"),
    [
        *[(moment, 2, 3) for moment in ("round", "update", "sync", "before validation", "validating")],
        *[("update", 2, 1), ("validating", 2, 1), ("save", 2, 2)],
        *[("round", 1, 1), ("validating", 1, 2), ("validating", 3, 3)],
    ],
)
def test_stop_anywhere_in_a_step_leaves_a_checkpoint_of_a_whole_step(life, tmp_path, moment, step, freq):
    first = life(*VALIDATES, f"trainer.save_freq={freq}", stop_at=(moment, step))
    held = step - 1 if moment == "round" else step
    assert first.stopped and log_of(first)[-1] == ("stopped", held)
    if held:
        resumable = RunCheckpoints(tmp_path)
        found = resumable.chosen
        assert found == tmp_path / f"global_step_{held}"
        assert int((found / "actor" / "weights").read_text()) == held
        manager = read_snapshot(resumable.resumed_state("manager"))
        assert manager["counters"]["trained_groups"] == 2 * held and manager["version"] == held
    assert logged_steps(tmp_path) == list(range(1, held + 1)), "the metrics of a trained step are not lost"
    second = life(*VALIDATES, "trainer.save_freq=1")
    assert not second.stopped and log_of(second)[-1] == ("complete", STEPS)
    assert logged_steps(tmp_path) == list(range(1, STEPS + 1)), "it goes on, and keeps its history"
    assert second.async_rollout_manager.manager.counters.trained_groups == 2 * STEPS


@pytest.mark.parametrize(
    ("step", "freq", "end", "saved"),
    [(STEPS, 2, ("complete", STEPS), [2, STEPS]), (2, -1, ("stopped", 2), [])],
    ids=["of the last step", "without checkpoints"],
)
def test_stop_in_a_validation_completes_the_training_or_tells_the_step(life, tmp_path, step, freq, end, saved):
    trainer = life(*VALIDATES, f"trainer.save_freq={freq}", stop_at=("validating", step))
    assert log_of(trainer)[-1] == end and trainer.stopped == (end[0] == "stopped")
    assert steps_of(tmp_path) == saved


def test_stop_before_the_first_step_saves_only_what_was_resumed(life, tmp_path):
    validates = ("trainer.val_before_train=True", "trainer.save_freq=1")
    fresh = life(*validates, stop_at=("before validation", 0))
    assert fresh.stopped and log_of(fresh) == [("stopped", 0)] and not list(tmp_path.glob("global_step_*"))
    life("trainer.save_freq=1", stop_at=("round", 3))
    again = life(*validates, stop_at=("validating", 2))
    assert again.stopped and log_of(again) == [("checkpoint", 2), ("stopped", 2)]
    assert not life(*validates).stopped


FILTERS = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc")


def test_data_that_the_filter_has_consumed_ends_with_a_checkpoint(life, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Rollout, "exhausted", property(lambda self: self.manager.counters.trained_groups == 4))
    trainer = life(*FILTERS, "trainer.save_freq=5")
    assert log_of(trainer) == [("checkpoint", 2), ("complete", 2)] and not trainer.stopped
    assert RunCheckpoints(tmp_path).chosen == tmp_path / "global_step_2" and logged_steps(tmp_path) == [1, 2]
    assert f"the training ends after step 2 of {STEPS}" in capsys.readouterr().out


def test_trackers_show_a_run_whose_last_save_fails_as_failed(life, monkeypatch):
    monkeypatch.setattr(Rollout, "exhausted", property(lambda self: self.manager.counters.trained_groups == 4))
    monkeypatch.setattr(Rollout, "save", lambda self, path: path.joinpath("no directory").touch())
    ended = []
    monkeypatch.setattr(tracking_observer, "finish", lambda tracker, error=None: ended.append(type(error)))
    with pytest.raises(RuntimeError, match="cannot be saved"):
        life(*FILTERS, "trainer.save_freq=5")
    assert ended == [RuntimeError]


ADAPTIVE = (
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "algorithm.kl_ctrl.horizon=10",
)


def penalized(batch, kl_ctrl, kl_penalty):
    """verl's penalty, of a divergence far above its target."""
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    kl_ctrl.update(current_kl=1.0, n_steps=4)
    return batch, {}


def test_adaptive_kl_coefficient_goes_on_where_the_checkpoint_left_it(life, monkeypatch):
    monkeypatch.setattr(verl_trainer, "apply_kl_penalty", penalized)
    values = [0.1 * 1.08**step for step in range(STEPS + 1)]
    first = life(*ADAPTIVE, "trainer.save_freq=1", stop_at=("round", 3))
    assert first.kl_ctrl_in_reward.value == pytest.approx(values[2])
    second = life(*ADAPTIVE, "trainer.save_freq=1")
    assert second.kl_ctrl_in_reward.value == pytest.approx(values[STEPS])


def test_error_log_has_what_samples_raised(life, tmp_path, monkeypatch, capsys):
    def refuse(self, batch):
        # As it may quote a row.
        raise RuntimeError("no update") from ValueError("\ud800")

    def run(config):
        life()

    monkeypatch.setattr(main_ppo, "run", run)
    with monkeypatch.context() as broken, pytest.raises(SystemExit) as ended:
        broken.setattr(RayPPOTrainer, "_update_actor", refuse)
        main_ppo.end_in_one_line(main_ppo.run, OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path)}}))
    log = tmp_path / "error.log"
    assert ended.value.code == 1 and "training failed: RuntimeError: no update\n" in capsys.readouterr().err
    assert 'File "my_loop.py", line 7' in log.read_text() and "in refuse" in log.read_text()
    life()
    assert not log.exists()


@pytest.mark.parametrize("before", [True, False])
def test_validation_alone_trains_nothing_and_leaves_the_run_as_it_is(life, tmp_path, before):
    life("trainer.save_freq=1", stop_at=("round", 3))
    run = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    alone = "trainer.val_only=True", f"trainer.val_before_train={before}", "trainer.save_freq=1"
    trainer = life(*alone)
    assert trainer.async_rollout_manager.asked == ["validation"] and not trainer.stopped
    assert {path: path.read_bytes() for path in run} == run, "no record of a training"
    (line,) = (tmp_path / "validation.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 2 and "val-core/reward" in line, "it is of the newest checkpoint"
    life(*alone, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_1")
    life(*alone, "trainer.resume_mode=disable")
    steps = [json.loads(line)["step"] for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert steps == [2, 1, 0] and {path: path.read_bytes() for path in run} == run
    assert not life("trainer.save_freq=1").stopped and logged_steps(tmp_path) == list(range(1, STEPS + 1))


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here."""


def steps_of(run_dir):
    return sorted(int(path.name.rpartition("_")[2]) for path in run_dir.glob("global_step_*"))


SAVES = "trainer.save_freq=1"


@pytest.mark.parametrize("kept", [1, 2])
def test_kill_before_the_seal_leaves_the_older_checkpoints_whole(life, tmp_path, monkeypatch, kept):
    seal = Mock(wraps=run_checkpoints.seal, side_effect=[*[DEFAULT] * (STEPS - 1), Killed])
    monkeypatch.setattr(run_checkpoints, "seal", seal)
    with pytest.raises(Killed):
        life(f"trainer.max_actor_ckpt_to_keep={kept}", SAVES)
    whole = {f"global_step_{step}": str(step) for step in range(STEPS - kept, STEPS + 1)}
    left = {path.parents[1].name: path.read_text() for path in tmp_path.glob("*/actor/weights")}
    assert left == whole, "nothing is removed before the next one is whole"
    assert RunCheckpoints(tmp_path).chosen == tmp_path / f"global_step_{STEPS - 1}"


def test_what_was_saved_without_a_limit_stays_under_a_later_limit(life, tmp_path):
    life(SAVES, "trainer.max_critic_ckpt_to_keep=1", stop_at=("round", 3))
    life(SAVES, "trainer.max_actor_ckpt_to_keep=1")
    assert steps_of(tmp_path) == [1, 2, STEPS], "what was saved without a limit is not the limit's to remove"
    limits = OmegaConf.create({"max_actor_ckpt_to_keep": 1, "max_critic_ckpt_to_keep": 2})
    assert claim_retention(limits.copy(), critic=True) == 2, "a checkpoint is kept as a whole"
    limits.max_critic_ckpt_to_keep = None
    assert claim_retention(limits, critic=True) is None


@pytest.mark.parametrize(("stop_at", "step"), [(None, 2), (("round", 2), 1)], ids=["new step", "same step again"])
def test_weights_are_saved_where_what_is_in_flight_cannot_be(life, tmp_path, monkeypatch, stop_at, step):
    """Of the second checkpoint."""
    states = iter([state_of, lambda manager: {"row": {"created": object()}}])

    def save(self, path):
        write_snapshot(path, next(states)(self.manager))

    monkeypatch.setattr(Rollout, "save", save)
    with pytest.raises(RuntimeError, match=r"row.created: builtins.object cannot be saved") as caught:
        life(SAVES, stop_at=stop_at)
    step_dir, message = tmp_path / f"global_step_{step}", str(caught.value)
    assert (step_dir / "actor" / "weights").read_text() == str(step)
    assert f"{step_dir}/actor" in message and "verl.model_merger" in message and "\n" not in message
    assert RunCheckpoints(tmp_path).chosen == tmp_path / "global_step_1"
