"""verl's tool loop that goes wrong when it is asked to: the faults that only the inside of a worker can make.

Its conversations are greedy, so with frozen weights they are the same in every run. Each turn's tokens decide whether it is
the last, and else what its command writes into the conversation's workspace.
"""

from __future__ import annotations

import asyncio
import json
import os
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
from ray.exceptions import ActorUnavailableError
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

from recipe.partial_rollout.checkpoint.manifest import write_atomically
from tests.chaos.effects import TRANSCRIPTS
from tests.chaos.faults import ORDERS, Kind
from tests.chaos.workspace import ATTEMPT

_TURN_TOKENS = 32
_MEAN_TURNS = 8


@ToolParser.register("effects")
class EffectsParser(ToolParser):
    """Every turn but one in ``_MEAN_TURNS`` has its checksum written to the workspace's log."""

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        """See ``ToolParser.extract_tool_calls``."""
        number = _checksum(responses_ids)
        command = f"echo {number} >> log; wc -l < log"
        calls = [FunctionCall(name="run", arguments=json.dumps({"command": command}))]
        return "3", calls if number % _MEAN_TURNS else []


class FaultyAgentLoop(ToolAgentLoop):
    """An order ``drop`` is carried out before the first engine call, ``cancel`` after the last."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """See ``ToolAgentLoop.run``; raises ``CancelledError`` for ``cancel``."""
        if _ordered(Kind.DROP):
            # A training sample's client stands before the worker's.
            _drop_next_call(getattr(self.server_manager, "_client", self.server_manager))
        sample = getattr(self.server_manager, "sample_id", None)
        attempt = None if sample is None else f"{sample.replace('/', '_')}/{uuid4().hex}"
        ATTEMPT.set(attempt)
        greedy = {**sampling_params, "temperature": 0.0, "max_tokens": _TURN_TOKENS}
        output = await super().run(greedy, **kwargs)  # type: ignore[reportAbstractUsage]
        if _ordered(Kind.CANCEL):
            # What a library does that cancels what it awaits, and lets that out.
            call = asyncio.ensure_future(asyncio.sleep(60))
            await asyncio.sleep(0)
            call.cancel()
            await call
        if sample is not None:
            transcripts = Path(os.environ[ORDERS]) / TRANSCRIPTS
            transcripts.mkdir(exist_ok=True)
            # Tokens of the model and of its tools' answers.
            said = f"{attempt} {_checksum(output.response_ids)}".encode()
            write_atomically(transcripts / sample.replace("/", "_"), said)
        return output


def _checksum(tokens: list[int]) -> int:
    return zlib.crc32(np.asarray(tokens, np.int64).tobytes())


def _ordered(fault: Kind) -> bool:
    """Whether ``fault`` is ordered, and nobody has carried it out yet."""
    try:
        os.unlink(Path(os.environ[ORDERS]) / fault)
    except FileNotFoundError:
        return False
    return True


def _drop_next_call(client: Any) -> None:
    """Let the next call of ``client`` end as if Ray had lost its connection to the replica, which lives."""
    acquire = client._acquire_server

    async def lost(**options: Any) -> Any:
        raise ActorUnavailableError("connection reset (injected)", None)

    async def acquire_once(*args: Any, **options: Any) -> tuple[str, Any]:
        client._acquire_server = acquire
        address, _ = await acquire(*args, **options)
        return address, SimpleNamespace(generate=SimpleNamespace(remote=lost))

    client._acquire_server = acquire_once
