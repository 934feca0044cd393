"""Loaded by verl through ``multi_turn.function_tool_path``: a tool that notes its calls, and a parser that always calls it.

A model without tool training would never call; what is tested is that a call happens once, not what is asked. The very
first call hangs.
"""

import os
import time
from pathlib import Path

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool


@function_tool
def clock(hour: int) -> str:
    """Reads a clock.

    Args:
        hour: hour of the day.
    """
    try:
        Path(os.environ["TOOL_CALLS"]).with_suffix(".hung").touch(exist_ok=False)
    except FileExistsError:
        pass
    else:
        # Its sample is retried.
        time.sleep(60)
        return "too late"
    with open(os.environ["TOOL_CALLS"], "a") as file:
        file.write("called\n")
    return f"{hour}+1"


@ToolParser.register("scripted")
class ScriptedParser(ToolParser):
    """Finds one call of ``clock`` in every answer."""

    async def extract_tool_calls(self, responses_ids, tools=None):
        return "3", [FunctionCall(name="clock", arguments='{"hour": 3}')]
