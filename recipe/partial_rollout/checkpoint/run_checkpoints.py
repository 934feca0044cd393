"""Checkpoints of a partial-rollout run: verl's own checkpoint and, beside it, everything that is in flight.

``global_step_K/`` holds verl's files, written first, and ``partial_rollout/``: the states of the manager and the prompt
source and, written last, the manifest. A checkpoint counts once its manifest lists all its files. Saving never touches
files that an older manifest lists, and old checkpoints are removed only after the next one is sealed. So a crash at any
moment leaves the newest whole checkpoint intact, and a state that cannot be saved takes no weights with it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from recipe.partial_rollout.checkpoint.manifest import DIRECTORY, begin, newest_whole, seal, verify
from recipe.partial_rollout.checkpoint.snapshot import TornCheckpointError, read_snapshot, write_snapshot
from recipe.partial_rollout.waits import one_line

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedState:
    """What was in flight at one checkpoint."""

    manager: Path
    """file of the manager's state"""
    source: dict[str, Any]
    """for ``PromptSource.load_state_dict``"""


def claim_retention(trainer: Any, *, critic: bool) -> int | None:
    """Number of checkpoints to keep, from verl's keys of ``config.trainer``, which it clears; None: keep all.

    verl would remove the old actor at the end of its own save, before the new checkpoint is sealed; the recipe removes
    it afterwards. A checkpoint is kept or removed as a whole: with a critic, the larger of both keys counts.
    """
    limits = [trainer.get(f"max_{part}_ckpt_to_keep") for part in ("actor", "critic")[: 1 + critic]]
    if trainer.get("remove_previous_ckpt_in_save"):
        limits = [1]
        trainer.remove_previous_ckpt_in_save = False
    trainer.max_actor_ckpt_to_keep = trainer.max_critic_ckpt_to_keep = None
    limited = all(isinstance(limit, int) and limit > 0 for limit in limits)
    return max(limits) if limited else None


class RunCheckpoints:
    """The checkpoints of one run directory.

    Args:
        run_dir: ``trainer.default_local_dir``.
        keep: whole checkpoints to keep, the newest included, of those saved under this limit; None: all.
    """

    def __init__(self, run_dir: Path, keep: int | None = None) -> None:
        self._run_dir = run_dir
        self._keep = keep
        self._on_disk: int | None = None
        self._kept: list[int] = []
        """steps whose checkpoints ``keep`` applies to, oldest first; saved in each manifest for a process that resumes"""

    def step_dir(self, step: int) -> Path:
        """verl's directory of the checkpoint of ``step``."""
        return self._run_dir / f"global_step_{step}"

    def save(
        self,
        step: int,
        save_manager: Callable[[Path], object],
        source: dict[str, Any],
        save_verl: Callable[[], object],
        sizes: dict[str, int],
    ) -> None:
        """Write and seal the checkpoint of ``step``.

        Args:
            save_manager: writes the manager's state to the path it is given.
            source: ``PromptSource.state_dict``.
            save_verl: writes verl's part; not called for the step that this process last saved or loaded: its weights
                are already on disk, and only what is in flight has changed since.
            sizes: what a run that resumes from it must match (``PartialRolloutConfig.sizes``).

        Raises:
            RuntimeError: what is in flight cannot be saved; the weights are, and the message says what to do with them.
        """
        step_dir, ours = self.step_dir(step), self.step_dir(step) / DIRECTORY
        if step != self._on_disk:
            begin(step_dir)
            save_verl()
        old = frozenset(f"{DIRECTORY}/{path.name}" for path in ours.glob("*.state"))
        name = uuid4().hex[:8]
        try:
            save_manager(ours / f"manager-{name}.state")
            write_snapshot(ours / f"source-{name}.state", source)
        except Exception as error:
            raise RuntimeError(
                f"what is in flight at step {step} cannot be saved: {one_line(error)}; trainer.resume_mode=auto resumes "
                f"from the newest whole checkpoint, and `python -m verl.model_merger merge` makes a model of the weights "
                f"in {step_dir}/actor, to start another training from (actor_rollout_ref.model.path)"
            ) from error
        kept = [*(other for other in self._kept if other != step), step] if self._keep else []
        facts = {"state": name, "sizes": sizes, "kept": kept}
        seal(step_dir, step, facts, leave_out=old)
        self._on_disk, self._kept = step, kept
        self._tidy(step_dir, name)

    def _tidy(self, step_dir: Path, name: str) -> None:
        """Remove old checkpoints, replaced states, and unfinished checkpoints without a model."""
        if self._keep:
            for step in self._kept[: -self._keep]:
                shutil.rmtree(self.step_dir(step), ignore_errors=True)
            self._kept = self._kept[-self._keep :]
        for path in (step_dir / DIRECTORY).glob("*.state"):
            if not path.stem.endswith(name):
                path.unlink()
        for other in self._run_dir.glob("global_step_*"):
            if (other / DIRECTORY).is_dir() and not (other / "actor").is_dir():
                shutil.rmtree(other)

    def to_resume(self, mode: str, path: str | None) -> Path | None:
        """The checkpoint that ``trainer.resume_mode`` and ``resume_from_path`` ask for; None to start from scratch.

        Raises:
            TornCheckpointError: the checkpoint given by path is not whole, or checkpoints exist and none is whole.
            ForeignCheckpointError: a run without partial rollout made it.
        """
        if mode == "disable":
            return None
        if mode == "resume_path":
            chosen = Path(str(path))
            verify(chosen)
            return chosen
        found, torn = newest_whole(self._run_dir)
        if torn and found is None:
            raise TornCheckpointError(
                f"no checkpoint is whole: {', '.join(line.partition(';')[0] for line in torn)}; "
                f"trainer.resume_mode=disable starts the training over"
            )
        for line in torn:
            logger.warning("%s", line)
        return found

    def take(self, step_dir: Path) -> SavedState:
        """The state in the checkpoint that this process resumes from."""
        manifest = verify(step_dir)
        if step_dir.resolve() == self.step_dir(manifest.step).resolve():
            self._on_disk = manifest.step
            self._kept = [*manifest.facts.get("kept", ())]
        name = manifest.facts["state"]
        ours = step_dir / DIRECTORY
        return SavedState(ours / f"manager-{name}.state", read_snapshot(ours / f"source-{name}.state"))
