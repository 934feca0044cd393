"""Prompts that were offered and are not admitted yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from recipe.partial_rollout.manager.types import Prompt, position_of


@dataclass(slots=True)
class Reserve:
    """A queue between the data source, which offers prompts in training order, and admission."""

    prompts: deque[Prompt] = field(default_factory=deque)
    last_offered: str | None = None
    """uid; prompts come in order, so this shows whether a prompt was already offered"""
    source_open: bool = True
    """whether more prompts may be offered"""
    source_left: int = 0
    """prompts left in the source, as last noted; only dynamic sampling uses it"""

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    def offer(self, prompts: Iterable[Prompt]) -> None:
        """Append ``prompts``.

        Raises:
            RuntimeError: a prompt does not come after the last one.
        """
        for prompt in prompts:
            last = self.last_offered
            if last is not None and prompt.position <= position_of(last):
                raise RuntimeError(f"prompt {prompt.uid} was offered twice, or out of order: the last one was {last}")
            self.prompts.append(prompt)
            self.last_offered = prompt.uid

    def note_source(self, left: int) -> None:
        """Note that the source has ``left`` more prompts to offer; if none, it is closed."""
        self.source_left = left
        if not left:
            self.close_source()

    def close_source(self) -> None:
        """Note that no more prompts will be offered."""
        self.source_open = False

    def pop(self) -> Prompt:
        """Take out the next prompt, to be admitted."""
        return self.prompts.popleft()
