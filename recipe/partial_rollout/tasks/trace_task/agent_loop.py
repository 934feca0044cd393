"""The agent loop of the task: responses as long as their prompts' rows say, and a score that means nothing."""

from __future__ import annotations

import zlib
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class BudgetedAgentLoop(SingleTurnAgentLoop):
    """``SingleTurnAgentLoop`` that decodes exactly ``extra_info.response_budget`` tokens."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """See ``SingleTurnAgentLoop.run``; raises ``KeyError`` for a row without a budget."""
        budget = int(kwargs["extra_info"]["response_budget"])
        params = {**sampling_params, "max_tokens": budget, "ignore_eos": True}
        return await super().run(params, **kwargs)  # type: ignore[reportAbstractUsage]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any
) -> float:
    """Return a meaningless score in [0, 1]: the CRC of the first 256 characters. Equal texts have equal scores.

    Scores of 0 and 1 only would be ties nearly always, for estimators that compare the two best responses of a group.
    The signature is that of verl's ``reward.custom_reward_function``.
    """
    return zlib.crc32(solution_str[:256].encode()) / 0xFFFFFFFF
