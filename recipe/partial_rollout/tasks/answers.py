"""A reward whose validation has accuracy and majority: verl's scores, with the answer that was read.

verl logs ``acc/mean@k`` and ``best@k`` where the reward function returns ``acc``, and ``maj@k`` where it returns ``pred``
too. Its function for GSM8K returns a bare number. Give this one in its place, in training and validation::

    reward.custom_reward_function.path=pkg://recipe.partial_rollout.tasks.answers
    reward.custom_reward_function.name=compute_score
"""

from __future__ import annotations

from typing import Any

from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.gsm8k import extract_solution

GSM8K = "openai/gsm8k"
NO_ANSWER = "[no answer]"
"""``pred`` of a response without an answer: a string, because verl computes no majority where one is missing"""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """verl's ``default_compute_score``; for GSM8K with ``acc`` (0 or 1) and ``pred`` (the answer, as text) beside it.

    >>> compute_score("openai/gsm8k", "3 + 4 = 7 #### 7", "7")
    {'score': 1.0, 'acc': 1.0, 'pred': '7'}
    >>> compute_score("openai/gsm8k", "I do not know", "7")
    {'score': 0.0, 'acc': 0.0, 'pred': '[no answer]'}
    """
    score = default_compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
    if data_source != GSM8K:
        return score
    return {"score": score, "acc": float(score == 1), "pred": extract_solution(solution_str) or NO_ANSWER}
