"""What the runs of a report are called."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipe.partial_rollout.tools.run_record import RunRecord


def names_of(runs: Sequence[RunRecord]) -> list[str]:
    """Their arms if these differ; else what differs in their directories; letters if nothing does."""
    arms = [str(run.settings.arm) for run in runs]
    if _all_differ(arms):
        return arms
    found = differing_parts([run.directory for run in runs])
    return found if _all_differ(found) else [_letter(i) for i in range(len(runs))]


def differing_parts(directories: Sequence[str]) -> list[str]:
    """The paths without the parts that they share at the start and at the end.

    >>> differing_parts(["out/noPR/seed_1", "out/PR_bounded/seed_1", "out/PR/seed_1"])
    ['noPR', 'PR_bounded', 'PR']
    """
    paths = [Path(directory).absolute().parts for directory in directories]
    start = _shared(paths)
    rest = [path[start:] for path in paths]
    end = _shared([path[::-1] for path in rest])
    return ["/".join(path[: len(path) - end]) for path in rest]


def _shared(paths: Sequence[tuple[str, ...]]) -> int:
    """Number of first parts that all have in common."""
    count = 0
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        count += 1
    return count


def _all_differ(names: Sequence[str]) -> bool:
    return all(names) and len(set(names)) == len(names)


def _letter(index: int) -> str:
    letters = string.ascii_uppercase
    return letters[index % 26] * (index // 26 + 1)
