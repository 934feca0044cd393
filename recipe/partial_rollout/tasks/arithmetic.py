"""A calculator for models that write arithmetic, as GSM8K's solutions do.

In verl's ``multi_turn.tool_config_path`` (``conf/tools/arithmetic_tool.yaml``)::

    tools:
      - class_name: recipe.partial_rollout.tasks.arithmetic.Arithmetic
        config: {type: native}
"""

from __future__ import annotations

import ast
import re
from typing import Any

from simpleeval import DEFAULT_OPERATORS, SimpleEval
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.UAdd, ast.USub)
"""without powers and shifts: a long expression of the others is still computed in no time"""
_EXPRESSION = re.compile(r"[0-9.+\-*/%() ]{1,200}")
_ALLOWED = "numbers, + - * / // % and parentheses, at most 200 characters"


def calculator(does: str, expression: str) -> OpenAIFunctionToolSchema:
    """Return the schema of a tool `calculator`: ``does`` describes the tool, ``expression`` its one parameter."""
    parameters = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": expression}},
        "required": ["expression"],
    }
    function = {"name": "calculator", "description": does, "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


class Arithmetic(BaseTool):
    """verl's ``BaseTool``; its parameter ``expression`` is computed by simpleeval."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        schema = calculator(f"Computes an arithmetic expression: {_ALLOWED}.", "such as 48/2 + 48")
        super().__init__(config, tool_schema or schema)
        self._eval = SimpleEval(operators={kind: DEFAULT_OPERATORS[kind] for kind in _OPERATORS}).eval

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """The value, to 12 digits if it is no integer; or what is wrong with the expression."""
        return ToolResponse(text=self._answer(str(parameters["expression"]))), 0.0, {}

    def _answer(self, expression: str) -> str:
        if _EXPRESSION.fullmatch(expression):
            try:
                value = self._eval(expression)
                return str(value) if isinstance(value, int) else f"{value:.12g}"
            except ZeroDivisionError:
                return "error: division by zero"
            except Exception:
                # A syntax error, an ellipsis, a call of a number: whatever the error, the text is not arithmetic.
                pass
        return f"error: want {_ALLOWED}"
