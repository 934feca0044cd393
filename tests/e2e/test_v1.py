"""Trainings under verl's v1 trainer: killed, stopped and resumed, last by verl's own command; separate; noPR."""

import signal

import pytest
import torch

from recipe.partial_rollout.tools.audit import audit
from tests.chaos.victim import kill_session

pytest.importorskip("transfer_queue")
# Five trainings: every night. Those of every commit are tests/unit/test_v1.py, without engines.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

# 24 prompts, 4 a step: the data ends with step 6.
SMALL = (
    "trainer.use_v1=True",
    "data.train_batch_size=4",
    "data.train_max_samples=24",
    "trainer.total_training_steps=null",
    "trainer.resume_mode=auto",
    "trainer.save_freq=1",
    "trainer.test_freq=1",
    "data.val_max_samples=4",
    "data.max_response_length=300",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_model_len=380",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)
VERLS = ("-m", "verl.trainer.main_ppo", "--config-dir", "conf")


@pytest.fixture(scope="module")
def lives(module_start, wait_for, read_run, tmp_path_factory):
    """Exit code and terminal of the life that is stopped, and what the directory holds after the last."""
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    ours = (*SMALL, f"trainer.default_local_dir={run_dir}")

    def sealed(step):
        return (run_dir / f"global_step_{step}" / "partial_rollout" / "manifest.json").exists

    killed = module_start(*ours, name="killed")
    wait_for(sealed(2), "a checkpoint of step 2")
    kill_session(killed.process)
    stopped = module_start(*ours, name="stopped")
    wait_for(sealed(4), "a checkpoint of step 4")
    stopped.process.send_signal(signal.SIGTERM)
    code = stopped.process.wait(60)
    last = module_start(*ours, name="verls", program=VERLS)
    assert last.process.wait(400) == 0, last.terminal()[-3000:]
    return code, stopped.terminal(), read_run(run_dir)


def test_killed_stopped_and_resumed_it_trains_every_prompt_once(lives):
    _, _, run = lives
    # The kill came between the checkpoint of step 2 and its line of metrics.
    assert {1, 3, 4, 5, 6} <= set(run.steps) and run.run["complete"]
    assert [round_["step"] for round_ in run.rounds] == [1, 2, 3, 4, 5, 6]
    judged, code = audit(run.directory)
    assert code == 0 and judged.violations == judged.notes() == [], judged.violations
    trained = [group["uid"] for round_ in run.rounds for group in round_["trained"]]
    assert len(set(trained)) == 24
    assert all(data["training/off_policy/trajectory_staleness_worst/max"] <= 8 for data in run.steps.values())


def test_stop_ends_it_with_a_checkpoint(lives):
    code, terminal, _ = lives
    assert code == 128 + signal.SIGTERM and "trainer.resume_mode=auto resumes from it" in terminal


def test_validation_is_logged_with_its_step(lives):
    _, _, run = lives
    validated = {step for step, data in run.steps.items() if "val-core/clock10/acc/mean@1" in data}
    # The kill and the stop came in those of steps 2 and 4.
    assert validated >= {1, 3, 5, 6}


def test_checkpoint_has_nothing_of_the_queue_or_verls_loader(lives):
    _, _, run = lives
    for checkpoint in run.directory.glob("global_step_*"):
        assert not (checkpoint / "transfer_queue").exists()
        assert torch.load(checkpoint / "data.pt", weights_only=False) == {}


def test_separate_engines_and_dynamic_sampling_end_in_a_clean_run(module_train):
    run = module_train(
        *SMALL,
        "partial_rollout.placement=separate",
        "algorithm=dapo",
        "trainer.test_freq=-1",
        name="separate",
    )
    judged, code = audit(run.directory)
    assert code == 0 and judged.violations == judged.notes() == [], judged.violations
    assert run.run["complete"] and 0 < len(run.steps) < 6
    assert run.log[-1]["exhausted"]


def test_nopr_is_verls_sync_with_an_account_of_its_rounds(module_train):
    run = module_train(*SMALL, "partial_rollout.enable=False", name="noPR")
    assert run.run["arm"] == "noPR" and sorted(run.steps) == [1, 2, 3, 4, 5, 6]
    assert len({group["prompt"] for round_ in run.rounds for group in round_["trained"]}) == 24
    assert all(data["partial_rollout/rollout/tokens_per_s"] > 0 for data in run.steps.values())
