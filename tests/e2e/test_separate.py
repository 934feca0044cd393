"""Separate placement, for real: the engine decodes while the trainer updates, on two cores."""

from collections import Counter

import pytest

from recipe.partial_rollout.records.calls import EngineCall
from recipe.partial_rollout.tools.audit import audit
from recipe.partial_rollout.tools.report.command import main as report

pytestmark = pytest.mark.timeout(900)

# 24 prompts, 4 a step, whose samples decode for longer than the trainer takes for a batch, three groups at a time, so that
# groups become ready one after the other. A learning rate of 0 makes
# versions differ in name only, so that the trainer can recompute what the engine reported, however often it was held.
SMALL = (
    "data.train_batch_size=4",
    "data.train_max_samples=24",
    "trainer.total_training_steps=null",
    "data.max_response_length=600",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_model_len=680",
    "actor_rollout_ref.rollout.max_num_seqs=12",
    "actor_rollout_ref.actor.optim.lr=0.0",
    "data.val_max_samples=8",
    "trainer.test_freq=2",
)


@pytest.fixture(scope="module")
def run(module_train):
    return module_train(
        *SMALL,
        "partial_rollout.placement=separate",
        "partial_rollout.resume_kv=recompute",
        "partial_rollout.overlap=1.5",
        "partial_rollout.max_staleness=3",
        "partial_rollout.proximal=recompute",
        name="separate",
    )


def phases(run, name):
    return [
        (event["start"], event["end"]) for event in run.trace if event["event"] == "phase" and event["name"] == name
    ]


def overlap_s(spans, others):
    return sum(max(0.0, min(e, f) - max(s, t)) for s, e in spans for t, f in others)


def test_every_prompt_is_trained_once_within_the_bound(run):
    trained = Counter(group["prompt"] for event in run.rounds for group in event["trained"])
    assert sorted(run.steps) == [1, 2, 3, 4, 5, 6] and run.run["complete"] and run.run["placement"] == "separate"
    assert len(trained) == 24 and set(trained.values()) == {1}
    assert audit(run.directory)[0].violations == []
    assert 1 <= max(step["partial_rollout/staleness/max"] for step in run.steps.values()) <= 3


def test_samples_span_versions_and_no_call_is_interrupted(run):
    calls = [call for event in run.rounds for call in event["calls"]]
    segments = [count for event in run.rounds for group in event["trained"] for count in group["segments"]]
    interrupted = [*EngineCall.__dataclass_fields__].index("interrupted")
    assert len(calls) == 96 and not any(call[interrupted] for call in calls), "one call a sample, none unfinished"
    assert max(segments) > 1


def test_behaviour_log_probs_of_held_samples_are_the_engines_own(run):
    assert all(step["training/rollout_probs_diff_max"] < 1e-3 for step in run.steps.values())
    assert any(step["partial_rollout/off_policy_token_fraction"] > 0 for step in run.steps.values())


def test_engine_decodes_while_the_trainer_updates(run):
    calls = [(call[1], call[2]) for event in run.rounds for call in event["calls"]]
    training, holds = phases(run, "train"), phases(run, "hold")
    assert overlap_s(training, calls) > 1.0
    assert len(holds) == 7, "one a version, and the last step's"
    assert all(0 < step["partial_rollout/timing/hold_s"] < 10 for step in run.steps.values())


def test_validation_shares_the_engine(run):
    assert len(phases(run, "validate")) == 3
    assert [n for n, step in run.steps.items() if any(key.startswith("val-core") for key in step)] == [2, 4, 6]


def test_report_draws_the_lanes_of_engine_and_trainer(run, tmp_path):
    assert report([str(run.directory), "--out", str(tmp_path)]) in (0, None)
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
