"""A reward that a random model gets parts of: the share of letters in its answer, and more for the image's colour."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    letters = sum(sign.isalpha() for sign in solution_str)
    return letters / max(1, len(solution_str)) + (ground_truth in solution_str[:8])
