"""The trainer's wait for a complete batch, in both placements.

Meanwhile dead workers are replaced, a dead trainer or the user's stop ends the wait, engines that decode keep the stall
deadline away, and prompts replace the groups that dynamic sampling filters.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from recipe.partial_rollout.manager.messages import PromptsWanted
from recipe.partial_rollout.rollout.engine_watch import while_decoding
from recipe.partial_rollout.rollout.supervision import Supervision
from recipe.partial_rollout.waits import result_of

if TYPE_CHECKING:
    from recipe.partial_rollout.rollout.rollout_context import RolloutContext

T = TypeVar("T")


class BatchWait:
    """Waits for batches.

    Args:
        context: parts of the trainer.
        manager: handle of the manager actor.
        supervision: of the workers.
    """

    def __init__(self, context: RolloutContext, manager: Any, supervision: Supervision) -> None:
        self._context = context
        self._manager = manager
        self._supervision = supervision

    async def until(self, ask: Callable[[], Awaitable[T | PromptsWanted]]) -> T:
        """The answer of the manager to ``ask``, which is asked again whenever the manager wants prompts first.

        Raises:
            RolloutFailedError: a worker, replica, reward function or the manager failed; the message names it.
            TrainerLostError: a trainer died.
            StopTraining: the user asked for it.
        """
        return await self._context.trainers.alive_during(self._asked(ask), "the round")

    async def _asked(self, ask: Callable[[], Awaitable[T | PromptsWanted]]) -> T:
        context = self._context
        while True:
            waiting = while_decoding(
                ask(), self._manager, context.control.running_tokens, context.settings.deadlines.stall_s
            )
            answer = await self._supervision.during(context.stop.unless_stopped(waiting), "the round")
            if not isinstance(answer, PromptsWanted):
                return answer
            source = context.source
            assert source is not None
            prompts = source.take(answer.count)
            await self._supervision.during(
                result_of(self._manager.offer.remote(prompts, source.left)), "offering prompts in the round"
            )
