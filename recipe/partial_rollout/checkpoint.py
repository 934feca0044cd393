"""Checkpoints of a partial-rollout run: verl's own, and beside it everything that is in flight.

``global_step_K/`` holds verl's files and ``partial_rollout/``: the manager's state, the prompt source's and, written last,
the manifest. A checkpoint counts once its manifest names every file of it; saving never touches what an older manifest
names, so that a crash at any moment leaves the newest whole checkpoint whole.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from recipe.partial_rollout.manifest import newest_whole, seal, verify
from recipe.partial_rollout.snapshot import read_snapshot, write_snapshot

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedState:
    """Where the state files of one checkpoint are."""

    manager: Path
    source: Path


class RunCheckpoints:
    """The checkpoints of one run directory.

    Args:
        run_dir: ``trainer.default_local_dir``.
        checksum_all: whether verl's files are summed too; otherwise a manifest has their sizes alone.
    """

    def __init__(self, run_dir: Path, *, checksum_all: bool) -> None:
        self._run_dir = run_dir
        self._checksum_all = checksum_all

    def step_dir(self, step: int) -> Path:
        """verl's directory of the checkpoint of ``step``."""
        return self._run_dir / f"global_step_{step}"

    def save(
        self, step: int, save_manager: Callable[[Path], object], source: dict[str, Any], save_verl: Callable[[], object]
    ) -> None:
        """Write and seal the checkpoint of ``step``.

        Args:
            save_manager: writes the manager's state to the path it is given.
            source: ``PromptSource.state_dict``.
            save_verl: writes verl's part; not called when this step's is there already, as its weights are the same.
        """
        step_dir = self.step_dir(step)
        ours = step_dir / "partial_rollout"
        ours.mkdir(parents=True, exist_ok=True)
        name = uuid4().hex[:8]
        saved = SavedState(ours / f"manager-{name}.state", ours / f"source-{name}.state")
        save_manager(saved.manager)
        write_snapshot(saved.source, source)
        if not self._sealed(step_dir):
            save_verl()
        seal(step_dir, step, {"state": name}, checksum_all=self._checksum_all)
        self._tidy(step_dir, name)

    def _sealed(self, step_dir: Path) -> bool:
        try:
            verify(step_dir)
        except (OSError, ValueError, RuntimeError):
            return False
        return True

    def _tidy(self, step_dir: Path, name: str) -> None:
        """Remove states that no manifest names: replaced ones, and those whose model verl has removed."""
        for path in (step_dir / "partial_rollout").glob("*.state"):
            if not path.stem.endswith(name):
                path.unlink()
        for other in self._run_dir.glob("global_step_*"):
            if (other / "partial_rollout").is_dir() and not (other / "actor").is_dir():
                shutil.rmtree(other)

    def to_resume(self, mode: str, path: str | None) -> Path | None:
        """The checkpoint that ``trainer.resume_mode`` and ``resume_from_path`` ask for; None to start from scratch.

        Raises:
            TornCheckpointError: the one asked for by path is not whole.
            ForeignCheckpointError: a run without partial rollout made it.
        """
        if mode == "disable":
            return None
        if mode == "resume_path":
            chosen = Path(str(path))
            verify(chosen)
            return chosen
        found, torn = newest_whole(self._run_dir)
        for line in torn:
            logger.warning("%s", line)
        return found

    def state_of(self, step_dir: Path) -> SavedState:
        """The state files that the manifest of ``step_dir`` names."""
        name = verify(step_dir).facts["state"]
        ours = step_dir / "partial_rollout"
        return SavedState(ours / f"manager-{name}.state", ours / f"source-{name}.state")

    @staticmethod
    def read_source(state: SavedState) -> dict[str, Any]:
        """``PromptSource.load_state_dict``'s argument."""
        return read_snapshot(state.source)
