"""verl's vLLM replica whose server remembers why a weight sync failed, and keeps KV blocks across it where asked to.

verl's sender waits for the receiver's answer without looking at the receiver's error, so a sync that fails in the engine
hangs the trainer. The server notes the error here and ``RecipeCheckpointManager`` asks for it while it waits.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from recipe.partial_rollout.failures import one_line
from recipe.partial_rollout.kept_kv import ResumeKV, SaltedEngine

logger = logging.getLogger(__name__)

_SYNC_METHODS = ("update_weights_from_ipc", "update_verl_delta_weights")


class RecipeVLLMServer(vLLMHttpServer):
    """``vLLMHttpServer`` that answers for its weight syncs, and has ``rollout.custom.resume_kv``."""

    _weight_sync_error: str | None = None

    @property
    def _keeps_kv(self) -> bool:
        return (self.config.custom or {}).get("resume_kv") == ResumeKV.KEEP

    async def run_server(self, args: argparse.Namespace) -> None:
        """As verl's."""
        leave_headroom(args, (self.config.custom or {}).get("kv_headroom", 0.0))
        await super().run_server(args)
        if self._keeps_kv:
            self.engine = SaltedEngine(self.engine, lambda: self.global_steps)

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """As verl's; kept blocks outlive it."""
        return await super().abort_all_requests(reset_prefix_cache and not self._keeps_kv, reject_request)

    async def clear_kv_cache(self) -> None:
        """As verl's, which calls it after a weight sync; kept blocks outlive it."""
        if not self._keeps_kv:
            await super().clear_kv_cache()
        elif self.node_rank == 0:
            await self.engine.reset_mm_cache()
            await self.engine.reset_encoder_cache()

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


def leave_headroom(args: argparse.Namespace, share: float) -> None:
    """Have the engine keep ``share`` of its KV blocks free when it starts a sample, unless the user has said how much.

    A vLLM that lacks the option (``watermark``) goes without, and says so.
    """
    if not share:
        return
    if not hasattr(args, "watermark"):
        logger.warning("partial_rollout.kv_headroom=%g has no effect: this vLLM has no watermark option", share)
    elif not args.watermark:
        args.watermark = share


class RecipeVLLMReplica(vLLMReplica):
    """``vLLMReplica`` with that server, which can be started again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(RecipeVLLMServer)

    async def relaunch(self) -> None:
        """Replace servers that have died by new ones, which have the weights that the model was loaded with."""
        for server in self.servers:
            ray.kill(server)
        self.servers = []
        # Ray frees an actor's name a moment after its death.
        for pause_s in (0.5, 1.0, 2.0, 4.0, 8.0):
            await asyncio.sleep(pause_s)
            try:
                await self.launch_servers()
                break
            except ValueError as error:
                if "already" not in str(error):
                    raise
                self.servers = []
        await asyncio.gather(*[worker.__ray_call__.remote(_forget_server) for worker in self.workers])


def _forget_server(worker: Any) -> None:
    """In a trainer's worker: look the server up again, as verl's ``ServerAdapter`` does the first time."""
    parts = [worker, *getattr(worker, "worker_dict", {}).values(), *getattr(worker, "fused_worker_dict", {}).values()]
    for part in parts:
        adapter = getattr(part, "rollout", None)
        if adapter is not None and hasattr(adapter, "server_handle"):
            adapter.server_handle = None


def register() -> None:
    """Make ``rollout.name=vllm`` mean this replica."""
    RolloutReplicaRegistry.register("vllm", lambda: RecipeVLLMReplica)
