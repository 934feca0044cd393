"""Dynamic sampling (DAPO, arXiv:2503.14476): groups whose samples all have the same score are replaced.

Such a group has no advantage to learn from. It is consumed without being trained, and another prompt takes its place in
the same round. ``GroupFilter`` only judges a group; ``Round`` counts and ``Admission`` replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recipe.partial_rollout.manager.types import FinishedOutput

if TYPE_CHECKING:
    from recipe.partial_rollout.config.settings import FilterSettings

SCORES = ("reward", "seq_reward", "seq_final_reward")
"""names of ``metric`` for the score itself; any other is a key of the reward's extra information"""


class MissingMetricError(ValueError):
    """The reward function does not return what ``algorithm.filter_groups.metric`` names."""


@dataclass(frozen=True, slots=True)
class GroupFilter:
    """``algorithm.filter_groups``, checked.

    ::

        rewards 1, 1, 1, 1   filtered: its value is 1
        rewards 1, 0, 1, 1   trained
        rewards 1            not judged: the other samples failed

    >>> from recipe.partial_rollout.manager.types import StoredOutput
    >>> def outputs(*rewards):
    ...     return [StoredOutput(f"0/0#{i}", None, 9, reward, {}, False) for i, reward in enumerate(rewards)]
    >>> equal = GroupFilter("reward", max_num_gen_batches=3)
    >>> equal.common_value(outputs(1, 1, 1, 1)), equal.common_value(outputs(1, 0, 1, 1)), equal.common_value(outputs(1))
    (1.0, None, None)
    >>> equal.most_a_round(batch_groups=8)
    16
    """

    metric: str
    max_num_gen_batches: int = 0
    """prompts that a round may consume, trained or filtered, in batches; 0: no limit"""

    @classmethod
    def of(cls, settings: FilterSettings | None) -> GroupFilter | None:
        """The filter that ``settings`` describe; None: every group is trained."""
        return None if settings is None else cls(settings.metric, settings.max_num_gen_batches)

    def most_a_round(self, batch_groups: int) -> int | None:
        """Groups that one round may filter; None: no limit."""
        return (self.max_num_gen_batches - 1) * batch_groups if self.max_num_gen_batches else None

    def common_value(self, outputs: Sequence[FinishedOutput]) -> float | None:
        """The value that all samples share; None if they differ, or if fewer than two are known.

        Masked samples have no value. A group with fewer than two unmasked samples is not judged: it trains, so that
        its failures count against ``partial_rollout.failures.max_masked_fraction``.

        Raises:
            MissingMetricError: a sample lacks the metric.
        """
        values = [self._value(output) for output in outputs if not output.masked]
        return values[0] if len(values) > 1 and len(set(values)) == 1 else None

    def _value(self, output: FinishedOutput) -> float:
        key = "algorithm.filter_groups.metric"
        if self.metric in SCORES:
            if output.reward_score is None:
                raise MissingMetricError(f"{key}={self.metric}: a sample was not scored before its group finished")
            return float(output.reward_score)
        if self.metric not in output.reward_extra_info:
            known = ", ".join([*SCORES, *output.reward_extra_info])
            raise MissingMetricError(f"{key}={self.metric}: the reward function returns no such value; one of {known}")
        return float(output.reward_extra_info[self.metric])
