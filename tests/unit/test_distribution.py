"""The permutation test finds what differs, and leaves alone what does not."""

import numpy as np
import pytest

from tests.bench.distribution import compare, speculative_config

PROMPTS, SAMPLES = 8, 24


def responses(seed, *, mean=20.0, favoured=0.0):
    """Random tokens; ``favoured``: the share of token 0 beyond its own."""
    rng = np.random.default_rng(seed)

    def one():
        length = 1 + rng.geometric(1 / mean)
        tokens = rng.integers(0, 8, length)
        return np.where(rng.random(length) < favoured, 0, tokens).tolist()

    return [[one() for _ in range(SAMPLES)] for _ in range(PROMPTS)]


@pytest.mark.parametrize("seed", range(5))
def test_two_draws_of_one_distribution_are_the_same(seed):
    assert compare(responses(seed), responses(seed + 100), alpha=0.01).same


def test_shorter_responses_are_found():
    verdict = compare(responses(1), responses(2, mean=8.0), alpha=0.01)
    assert verdict.length_p < 0.005 and not verdict.same
    assert verdict.median_length[1] < verdict.median_length[0]


def test_favoured_tokens_are_found_in_responses_of_equal_length():
    verdict = compare(responses(1), responses(2, favoured=0.3), alpha=0.01)
    assert verdict.token_p < 0.005 and verdict.length_p > 0.005 and not verdict.same


def test_plain_engine_has_no_speculation():
    assert speculative_config("none", 4) is None
    assert speculative_config("ngram", 3)["num_speculative_tokens"] == 3
