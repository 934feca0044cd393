"""Entry point ``vllm.general_plugins``: vLLM calls ``register`` in every one of its processes before a model loads.

A weight sync that fails says why (``tell_causes``).

Its patches of the scheduler: it counts the requests that it preempts for want of KV blocks. With 0.24.0 it also reports
requests to its workers that an emptied cache preempts. vLLM counts with its statistics only. They cost every step, verl
switches them off (``rollout.disable_log_stats=True``), and a stat-logger plugin would switch them on in every engine. They
also count the requests that vLLM preempts to empty its cache while the scheduler is paused: a hold, not a want of blocks.
The count may go when vLLM's tells the two apart; the report, with 0.24.0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from verl_ext.guard import (
    GPU_PAIR,
    around,
    cpu_requested,
    in_recipe,
    installed_pair,
    untested_pair,
    when_imported,
)

_SCHEDULER, _CORE = "vllm.v1.core.sched.scheduler", "vllm.v1.engine.core"
_EXPERTS = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
_UTILITY = "partial_rollout_preemptions"

logger = logging.getLogger(__name__)


def count_preempted(module: Any) -> None:
    """The scheduler counts in ``preempted``; this costs nothing while nothing is preempted."""
    from vllm.v1.core.sched.interface import PauseState

    module.Scheduler.preempted = 0

    @around(module.Scheduler, "_preempt_request")
    def _preempt_request(vllms: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        self.preempted += self.pause_state is PauseState.UNPAUSED
        return vllms(self, *args, **kwargs)


def answer_in_core(module: Any) -> None:
    """The engine core answers ``preemptions_of``."""
    setattr(module.EngineCore, _UTILITY, lambda core: getattr(core.scheduler, "preempted", None))


def tell_preempted(module: Any) -> None:
    """The scheduler tells its workers of the requests that an emptied KV cache preempts, as releases after 0.24.0 do.

    A hold with ``resume_kv=recompute`` empties the cache, and so preempts every running request. 0.24.0 reports only those
    that it preempts while it plans a step. So model runner V2, which has as many places as seats, keeps the places of the
    others. A request of better priority that arrives during the hold then finds no place, and the engine dies ("No free
    indices").
    """

    @around(module.Scheduler, "reset_prefix_cache")
    def reset_prefix_cache(
        vllms: Any, self: Any, reset_running_requests: bool = False, *args: Any, **kwargs: Any
    ) -> bool:
        if reset_running_requests:
            self._untold = getattr(self, "_untold", set()) | {request.request_id for request in self.running}
        return vllms(self, reset_running_requests, *args, **kwargs)

    @around(module.Scheduler, "schedule")
    def schedule(vllms: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        output = vllms(self, *args, **kwargs)
        output.preempted_req_ids = (output.preempted_req_ids or set()) | self.__dict__.pop("_untold", set())
        return output


def tell_causes(module: Any) -> None:
    """A weight sync that fails in a worker names all its errors, the first one first.

    vLLM passes the words of the last error on, without its type. On a CPU that error is verl's receiver's: as it gives up
    for another error, it closes memory that is still in use ("cannot close exported pointers exist"). It may go when the
    receiver closes nothing that is in use.
    """

    @around(module.vLLMColocateWorkerExtension, "update_weights_from_ipc")
    def update_weights_from_ipc(verls: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return verls(self, *args, **kwargs)
        except Exception as error:
            raise RuntimeError(", then ".join(reversed([*_chain(error)]))) from error


def _chain(error: BaseException | None) -> Iterator[str]:
    """Yield type and words of ``error``, then of what it followed."""
    while error is not None:
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__ or error.__context__


def register() -> None:
    """Patch vLLM's scheduler in the recipe's processes, and its layers on the CPU platform.

    An untested pair of vLLM and torch is not patched; a warning says so.
    """
    if not (in_recipe() or cpu_requested()):
        return
    if problem := untested_pair("vllm_plugin"):
        logger.warning("vLLM is not patched: %s", problem)
        return
    if in_recipe():
        when_imported(_SCHEDULER, count_preempted)
        when_imported(_CORE, answer_in_core)
        when_imported("verl.workers.rollout.vllm_rollout.utils", tell_causes)
        if installed_pair() == GPU_PAIR:
            when_imported(_SCHEDULER, tell_preempted)
    if cpu_requested():
        # Import verl first: importing the platform alone would load verl's plugin before the platform is complete.
        import verl  # noqa: F401

        from verl_ext import cpu

        when_imported("vllm.model_executor.layers.utils", cpu.keep_weights)
        when_imported(_EXPERTS, cpu.keep_expert_weights)


async def preemptions_of(engine: Any) -> int | None:
    """Requests that the core of ``engine`` (vLLM's ``AsyncLLM``) has preempted since its start; of several, the first's.

    None: it does not count them.
    """
    from vllm.v1.engine.core import EngineCore

    # The engine's process loads the same plugins as this one.
    return await engine.engine_core.call_utility_async(_UTILITY) if hasattr(EngineCore, _UTILITY) else None
