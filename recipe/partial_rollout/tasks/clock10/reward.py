"""The reward: 1 for a correct answer at the end of the response, else 0.

verl decodes a response without its special tokens, so the end of turn is not visible here. A response cut off by the
length cap almost always lacks the closing `!` and operators, or has too few operators, and scores 0. The exception is a
cut exactly between the last operator and the end of turn, which the text alone cannot tell from a finished answer.
"""

import re
from typing import Any

from recipe.partial_rollout.tasks.clock10.expression import parse_problem

_ANSWER = re.compile(r"!([+\-*]+)\Z")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **kwargs: Any,
) -> float:
    """Score one response; the signature is that of verl's `reward.custom_reward_function`.

    Args:
        data_source: the row's data source; unused.
        solution_str: the response's text without special tokens.
        ground_truth: the problem's prompt text, such as `3?4=_?2=_-8=0`.
        extra_info: the row's extra fields; unused.
        kwargs: what verl adds when a reward model is configured; unused.

    Returns:
        1.0 if the response ends in `!` and operators that solve the problem, else 0.0.

    Raises:
        ValueError: `ground_truth` is not a problem, which is a fault of the data and not of the response.
    """
    problem = parse_problem(ground_truth)
    answer = _ANSWER.search(solution_str)
    return float(answer is not None and problem.is_solved_by(answer.group(1)))
