"""A tool without a state: the model's Python runs in the sandbox of the rewards, where it can change no file.

In verl's ``multi_turn.tool_config_path`` (``conf/python_tool.yaml``)::

    tools:
      - class_name: recipe.partial_rollout.tasks.python_tool.PythonTool
        config: {type: native, repeatable: true, timeout_s: 10}

The other keys are ``Limits``.
"""

from __future__ import annotations

import sys
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from recipe.partial_rollout.tasks.sandboxed.limited_process import Limits, run_limited

_SCHEMA = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs Python, with its standard library, and returns what it prints. Keeps nothing between calls.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "a program that prints its results"}},
            "required": ["code"],
        },
    },
}


class PythonTool(BaseTool):
    """verl's ``BaseTool``; its parameter ``code`` is run by this interpreter, without its packages."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(_SCHEMA))
        self._limits = Limits.of(config)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """What the code printed, and how it ended if not well."""
        code = str(parameters["code"]).encode(errors="replace")
        ended = await run_limited([sys.executable, "-I", "-S", "-"], code, self._limits)
        return ToolResponse(text=ended.answer or "(nothing was printed)"), 0.0, {}
