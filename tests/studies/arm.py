"""One way to train, as data."""

from __future__ import annotations

from dataclasses import dataclass

MAIN = ("recipe.partial_rollout.main_ppo",)
"""module and first arguments of the recipe's own training"""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train."""

    name: str
    """on the command line, and of the directory that its runs lie in"""
    caption: str
    """in tables and pictures"""
    overrides: tuple[str, ...]
    """hydra's; they win over the study's"""
    program: tuple[str, ...] = MAIN
    """module that trains, and its first arguments"""


BASELINE = Arm("noPR", "noPR", ("partial_rollout.enable=False",))
"""what all other arms are compared with: verl's own synchronous rollout"""
