"""The state of ``PromptsManager`` that a checkpoint keeps.

Workers, their slots and the claim queue are not part of it: after a crash no sample has an owner.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from recipe.partial_rollout.manager.groups import Groups
from recipe.partial_rollout.manager.reserve import Reserve


@dataclass(slots=True)
class ManagerState:
    """All prompts between the data source and the trainer."""

    version: int = 0
    """policy version that decodes the claimed samples"""
    reserve: Reserve = field(default_factory=Reserve)
    groups: Groups = field(default_factory=Groups)
    paced: int = 0
    """prompts that admission held back at the start of the last round"""

    def advance(self, version: int) -> None:
        """Samples claimed from here on are decoded by the weights of ``version``.

        Raises:
            RuntimeError: it is older than the present one.
        """
        if version < self.version:
            raise RuntimeError(f"policy version went from {self.version} back to {version}")
        self.version = version
