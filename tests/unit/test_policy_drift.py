"""A warning when the policy runs away from its samples, once, and none for the ups and downs of a run that is well."""

from recipe.partial_rollout.policy_drift import KL, PolicyDrift


def steps_of_warnings(values):
    drift = PolicyDrift()
    return [step for step, kl in enumerate(values, 1) if drift.observe({KL: kl}, step)]


def test_run_that_is_well_is_left_alone():
    # Noise of either sign, growing with staleness, and a floor below which factors mean nothing.
    assert steps_of_warnings([0.0, 0.0001, 0.0011, -0.0002, 0.0001, 0.0003, 0.0016, 0.0049, -0.006, 0.0005]) == []


def test_drift_is_told_when_it_sets_in_and_again_only_after_it_was_over():
    well = [0.0002] * 8
    assert steps_of_warnings([*well, 0.0085, 0.0157, 0.0387]) == [9]
    assert steps_of_warnings([*well, 0.0085, 0.0001, 0.0157]) == [9, 11]


def test_first_steps_and_runs_that_always_were_far_off_are_no_alarm():
    assert steps_of_warnings([0.02, 0.3, 0.02, 0.03, 0.02]) == []
    assert steps_of_warnings([0.02] * 10) == []


def test_warning_says_what_to_do():
    drift = PolicyDrift()
    for step in range(1, 7):
        assert drift.observe({KL: 0.0003}, step) is None
    assert drift.observe({"critic/score/mean": 0.5}, 7) is None
    warning = drift.observe({KL: 0.0085}, 8)
    assert warning is not None
    for words in ("step 8", "rollout_corr/kl 0.0085, 0.00030 by the median", "optim.lr", "partial_rollout.overlap"):
        assert words in warning
