"""A reward that even a model that knows nothing earns half of the time."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return float(len(solution_str) % 2)
