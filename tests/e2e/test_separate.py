"""A training loses its worker, is stopped, and goes on with separate engines, which decode while the trainer updates."""

import signal
import time
from types import SimpleNamespace

import pytest

from recipe.partial_rollout.records.run_log import EngineCall
from recipe.partial_rollout.tools.audit import audit
from tests.chaos.victim import processes_of_session

# Two trainings, one after the other, in a fixture.
pytestmark = pytest.mark.timeout(1200)

# 32 prompts, 4 a step, whose samples decode for longer than the trainer takes for a batch, three groups at a time, so that
# groups become ready one after the other. A learning rate of 0 makes versions differ in name only, so that the trainer can
# recompute what the engine reported, however often it was interrupted or held, and in whichever process.
SMALL = (
    "data.train_batch_size=4",
    "data.train_max_samples=32",
    "trainer.total_training_steps=null",
    "trainer.resume_mode=auto",
    "trainer.save_freq=2",
    "data.max_response_length=600",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_model_len=680",
    "actor_rollout_ref.rollout.max_num_seqs=12",
    "actor_rollout_ref.actor.optim.lr=0.0",
    "partial_rollout.resume_kv=recompute",
    "partial_rollout.overlap=1.5",
    "partial_rollout.max_staleness=3",
    # two updates a batch: verl runs its pass over it, and logs every difference, in every step
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
)


@pytest.fixture(scope="module")
def lives(module_start, wait_for, read_run, tmp_path_factory):
    """Both lives of one training: terminal and exit code of the first, and what the directory holds after the second."""
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    sealed = run_dir / "global_step_2" / "partial_rollout" / "manifest.json"
    ours = (*SMALL, f"trainer.default_local_dir={run_dir}")
    # The manifest is sealed before the weight sync and the validation of its step: the signal comes in that step.
    first = module_start(*ours, "trainer.test_freq=1", "data.val_max_samples=4", name="first")
    wait_for(first.trains, "training")
    time.sleep(3)
    (worker,) = processes_of_session(first.process.pid, "ray::PartialRolloutAgentLoopWorker")
    worker.kill()
    wait_for(sealed.exists, "a checkpoint")
    first.process.send_signal(signal.SIGTERM)
    code, audited = first.process.wait(60), audit(run_dir)[0]
    wait_for(lambda: processes_of_session(first.process.pid) == [], "the end of what the run had started", 30)

    resumed = max(int(path.name.rpartition("_")[2]) for path in run_dir.glob("global_step_*"))
    began = time.time()
    validated = ("trainer.test_freq=2", "data.val_max_samples=8")
    second = module_start(*ours, *validated, "partial_rollout.placement=separate", name="second")
    assert second.process.wait(400) == 0, second.terminal()[-3000:]
    run = read_run(run_dir)
    return SimpleNamespace(
        first=SimpleNamespace(code=code, terminal=first.terminal(), audit=audited),
        run=run,
        audit=audit(run_dir)[0],
        steps={number: step for number, step in run.steps.items() if number > resumed},
        rounds=[event for event in run.rounds if event["step"] > resumed],
        phases=[event for event in run.log if event["event"] == "phase" and event["start"] > began],
    )


def spans(lives, name):
    return [(event["start"], event["end"]) for event in lives.phases if event["name"] == name]


def overlap_s(spans, others):
    return sum(max(0.0, min(e, f) - max(s, t)) for s, e in spans for t, f in others)


def test_dead_worker_is_replaced_and_a_stop_ends_the_run_with_a_checkpoint(lives):
    assert "agent_loop_worker_0.2 takes its" in lives.first.terminal
    assert lives.first.code == 128 + signal.SIGTERM and "training stopped by SIGTERM" in lives.first.terminal
    assert lives.first.audit.violations == []


def test_every_prompt_is_trained_once_within_the_bound(lives):
    assert sorted(lives.run.steps) == list(range(1, 9)) and lives.run.run["complete"]
    assert lives.audit.violations == lives.audit.notes() == [] and lives.audit.complete and lives.audit.kills == 0
    assert len(lives.audit.trained) == 32
    assert 1 <= max(step["partial_rollout/staleness/max"] for step in lives.run.steps.values()) <= 3


def test_samples_span_versions_and_only_a_checkpoint_interrupts_calls(lives):
    calls = [call for event in lives.rounds for call in event["phase"]["calls"]]
    segments = [count for event in lives.rounds for group in event["trained"] for count in group["segments"]]
    interrupted = EngineCall.__struct_fields__.index("interrupted")
    cut = [call[2] for call in calls if call[interrupted]]
    assert max(segments) > 1 and len(cut) < len(calls) / 2
    assert all(any(start <= end <= stop + 1 for start, stop in spans(lives, "flush")) for end in cut)


def test_log_probs_of_interrupted_and_held_samples_are_the_engines_own(lives):
    assert all(step["training/rollout_probs_diff_max"] < 1e-3 for step in lives.run.steps.values())
    assert any(step["partial_rollout/off_policy_token_fraction"] > 0 for step in lives.steps.values())


def test_engine_decodes_while_the_trainer_updates(lives):
    calls = [(call[1], call[2]) for event in lives.rounds for call in event["phase"]["calls"]]
    assert overlap_s(spans(lives, "train"), calls) > 1.0
    assert len(spans(lives, "hold")) == len(lives.steps) + 1, "one a version, and the last step's"
    assert all(0 < step["partial_rollout/timing/hold_s"] < 10 for step in lives.steps.values())


def test_validation_shares_the_engine(lives):
    validated = [n for n, step in lives.steps.items() if any(key.startswith("val-core") for key in step)]
    assert validated == [n for n in lives.steps if n % 2 == 0] and len(spans(lives, "validate")) == len(validated)
