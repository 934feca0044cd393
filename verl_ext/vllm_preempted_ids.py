"""Patch: vLLM 0.24.0 tells its workers of the requests that an emptied KV cache preempts, as later releases do.

A hold with ``resume_kv=recompute`` empties the cache, and so preempts every running request. The scheduler reports only
those that it preempts while it plans a step. So model runner V2, which has as many places as seats, keeps the places of
the others. A request of better priority that arrives during the hold then finds no place, and the engine dies
("No free indices").
"""

from __future__ import annotations

import functools
from typing import Any

import wrapt

from verl_ext.guard import GPU_PAIR, installed_pair

_TARGET = "vllm.v1.core.sched.scheduler"


def _patch(module: Any) -> None:
    scheduler = module.Scheduler
    reset, schedule = scheduler.reset_prefix_cache, scheduler.schedule
    if hasattr(reset, "__wrapped__"):
        return

    @functools.wraps(reset)
    def reset_prefix_cache(self: Any, reset_running_requests: bool = False, *args: Any, **kwargs: Any) -> bool:
        if reset_running_requests:
            self._untold = getattr(self, "_untold", set()) | {request.request_id for request in self.running}
        return reset(self, reset_running_requests, *args, **kwargs)

    @functools.wraps(schedule)
    def schedule_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        output.preempted_req_ids = (output.preempted_req_ids or set()) | self.__dict__.pop("_untold", set())
        return output

    scheduler.reset_prefix_cache, scheduler.schedule = reset_prefix_cache, schedule_and_tell


def install() -> None:
    """Wait for the scheduler, where the release is the one that needs it; others are left alone."""
    if installed_pair() == GPU_PAIR:
        wrapt.register_post_import_hook(_patch, _TARGET)
