"""A tool's call has a deadline; all else of a tool is its own, as under verl."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.base_tool import BaseTool

from recipe.partial_rollout.worker.live_sample import SampleClock, timed
from tests.unit.loop_life import function
from tests.unit.shared import hangs, tool_schema


def run(tool, timeout_s):
    """What verl's agent loop makes of one call of ``tool`` within a sample's clock, and the errors that were noted."""
    noted = []

    async def main():
        clock = SampleClock("sample 0/0#0")
        (ours,) = timed([tool], clock, timeout_s, noted.append)
        how = {"max_tool_response_length": 100, "tool_response_truncate_side": "left"}
        loop = SimpleNamespace(tools={tool.name: ours}, **how)
        return await clock.run(ToolAgentLoop._call_tool(loop, FunctionCall(name=tool.name, arguments="{}"), {}, None))

    return asyncio.run(main()), noted


@pytest.mark.parametrize("where", ["coroutine", "thread", "create", "execute", "release"])
def test_tool_that_hangs_fails_its_sample_and_is_no_answer_in_verls_loop(where):
    functions = {"coroutine": hangs, "thread": lambda: time.sleep(0.5)}
    tool = function("add", functions[where]) if where in functions else BaseTool({}, tool_schema("add"))
    if where not in functions:
        setattr(tool, where, hangs)
    with pytest.raises(TimeoutError, match=r"tool add .* sample 0/0#0 within 0\.1 s: .*tool_timeout_s"):
        run(tool, 0.1)


def test_tools_own_timeout_is_its_answer_and_is_noted():
    async def times_out():
        raise TimeoutError("the sandbox is gone")

    (response, _, _), noted = run(function("add", times_out), 5.0)
    assert "the sandbox is gone" in response.text and [str(error) for error in noted] == ["the sandbox is gone"]
