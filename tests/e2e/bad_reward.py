"""A reward function with a fault, and one that never answers."""

import time


def raises(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    raise ZeroDivisionError("no such score")


def hangs(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    time.sleep(3600)
