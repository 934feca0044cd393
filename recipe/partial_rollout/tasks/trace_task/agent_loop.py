"""An agent loop whose responses are as long as their prompt's row says."""

from __future__ import annotations

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
