"""Interpolated proximal policy: the pass over the batch is skipped, and measured against where asked for."""

import math


def test_interpolation_skips_the_pass_and_measures_its_error_on_request(train):
    run = train(
        "data.train_batch_size=4",
        "data.max_response_length=300",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.max_num_seqs=32",
        "reward.custom_reward_function.path=pkg://recipe.partial_rollout.tasks.trace_task.reward",
        "partial_rollout.overlap=1.0",
        "partial_rollout.max_staleness=2",
        "partial_rollout.proximal=interpolate",
        "partial_rollout.proximal_check_every=3",
        "trainer.total_training_steps=6",
    )
    for number, step in run.steps.items():
        checked = number % 3 == 0
        assert ("partial_rollout/proximal/error" in step) is checked
        assert ("actor/entropy" in step) is ("rollout_corr/kl" in step) is checked
        assert 0 < step["partial_rollout/behaviour_weight/mean"] <= 2
        assert 0 < step["partial_rollout/behaviour_weight/ess"] <= 1
        assert math.isfinite(step["actor/pg_loss"]) and step["actor/grad_norm"] > 0
        assert math.isfinite(step.get("partial_rollout/proximal/error", 0.0))
    assert 0 < run.steps[6]["partial_rollout/proximal/error"] < 0.1
    assert run.steps[6]["partial_rollout/staleness/max"] >= 1
    skipped = [step["timing_s/old_log_prob"] for number, step in run.steps.items() if number % 3]
    assert max(skipped) < min(run.steps[n]["timing_s/old_log_prob"] for n in (3, 6))
