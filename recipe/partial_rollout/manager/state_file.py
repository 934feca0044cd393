"""The manager's state in a file: written while the manager answers others, and read back before its first prompt."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe.partial_rollout.checkpoint.snapshot import Written, read_snapshot, write_snapshot
from recipe.partial_rollout.manager.codec import encode
from recipe.partial_rollout.manager.condition import ManagerCondition
from recipe.partial_rollout.manager.messages import Restored
from recipe.partial_rollout.manager.output_store import OutputStore

if TYPE_CHECKING:
    from recipe.partial_rollout.manager.prompts_manager import PromptsManager


class StateFile:
    """Saves and loads ``manager``.

    Args:
        store: has the outputs of finished samples.
        changed: guards ``manager``.
    """

    def __init__(self, manager: PromptsManager, store: OutputStore, changed: ManagerCondition) -> None:
        self._manager = manager
        self._store = store
        self._changed = changed

    async def save(self, path: Path) -> Written:
        """Write the present state to ``path``; samples may run, and what they report later is not part of it.

        Raises:
            UnsaveableError: a dataset row or an output holds a value that cannot be saved; the message names it.
            RolloutFailedError, TimeoutError: outputs are lost, or do not arrive.
        """
        start = time.perf_counter()
        async with self._changed:
            self._store.seal()
            captured = self._manager.capture()
            blocked_s = time.perf_counter() - start
        written = await asyncio.to_thread(lambda: write_snapshot(path, encode(captured, self._store.fetch)))
        return replace(written, seconds=time.perf_counter() - start, blocked_s=blocked_s)

    async def load(self, path: Path) -> Restored:
        """Restore the snapshot at ``path``.

        Raises:
            TornCheckpointError, ForeignCheckpointError: see ``read_snapshot``.
            ValueError: it was made with sizes that this run cannot resume from.
        """
        state = await asyncio.to_thread(read_snapshot, path)
        return await self._changed.change(lambda: self._restore(state))

    def _restore(self, state: dict[str, Any]) -> Restored:
        self._manager.load_state_dict(state)
        self._manager.store_outputs(self._store.put)
        gauges = self._manager.metrics()
        return Restored(
            version=self._manager.version,
            groups=int(gauges["inflight/groups"]),
            ready_groups=int(gauges["buffer/ready_groups"]),
            unfinished_samples=int(gauges["inflight/samples"]),
            cached_tokens=self._manager.cached_tokens,
        )
