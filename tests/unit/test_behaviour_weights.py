"""Behaviour weights of verl's function with our two patches; token and sequence level are verl's own."""

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


def test_geometric_weights_are_capped_masked_and_normalised_as_verls_of_a_sequence():
    log_ratio, mask = build()
    mask[2], mask[3, 1:] = 0, 0
    expected = np.zeros(log_ratio.shape)
    for row, (ratios, generated) in enumerate(zip(log_ratio.double().numpy(), mask.numpy().astype(bool), strict=True)):
        expected[row, generated] = math.prod(map(math.exp, ratios[generated])) ** (1 / max(generated.sum(), 1))
    capped, within = np.minimum(expected, 1.1), np.where((expected >= 0.9) & (expected <= 1.1), expected, 0.0)
    normalised = expected / expected[mask.any(1)].max(1).mean()
    for wanted, threshold, normalise in ((capped, 1.1, False), (within, "0.9_1.1", False), (normalised, 9.0, True)):
        weights, metrics = compute_rollout_correction_weights(
            log_ratio, mask, "geometric", threshold, rollout_is_batch_normalize=normalise
        )
        np.testing.assert_allclose(weights.numpy(), wanted, rtol=2e-5)
        if threshold == 1.1:
            kept = wanted[mask.bool()]
            assert metrics["rollout_is_mean"] == pytest.approx(kept.mean(), rel=1e-5)
            ess = kept.mean() ** 2 / np.square(kept).mean()
            assert metrics["rollout_is_eff_sample_size"] == pytest.approx(ess, rel=1e-5)


@pytest.mark.parametrize("level", ["token", "geometric", "sequence"])
def test_batch_whose_weights_are_all_masked_has_no_effective_sample_and_does_not_end_the_training(level):
    log_ratio, mask = build(spread=0.01)
    weights, metrics = compute_rollout_correction_weights(log_ratio - 2.0, mask, level, "0.9_1.1")
    assert not weights.any() and metrics["rollout_is_eff_sample_size"] == 0
    assert metrics["rollout_is_mean"] == pytest.approx(0, abs=1e-9) and metrics["rollout_is_oob_ratio"] == 1
    assert all(map(math.isfinite, metrics.values()))


def test_verl_still_refuses_the_geometric_mean_and_divides_by_zero_where_all_weights_are_masked():
    with pytest.raises(ValueError, match="Invalid rollout_is: geometric"):
        compute_rollout_correction_weights.__wrapped__(*build(), "geometric")
    nothing = torch.zeros(2, 3)
    with pytest.raises(ZeroDivisionError):
        compute_is_metrics.__wrapped__(nothing, nothing, nothing, torch.ones(2, 3), "token", 1.1)
