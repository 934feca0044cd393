"""Reward functions with a fault: one raises, one never answers, one does each in its turn."""

import itertools
import time

_calls = itertools.count()


def raises(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    raise ZeroDivisionError("no such score")


def hangs(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    time.sleep(3600)


def raises_then_hangs(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Raises in its first call; never answers once 16 samples, one of them at its second try, have their score."""
    call = next(_calls)
    if call == 0:
        raises(data_source, solution_str, ground_truth)
    if call > 16:
        hangs(data_source, solution_str, ground_truth)
    return float(call % 2)
