"""A reward function that raises once, and after 16 scores never answers."""

import itertools
import time

_calls = itertools.count()


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Raises in its first call; never answers once 16 samples, one of them at its second try, have their score."""
    call = next(_calls)
    if call == 0:
        raise ZeroDivisionError("no such score")
    if call > 16:
        time.sleep(3600)
    return float(call % 2)
