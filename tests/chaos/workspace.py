"""A tool with a state: a folder of flat text files for each conversation, in which its shell commands run.

A conversation that begins anew after a crash gets a new folder (``ATTEMPT``), because its tools are called anew. A command
of an earlier attempt has had its effect all the same, in that attempt's folder::

    ROOT/SAMPLE/ATTEMPT/
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

ATTEMPT: ContextVar[str | None] = ContextVar("attempt", default=None)
"""``SAMPLE/ATTEMPT`` of the agent loop that runs, as a path; its loop sets it"""
_SCHEMA = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Runs a shell command in your folder, which keeps its files from call to call.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "what /bin/sh runs"}},
            "required": ["command"],
        },
    },
}


class Workspace(BaseTool):
    """verl's ``BaseTool``; its parameter ``command`` is run by ``/bin/sh``, for at most the config's ``timeout_s``."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(_SCHEMA))
        self._root = Path(config["root"]).absolute()
        self._timeout_s = float(config.get("timeout_s", 20.0))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """Return what the command printed, and how it ended if not well."""
        return ToolResponse(text=await self._run(str(parameters["command"]), self._folder(instance_id))), 0.0, {}

    async def _run(self, command: str, folder: Path) -> str:
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", command), cwd=folder, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
        )
        try:
            printed, _ = await asyncio.wait_for(process.communicate(), self._timeout_s)
        except TimeoutError:
            return f"(no end within {self._timeout_s:g} s)"
        finally:
            # Also where the call is cancelled: nothing of it may go on to write.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return printed.decode().rstrip() + (f"\n(exit status {process.returncode})" if process.returncode else "")

    def _folder(self, instance_id: str) -> Path:
        """The folder of the conversation's attempt, made if it is not there; of a validation, one of the call's own."""
        folder = self._root / (ATTEMPT.get() or f"validation/{instance_id}")
        folder.mkdir(parents=True, exist_ok=True)
        return folder
