"""The calculator as verl's tool: a pure function that takes its time, as a sandbox does."""

import asyncio
import random
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from recipe.partial_rollout.tasks.arithmetic import calculator
from recipe.partial_rollout.tasks.calculator.conversation import evaluate


class Calculator(BaseTool):
    """verl's ``BaseTool``; its ``config`` has ``tool_latency: {median_s, sigma}``, of a lognormal.

    Raises:
        ValueError: a latency below 0.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        schema = calculator("Computes from left to right, modulo 10.", "digits with one of + - * between them")
        super().__init__(config, tool_schema or schema)
        latency = config["tool_latency"]
        self._median_s, self._sigma = float(latency["median_s"]), float(latency["sigma"])
        if self._median_s < 0 or self._sigma < 0:
            raise ValueError(f"tool_latency={latency}: want both at least 0")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], agent_data: Any = None, **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """The expression's value, after a while that depends on the prompt, the turn and the expression alone."""
        expression = str(parameters["expression"])
        messages = [] if agent_data is None else agent_data.messages
        await asyncio.sleep(self.latency_s(f"{messages[:1]}{len(messages)}{expression}"))
        return ToolResponse(text=evaluate(expression)), 0.0, {}

    def latency_s(self, call: str) -> float:
        """Seconds that the call with this text takes: in every run the same."""
        return self._median_s * random.Random(call).lognormvariate(0, self._sigma)
