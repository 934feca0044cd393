"""Entry point ``vllm.general_plugins``: vLLM calls ``register`` in every one of its processes before a model loads.

Its patches in the recipe's processes:

- ``name_causes``: a weight sync that fails says why.
- ``count_preempted``, ``answer_in_core``: the scheduler counts the requests that it preempts for want of KV blocks.
  vLLM counts only with its statistics. These cost time in every step, and verl switches them off
  (``rollout.disable_log_stats=True``); a stat-logger plugin would switch them on in every engine. They also include
  requests that vLLM preempts to empty its cache during a pause, which is no want of blocks. It may go when vLLM tells
  the two apart.
- ``report_preempted``: the scheduler of 0.24.0 reports to its workers the requests that an emptied cache preempts. It
  may go with 0.24.0.
- ``take_wait``: verl 0.9.1 can abort requests of vLLM 0.32. It may go when verl passes ``mode``.
- ``find_mapper``: verl 0.9.1 can load LoRA adapters into a vLLM that has renamed the mapper of their names. It may go
  when verl asks for ``get_rename_mapper``.

Each patch looks for the name or the argument that it changes, and does nothing if vLLM does not need it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from verl_ext.guard import around, cpu_requested, in_recipe, when_imported

_SCHEDULER, _CORE, _FRONT = "vllm.v1.core.sched.scheduler", "vllm.v1.engine.core", "vllm.v1.engine.async_llm"
_MODELS = "vllm.model_executor.models.utils"
_EXPERTS = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
PIECEWISE = "verl_ext.piecewise_scheduler.piecewise_scheduler"
"""value of vLLM's option ``scheduler_cls`` for tokens in pieces"""
_UTILITY = "partial_rollout_preemptions"
_WAIT = "wait_for_inflight_requests"


def count_preempted(module: Any) -> None:
    """Let the scheduler count in ``preempted`` the requests that it preempts while it is not paused."""
    if not hasattr(module.Scheduler, "_preempt_request"):
        return
    from vllm.v1.core.sched.interface import PauseState

    module.Scheduler.preempted = 0

    @around(module.Scheduler, "_preempt_request")
    def _preempt_request(vllms: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        self.preempted += self.pause_state is PauseState.UNPAUSED
        return vllms(self, *args, **kwargs)


def answer_in_core(module: Any) -> None:
    """Let the engine core answer ``preemptions_of``."""
    setattr(module.EngineCore, _UTILITY, lambda core: getattr(core.scheduler, "preempted", None))


def report_preempted(module: Any) -> None:
    """Let the scheduler tell its workers which requests an emptied KV cache preempts, as releases after 0.24.0 do.

    A hold with ``resume_kv=recompute`` empties the cache, and so preempts every running request. 0.24.0 reports only
    those that it preempts while it plans a step. Model runner V2 has as many places as seats, and keeps the places of
    the requests that are not reported. A request of better priority that arrives during the hold then finds no place,
    and the engine dies ("No free indices").
    """
    # The set in which later releases keep them.
    if "reset_preempted_req_ids" in inspect.getsource(module.Scheduler):
        return

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


def name_causes(module: Any) -> None:
    """Let a weight sync that fails in a worker name all its errors, the first one first.

    vLLM passes the words of the last error on, without its type. On a CPU that error is verl's receiver's: as it gives
    up for another error, it closes memory that is still in use ("cannot close exported pointers exist"). It may go when
    the receiver closes nothing that is in use.
    """

    @around(module.vLLMColocateWorkerExtension, "update_weights_from_ipc")
    def update_weights_from_ipc(verls: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return verls(self, *args, **kwargs)
        except Exception as error:
            raise RuntimeError(", then ".join(reversed([*_chain(error)]))) from error


def _chain(error: BaseException | None) -> Iterator[str]:
    """Yield type and message of ``error``, then of the error that led to it, and so on."""
    while error is not None:
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__ or error.__context__


def take_wait(module: Any) -> None:
    """Let ``AsyncLLM.pause_generation`` take verl's ``wait_for_inflight_requests``, which 0.32 has replaced by ``mode``."""
    if _WAIT in inspect.signature(module.AsyncLLM.pause_generation).parameters:
        return

    @around(module.AsyncLLM, "pause_generation")
    def pause_generation(vllms: Any, self: Any, **options: Any) -> Any:
        if options.pop(_WAIT, False):
            options["mode"] = "wait"
        return vllms(self, **options)


def find_mapper(module: Any) -> None:
    """Let verl find ``WeightsMapper.get_unstacked_mapper``, which later releases call ``get_rename_mapper``."""
    mapper = module.WeightsMapper
    if not hasattr(mapper, "get_unstacked_mapper") and hasattr(mapper, "get_rename_mapper"):
        mapper.get_unstacked_mapper = mapper.get_rename_mapper


def register() -> None:
    """Patch vLLM in the recipe's processes, and its layers on the CPU platform."""
    if in_recipe():
        when_imported(_SCHEDULER, count_preempted)
        when_imported(_SCHEDULER, report_preempted)
        when_imported(_CORE, answer_in_core)
        when_imported("verl.workers.rollout.vllm_rollout.utils", name_causes)
        when_imported(_FRONT, take_wait)
        when_imported(_MODELS, find_mapper)
    if cpu_requested():
        # Import verl first: importing the platform alone would load verl's plugin before the platform is complete.
        import verl  # noqa: F401

        from verl_ext import cpu

        when_imported("vllm.model_executor.layers.utils", cpu.keep_weights)
        when_imported(_EXPERTS, cpu.keep_expert_weights)


async def preemptions_of(engine: Any) -> int | None:
    """Return how many requests the core of ``engine``, an ``AsyncLLM``, has preempted for want of KV blocks so far.

    If there are several cores, it is the count of the first. None: the core does not count them.
    """
    from vllm.v1.engine.core import EngineCore

    # The engine's process loads the same plugins as this one.
    return await engine.engine_core.call_utility_async(_UTILITY) if hasattr(EngineCore, _UTILITY) else None
