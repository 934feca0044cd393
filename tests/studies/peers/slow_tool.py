"""Loaded by verl through ``multi_turn.function_tool_path``: a tool with a tail of latencies, and a parser that calls it.

A model without tool training would never call; what is measured is who waits for whom. Every answer has one call, whose
latency is lognormal: its median is ``TOOL_MEDIAN_S`` seconds, its 99th percentile ten times its mean.
"""

import asyncio
import os
import random

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool

MEDIAN_S = float(os.environ.get("TOOL_MEDIAN_S", "0.45"))
SIGMA = float(os.environ.get("TOOL_SIGMA", "1.43"))


@function_tool
async def clock(hour: int) -> str:
    """Reads a clock.

    Args:
        hour: hour of the day.
    """
    await asyncio.sleep(MEDIAN_S * random.lognormvariate(0, SIGMA))
    return f"{hour}+1"


@ToolParser.register("slow")
class SlowParser(ToolParser):
    """Finds one call of ``clock`` in every answer."""

    async def extract_tool_calls(self, responses_ids, tools=None):
        return "3", [FunctionCall(name="clock", arguments='{"hour": 3}')]
