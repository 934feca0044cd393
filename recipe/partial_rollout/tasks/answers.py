"""A reward function with which verl also logs accuracy and majority votes: verl's score, and the answer that it read.

It also scores DeepScaleR, DeepMath-103K, AMC23 and MATH500 as ``tools data`` writes them; verl does not know their
``data_source``.

verl logs ``acc/mean@k`` and ``best@k`` where the reward function returns ``acc``, and ``maj@k`` where it returns ``pred``
too. verl's function for GSM8K returns only a number. To use this one in its place, for training and validation, set::

    reward.custom_reward_function.path=pkg://recipe.partial_rollout.tasks.answers
    reward.custom_reward_function.name=compute_score
"""

from __future__ import annotations

from typing import Any

from verl.utils.reward_score import default_compute_score, math_dapo
from verl.utils.reward_score.gsm8k import extract_solution
from verl.utils.reward_score.math_reward import is_equiv

GSM8K = "openai/gsm8k"
EXPRESSIONS = ("deepscaler", "deepmath", "amc_2023", "math_500")
"""sources of ``tools data`` whose answers are expressions"""
NO_ANSWER = "[no answer]"
"""``pred`` of a response without an answer: a string, because verl computes no majority where one is missing"""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """Return verl's ``default_compute_score``; for GSM8K also ``acc`` (0 or 1) and ``pred`` (the answer as text).

    A data set of ``EXPRESSIONS`` scores 1 or -1. The text after the last `Answer:` is right if verl's DAPO-Math score
    accepts it, or if verl's comparison for MATH finds it equivalent to the ground truth. The third example below is
    wrong because the parentheses are missing.

    >>> compute_score("openai/gsm8k", "3 + 4 = 7 #### 7", "7")
    {'score': 1.0, 'acc': 1.0, 'pred': '7'}
    >>> compute_score("openai/gsm8k", "I do not know", "7")
    {'score': 0.0, 'acc': 0.0, 'pred': '[no answer]'}
    >>> compute_score("math_500", "Answer: $\\\\dfrac12$", "\\\\left(\\\\frac{1}{2}\\\\right)")["score"]
    -1.0
    >>> compute_score("math_500", "Answer: $(\\\\dfrac12)$", "\\\\left(\\\\frac{1}{2}\\\\right)")["score"]
    1.0
    """
    if data_source in EXPRESSIONS:
        scored: Any = math_dapo.compute_score(solution_str, ground_truth)
        right = bool(scored["acc"] or is_equiv(scored["pred"], ground_truth))
        return {**scored, "score": 1.0 if right else -1.0, "acc": right}
    score = default_compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
    if data_source != GSM8K:
        return score
    return {"score": score, "acc": float(score == 1), "pred": extract_solution(solution_str) or NO_ANSWER}
