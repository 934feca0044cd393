"""Entry point ``vllm.general_plugins``: vLLM calls ``register`` in every one of its processes before a model loads.

A weight sync that fails says why (``name_causes``).

Its patches of the scheduler: it counts the requests that it preempts for want of KV blocks. With 0.24.0 it also reports
requests to its workers that an emptied cache preempts. vLLM counts with its statistics only. They cost every step, verl
switches them off (``rollout.disable_log_stats=True``), and a stat-logger plugin would switch them on in every engine. They
also count the requests that vLLM preempts to empty its cache while the scheduler is paused: a hold, not a want of blocks.
The count may go when vLLM's tells the two apart; the report, with 0.24.0.

Its patch of the front end lets verl 0.9.1 abort requests of vLLM 0.32. It may go when verl passes ``mode``.

Each patch looks for the name or the argument that it is about, and changes nothing where vLLM does not need it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from verl_ext.guard import around, cpu_requested, in_recipe, when_imported

_SCHEDULER, _CORE, _FRONT = "vllm.v1.core.sched.scheduler", "vllm.v1.engine.core", "vllm.v1.engine.async_llm"
_EXPERTS = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
PIECEWISE = "verl_ext.piecewise_scheduler.piecewise_scheduler"
"""what ``scheduler_cls`` is to be"""
_UTILITY = "partial_rollout_preemptions"
_WAIT = "wait_for_inflight_requests"


def count_preempted(module: Any) -> None:
    """The scheduler counts in ``preempted``; this costs nothing while nothing is preempted."""
    if not hasattr(module.Scheduler, "_preempt_request"):
        return
    from vllm.v1.core.sched.interface import PauseState

    module.Scheduler.preempted = 0

    @around(module.Scheduler, "_preempt_request")
    def _preempt_request(vllms: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        self.preempted += self.pause_state is PauseState.UNPAUSED
        return vllms(self, *args, **kwargs)


def answer_in_core(module: Any) -> None:
    """The engine core answers ``preemptions_of``."""
    setattr(module.EngineCore, _UTILITY, lambda core: getattr(core.scheduler, "preempted", None))


def report_preempted(module: Any) -> None:
    """The scheduler tells its workers of the requests that an emptied KV cache preempts, as releases after 0.24.0 do.

    A hold with ``resume_kv=recompute`` empties the cache, and so preempts every running request. 0.24.0 reports only those
    that it preempts while it plans a step. So model runner V2, which has as many places as seats, keeps the places of the
    others. A request of better priority that arrives during the hold then finds no place, and the engine dies ("No free
    indices").
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


def take_wait(module: Any) -> None:
    """``AsyncLLM.pause_generation`` takes the argument by which verl asks for an abort, which 0.32 dropped for ``mode``."""
    if _WAIT in inspect.signature(module.AsyncLLM.pause_generation).parameters:
        return

    @around(module.AsyncLLM, "pause_generation")
    def pause_generation(vllms: Any, self: Any, **options: Any) -> Any:
        if options.pop(_WAIT, False):
            options["mode"] = "wait"
        return vllms(self, **options)


def register() -> None:
    """Patch vLLM in the recipe's processes, and its layers on the CPU platform."""
    if in_recipe():
        when_imported(_SCHEDULER, count_preempted)
        when_imported(_SCHEDULER, report_preempted)
        when_imported(_CORE, answer_in_core)
        when_imported("verl.workers.rollout.vllm_rollout.utils", name_causes)
        when_imported(_FRONT, take_wait)
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
