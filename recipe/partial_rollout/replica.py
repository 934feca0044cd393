"""verl's vLLM replica whose server remembers why a weight sync failed.

verl's sender waits for the receiver's answer without looking at the receiver's error, so a sync that fails in the engine
hangs the trainer. The server notes the error here and ``RecipeCheckpointManager`` asks for it while it waits.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from recipe.partial_rollout.failures import one_line

_SYNC_METHODS = ("update_weights_from_ipc", "update_verl_delta_weights")


class RecipeVLLMServer(vLLMHttpServer):
    """``vLLMHttpServer`` that answers for its weight syncs."""

    _weight_sync_error: str | None = None

    async def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> None:
        """As verl's; the error of a weight sync is also kept."""
        try:
            await super().collective_rpc(method, *args, **kwargs)
        except Exception as error:
            if method in _SYNC_METHODS:
                self._weight_sync_error = one_line(error)
            raise

    async def weight_sync_error(self) -> str | None:
        """Why the last weight sync failed in this server's engine, or None."""
        return self._weight_sync_error


class RecipeVLLMReplica(vLLMReplica):
    """``vLLMReplica`` with that server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(RecipeVLLMServer)


def register() -> None:
    """Make ``rollout.name=vllm`` mean this replica."""
    RolloutReplicaRegistry.register("vllm", lambda: RecipeVLLMReplica)
