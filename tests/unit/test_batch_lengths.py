"""A metric and a warning when batches of short groups alternate with batches of long ones, and none for chance."""

import numpy as np
import pytest

from recipe.partial_rollout.records.length_bias import excess_variation, quartile_deviation, variation
from recipe.partial_rollout.records.trained_group import TrainedGroup
from recipe.partial_rollout.rollout.length_window import BATCHES, LengthWindow
from recipe.partial_rollout.training.batch_lengths import VARIATION, BatchLengths


def batch(*lengths):
    return [TrainedGroup(order, 0, [length, length], [0, 0]) for order, length in enumerate(lengths)]


def test_random_batches_vary_as_chance_has_it_whatever_the_lengths():
    rng = np.random.default_rng(0)
    drawn = [excess_variation(rng.lognormal(4, 0.8, (BATCHES, 8))) ** 2 for _ in range(400)]
    assert np.mean(drawn) == pytest.approx(1.0, abs=0.06)
    assert np.std(np.sqrt(drawn)) == pytest.approx(0.2, abs=0.04)


def test_sorted_batches_vary_most_and_equal_ones_least():
    lengths = np.arange(1.0, 81.0)
    apart, alike = lengths.reshape(10, 8), lengths.reshape(8, 10).T
    assert excess_variation(apart) == pytest.approx(8**0.5, rel=0.05)
    assert excess_variation(alike) < 0.4
    assert excess_variation(np.ones((10, 8))) is None and excess_variation(apart[:1]) is None
    assert excess_variation([]) is None and variation(apart[:1]) is None


def test_quartiles_of_the_dispatched_each_give_a_quarter_of_what_is_trained_in_full():
    lengths = np.arange(80.0).reshape(10, 8)
    windows = [quartile_deviation(lengths, lengths.ravel(), window) for window in (1, 5, 10, 11)]
    assert windows[0] > windows[1] > windows[2] == 0.0 and windows[3] is None


def test_metric_waits_for_ten_batches_and_forgets_the_eleventh_last():
    window = LengthWindow()
    assert window.observe(batch(1000, 2000)) == {}
    for _ in range(BATCHES - 2):
        assert window.observe(batch(10, 20)) == {}
    assert window.observe(batch(10, 20))["length/batch_variation"] > 1
    assert window.observe(batch(10, 20)) == {"length/batch_variation": 0.0}


def warned(values):
    watch = BatchLengths()
    return [step for step, value in enumerate(values, 1) if watch.observe({VARIATION: value}, step)]


def test_warning_needs_five_steps_in_a_row_and_comes_once_until_they_end():
    assert warned([1.6] * 4 + [1.4] + [1.6] * 4) == []
    assert warned([1.6] * 9) == [5]
    assert warned([1.6] * 6 + [1.0] + [1.6] * 5) == [5, 12]


def test_warning_says_what_to_do_and_steps_without_the_metric_are_passed_over():
    watch = BatchLengths()
    assert watch.observe({}, 1) is None
    *_, warning = [watch.observe({VARIATION: 1.72}, step) for step in range(10, 15)]
    for words in ("at step 14", "1.7 times", "partial_rollout.scheduling.overtake"):
        assert words in warning
