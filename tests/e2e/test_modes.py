"""The other ways to fill a round and to order the training, through hydra overrides, with weights that change."""

from collections import Counter

import pytest


@pytest.mark.parametrize(
    "mode",
    [
        ("partial_rollout.mode=ssim", "partial_rollout.scheduling.policy=seed"),
        ("partial_rollout.mode=april", "partial_rollout.over_sampling_batch_size=7"),
        (
            "partial_rollout.mode=window",
            "partial_rollout.scheduling.policy=in_order",
            "partial_rollout.ramp_rounds=2",
            "partial_rollout.overlap=auto",
        ),
    ],
    ids=["ssim", "april", "in_order"],
)
def test_mode_trains_the_epoch_once_within_the_bound(train, mode):
    run = train(
        "data.train_batch_size=4",
        "data.train_max_samples=16",
        "trainer.total_training_steps=null",
        "data.max_response_length=300",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        "data.val_max_samples=8",
        "trainer.test_freq=2",
        *mode,
    )
    prompts = Counter((group["epoch"], group["prompt"]) for event in run.rounds for group in event["trained"])
    assert len(prompts) == 16 and set(prompts.values()) == {1}
    if "partial_rollout.scheduling.policy=in_order" in mode:
        assert [group["group"] for event in run.rounds for group in event["trained"]] == list(range(16))
        assert all("partial_rollout/overlap_auto/target" in step for step in run.steps.values())
        # Decided in the background, from what the rounds before it measured.
        assert any("partial_rollout/overlap_auto/gain_up" in step for step in run.steps.values())
    assert run.run["mode"] == mode[0].split("=")[1]
    assert all(step["partial_rollout/staleness/max"] <= 4 for step in run.steps.values())
    assert [n for n, step in run.steps.items() if any(key.startswith("val-core") for key in step)] == [2, 4]
    assert all(step["partial_rollout/lost_samples"] == 0 for step in run.steps.values())
