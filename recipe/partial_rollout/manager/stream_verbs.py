"""What the trainer asks of the manager actor in separate placement, whose round does not end."""

from __future__ import annotations

from collections.abc import Callable

from recipe.partial_rollout.manager import garbage
from recipe.partial_rollout.manager.condition import ManagerCondition
from recipe.partial_rollout.manager.messages import PromptsWanted, RoundStart
from recipe.partial_rollout.manager.output_store import OutputStore
from recipe.partial_rollout.manager.prompts_manager import PromptsManager
from recipe.partial_rollout.manager.types import FinishedOutput, Prompt, TakenGroup


class StreamVerbs:
    """The part of ``ManagerActor`` that ``rollout/stream.py`` calls."""

    _changed: ManagerCondition
    _manager: PromptsManager
    _store: OutputStore
    _suspended: bool
    _unflushed: set[str]

    def _begin(self, prompts: list[Prompt], source_left: int, admit: Callable[[], int]) -> RoundStart:
        raise NotImplementedError

    async def _until_complete(self) -> PromptsWanted | None:
        raise NotImplementedError

    async def next_version(self, version: int, prompts: list[Prompt], source_left: int) -> RoundStart:
        """All engines hold ``version``: take new prompts, admit this version's groups; whatever runs, runs on.

        ``source_left``: see ``prepare_round``.

        Raises:
            RuntimeError: see ``Round.next_version``.
        """
        async with self._changed:
            return self._begin(prompts, source_left, lambda: self._manager.next_version(version, ()))

    async def next_batch(self) -> list[TakenGroup[FinishedOutput]] | PromptsWanted:
        """Wait until the batch of this version is complete, and take it; all other samples run on.

        Returns ``PromptsWanted`` as ``wait_round`` does, and no groups if the round was suspended. The caller fetches the
        outputs from the store. A caller that does not wait for the answer loses nothing: a checkpoint has the groups.

        Raises:
            RuntimeError: the trainer has this version's batch already, or there is no version yet.
        """
        async with self._changed:
            if not self._suspended:
                self._manager.require_open("next_batch")
            if wanted := await self._until_complete():
                return wanted
            if self._suspended:
                return []
            self._changed.raise_failure()
            self._store.seal()
            taken = self._manager.next_batch()
            garbage.release()
            self._manager.admit()
            self._changed.notify()
            return taken
