"""What ``PromptsManager`` knows and a checkpoint keeps.

Workers, their slots and the claim queue are not here: after a crash nobody owns anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from recipe.partial_rollout.manager.groups import Groups
from recipe.partial_rollout.manager.reserve import Reserve


@dataclass(slots=True)
class ManagerState:
    """All prompts between the data source and the trainer."""

    version: int = 0
    """of the weights that decode what is claimed"""
    reserve: Reserve = field(default_factory=Reserve)
    groups: Groups = field(default_factory=Groups)
    paced: int = 0
    """prompts that admission held back at the start of the last round"""
