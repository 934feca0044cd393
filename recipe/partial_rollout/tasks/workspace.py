"""A tool with a state: a folder for each conversation, in which the model's commands run in the sandbox of the rewards.

It keeps what ``tool_journal`` can ask for, so that an effect happens once through crashes of whatever kind::

    ROOT/live/CONVERSATION/files/        where commands run, and all that they may change
    ROOT/live/CONVERSATION/calls/        N.begun before call N runs, N.json with its answer once it has
    ROOT/snapshots/CONVERSATION/HASH.tar both of these, by content

``status`` answers for the last call alone: for an earlier one the folder has gone on. What it does not know is run again,
after ``restore`` has put the folder back as it was; a command that a dead worker has left behind writes to the old one.

In verl's ``multi_turn.tool_config_path``::

    tools:
      - class_name: recipe.partial_rollout.tasks.workspace.Workspace
        config: {type: native, root: outputs/workspaces, timeout_s: 10}

``root`` must be the same folder on every node; the other keys are ``Limits``. Nothing removes it: a checkpoint may name any
snapshot that was made since.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from recipe.partial_rollout.checkpoint.snapshot import write_atomically
from recipe.partial_rollout.tasks.sandboxed.limited_process import Limits, run_limited

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
    """verl's ``BaseTool``; its parameter ``command`` is run by ``/bin/sh``."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(_SCHEMA))
        self._root = Path(config["root"]).absolute()
        self._limits = Limits.of(config)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], call_id: str | None = None, **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        """What the command printed, and how it ended if not well.

        Args:
            call_id: ``CONVERSATION/NUMBER`` of a training sample. Else verl's ``agent_data`` names the conversation.
        """
        conversation, _, number = (call_id or f"{_request_of(kwargs) or instance_id}/").rpartition("/")
        live = self._live(conversation)
        number = number or str(sum(1 for _ in (live / "calls").glob("*.json")))
        (live / "calls" / f"{number}.begun").touch()
        command = ["/bin/sh", "-c", str(parameters["command"])]
        text = (await run_limited(command, b"", self._limits, folder=str(live / "files"))).answer
        await asyncio.to_thread(write_atomically, live / "calls" / f"{number}.json", [json.dumps(text).encode()])
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
        content = io.BytesIO()
        live = self._live(conversation)
        with tarfile.open(fileobj=content, mode="w") as tar:
            for path in _below(live):
                tar.add(path, path.relative_to(live), recursive=False, filter=_without_time)
        name = hashlib.blake2b(content.getbuffer(), digest_size=20).hexdigest()
        kept = self._kept(conversation, name)
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, [content.getbuffer()])
        return name

    def restore(self, conversation: str, handle: str | None) -> None:
        """Make files and answers those of ``handle``; none at all with None."""
        live, new = self._root / "live" / _folder(conversation), self._root / "new" / uuid4().hex
        new.mkdir(parents=True)
        if handle is not None:
            with tarfile.open(self._kept(conversation, handle)) as tar:
                tar.extractall(new, filter="tar")
        old = self._root / "old" / uuid4().hex
        old.parent.mkdir(exist_ok=True)
        live.parent.mkdir(parents=True, exist_ok=True)
        if live.exists():
            live.rename(old)
        new.rename(live)
        shutil.rmtree(old, ignore_errors=True)

    def _kept(self, conversation: str, name: str) -> Path:
        return self._root / "snapshots" / _folder(conversation) / f"{name}.tar"

    def _live(self, conversation: str) -> Path:
        """The conversation's folder, made if it is not there."""
        live = self._root / "live" / _folder(conversation)
        for part in ("files", "calls"):
            (live / part).mkdir(parents=True, exist_ok=True)
        return live


def _folder(conversation: str) -> str:
    return conversation.replace("/", "_")


def _request_of(kwargs: dict[str, Any]) -> str | None:
    return getattr(kwargs.get("agent_data"), "request_id", None)


def _below(folder: Path) -> Iterator[Path]:
    """All that is in ``folder``, in an order that does not change."""
    for path in sorted(folder.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _below(path)


def _without_time(item: tarfile.TarInfo) -> tarfile.TarInfo:
    item.mtime = 0
    item.uid = item.gid = 0
    item.uname = item.gname = ""
    return item
