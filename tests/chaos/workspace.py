"""A tool with a state: a folder of flat text files for each conversation, in which its shell commands run.

It keeps what ``tool_journal`` can ask for, so that an effect happens once through crashes of whatever kind::

    ROOT/live/CONVERSATION/files/             where commands run
    ROOT/live/CONVERSATION/calls/             N.begun before call N runs, N.json with its answer once it has
    ROOT/snapshots/CONVERSATION/HASH.json     both of these, by content

``status`` answers for the last call alone: for an earlier one the folder has gone on. What it does not know is run again,
after ``restore`` has put the folder back as it was; a command that a dead worker has left behind writes to the old one.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import signal
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from recipe.partial_rollout.checkpoint.manifest import write_atomically

_PARTS = ("files", "calls")
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
        self, instance_id: str, parameters: dict[str, Any], call_id: str | None = None, **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """What the command printed, and how it ended if not well.

        Args:
            call_id: ``CONVERSATION/NUMBER`` of a training sample; without it (validation) a call has a folder of its own.
        """
        conversation, _, number = (call_id or f"{instance_id}/0").rpartition("/")
        live = self._live(conversation)
        (live / "calls" / f"{number}.begun").touch()
        text = await self._run(str(parameters["command"]), live / "files")
        await asyncio.to_thread(write_atomically, live / "calls" / f"{number}.json", json.dumps(text).encode())
        return ToolResponse(text=text), 0.0, {}

    def status(self, call_id: str) -> str | None:
        """The answer of the last call, if that is ``call_id``."""
        conversation, _, number = call_id.rpartition("/")
        calls = self._live(conversation) / "calls"
        answer = calls / f"{number}.json"
        if not answer.exists() or any(int(path.stem) > int(number) for path in calls.glob("*.begun")):
            return None
        return json.loads(answer.read_text())

    def snapshot(self, conversation: str) -> str:
        """Hash of the conversation's files and answers, which are kept under it."""
        live = self._live(conversation)
        texts = {f"{part}/{path.name}": path.read_text() for part in _PARTS for path in (live / part).iterdir()}
        content = json.dumps(texts, sort_keys=True).encode()
        name = hashlib.sha256(content).hexdigest()
        kept = self._kept(conversation, name)
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, content)
        return name

    def restore(self, conversation: str, handle: str | None) -> None:
        """Make files and answers those of ``handle``; none at all with None."""
        live = self._root / "live" / _folder(conversation)
        new, old = (self._root / "aside" / uuid4().hex for _ in range(2))
        for part in _PARTS:
            (new / part).mkdir(parents=True)
        texts = {} if handle is None else json.loads(self._kept(conversation, handle).read_text())
        for name, text in texts.items():
            (new / name).write_text(text)
        live.parent.mkdir(parents=True, exist_ok=True)
        if live.exists():
            live.rename(old)
        new.rename(live)
        shutil.rmtree(old, ignore_errors=True)

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

    def _kept(self, conversation: str, name: str) -> Path:
        return self._root / "snapshots" / _folder(conversation) / f"{name}.json"

    def _live(self, conversation: str) -> Path:
        """The conversation's folder, made if it is not there."""
        live = self._root / "live" / _folder(conversation)
        for part in _PARTS:
            (live / part).mkdir(parents=True, exist_ok=True)
        return live


def _folder(conversation: str) -> str:
    return conversation.replace("/", "_")
