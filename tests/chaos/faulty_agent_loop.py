"""An agent loop that goes wrong when it is asked to: the faults that only the inside of a worker can make."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorUnavailableError
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from tests.chaos.faults import ORDERS, Kind


class FaultyAgentLoop(SingleTurnAgentLoop):
    """``SingleTurnAgentLoop``; an order ``drop`` is carried out before its engine call, ``cancel`` after it."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """See ``SingleTurnAgentLoop.run``; raises ``CancelledError`` for ``cancel``."""
        if _ordered(Kind.DROP):
            _drop_next_call(self.server_manager)
        output = await super().run(sampling_params, **kwargs)  # type: ignore[reportAbstractUsage]
        if _ordered(Kind.CANCEL):
            # What a library does that cancels what it awaits, and lets that out.
            call = asyncio.ensure_future(asyncio.sleep(60))
            await asyncio.sleep(0)
            call.cancel()
            await call
        return output


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
