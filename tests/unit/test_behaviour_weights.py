"""Behaviour weights at their three levels, against float64 references."""

import math

import numpy as np
import pytest
import torch
from verl.trainer.ppo.rollout_corr_helper import compute_is_metrics, compute_rollout_correction_weights


def build(rows=5, width=12, spread=0.4, seed=0):
    generator = np.random.default_rng(seed)
    log_ratio = torch.tensor(generator.normal(0.0, spread, (rows, width)), dtype=torch.float32)
    mask = torch.tensor(generator.integers(0, 2, (rows, width)), dtype=torch.int64)
    mask[:, 0] = 1
    return log_ratio, mask


def reference(log_ratio, mask, level):
    """float64 [B, R]: uncapped weights, token by token."""
    weights = np.zeros(log_ratio.shape)
    for row, (ratios, generated) in enumerate(zip(log_ratio.double().numpy(), mask.numpy().astype(bool), strict=True)):
        for column in np.flatnonzero(generated):
            weights[row, column] = {
                "token": math.exp(ratios[column]),
                "geometric": math.prod(math.exp(r) for r in ratios[generated]) ** (1 / generated.sum()),
                "sequence": math.prod(math.exp(r) for r in ratios[generated]),
            }[level]
    return weights


@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
def test_weights_are_those_of_their_level(level):
    log_ratio, mask = build()
    mask[2] = 0
    expected = reference(log_ratio, mask, level)
    weights, metrics = compute_rollout_correction_weights(log_ratio, mask, level, 1.1)
    np.testing.assert_allclose(weights.numpy(), np.minimum(expected, 1.1), rtol=2e-5)
    capped = np.minimum(expected, 1.1)[mask.bool()]
    assert metrics["rollout_is_mean"] == pytest.approx(capped.mean(), rel=1e-5)
    ess = capped.mean() ** 2 / np.square(capped).mean()
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(ess, rel=1e-5)
    weights, _ = compute_rollout_correction_weights(log_ratio, mask, level, "0.9_1.1")
    within = (expected >= 0.9) & (expected <= 1.1)
    np.testing.assert_allclose(weights.numpy(), np.where(within, expected, 0.0), rtol=2e-5)


def test_geometric_weights_are_normalised_over_sequences():
    log_ratio, mask = build()
    weights, metrics = compute_rollout_correction_weights(
        log_ratio, mask, rollout_is="geometric", rollout_is_threshold=9.0, rollout_is_batch_normalize=True
    )
    expected = reference(log_ratio, mask, "geometric")
    assert metrics["rollout_is_batch_norm_factor"] == pytest.approx(expected.max(1).mean(), rel=1e-5)
    np.testing.assert_allclose(weights.numpy(), expected / expected.max(1).mean(), rtol=2e-5)


@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
def test_batch_whose_weights_are_all_masked_has_no_effective_sample_and_does_not_end_the_training(level):
    log_ratio, mask = build(spread=0.01)
    weights, metrics = compute_rollout_correction_weights(log_ratio - 2.0, mask, level, "0.9_1.1")
    assert not weights.any()
    assert metrics["rollout_is_eff_sample_size"] == 0
    assert metrics["rollout_is_mean"] == pytest.approx(0, abs=1e-9) and metrics["rollout_is_oob_ratio"] == 1
    assert all(map(math.isfinite, metrics.values()))


def test_verl_still_refuses_the_geometric_mean_and_divides_by_zero_where_all_weights_are_masked():
    with pytest.raises(ValueError, match="Invalid rollout_is: geometric"):
        compute_rollout_correction_weights.__wrapped__(*build(), "geometric")
    nothing = torch.zeros(2, 3)
    with pytest.raises(ZeroDivisionError):
        compute_is_metrics.__wrapped__(nothing, nothing, nothing, torch.ones(2, 3), "token", 1.1)
