"""Patch: vLLM's engine core counts the requests that it preempts for want of KV blocks, and says how many.

vLLM counts them with its statistics only, which verl switches off (``rollout.disable_log_stats=True``) and which cost
every step. This costs nothing while nothing is preempted. What is preempted while the scheduler is paused does not count:
vLLM empties its cache that way. A pair of vLLM and torch that is not tested is left alone, with
a warning; then there is no count.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import wrapt

from verl_ext.guard import TESTED, installed_pair

_SCHEDULER, _CORE = "vllm.v1.core.sched.scheduler", "vllm.v1.engine.core"
_UTILITY = "partial_rollout_preemptions"

logger = logging.getLogger(__name__)


def _count_in_scheduler(module: Any) -> None:
    if hasattr(module.Scheduler, "preempted"):
        return
    from vllm.v1.core.sched.interface import PauseState

    original = module.Scheduler._preempt_request

    @functools.wraps(original)
    def _preempt_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.preempted += self.pause_state is PauseState.UNPAUSED
        return original(self, *args, **kwargs)

    module.Scheduler.preempted = 0
    module.Scheduler._preempt_request = _preempt_request


def _answer_in_core(module: Any) -> None:
    setattr(module.EngineCore, _UTILITY, lambda core: getattr(core.scheduler, "preempted", None))


def install() -> None:
    """Count in a process that may hold an engine core, where vLLM and torch are a tested pair."""
    found = installed_pair()
    if found not in TESTED:
        logger.warning("preemptions are not counted: written for %s, found %s", ", or ".join(map(str, TESTED)), found)
        return
    wrapt.register_post_import_hook(_count_in_scheduler, _SCHEDULER)
    wrapt.register_post_import_hook(_answer_in_core, _CORE)


async def preemptions_of(engine: Any) -> int | None:
    """Requests that the core of ``engine`` (vLLM's ``AsyncLLM``) has preempted since its start; of several, the first's.

    None: it does not count them.
    """
    from vllm.v1.engine.core import EngineCore

    # The engine's process loads the same plugins as this one.
    return await engine.engine_core.call_utility_async(_UTILITY) if hasattr(EngineCore, _UTILITY) else None
