"""Checkpoints of a run, of either arm: verl's own and, beside it under PR, everything that is in flight.

``global_step_K/`` holds verl's files, written first, and ``partial_rollout/``: under PR the states of the manager and the
prompt source and, written last, the manifest. A checkpoint counts once its manifest lists all its files. Saving never
touches files that an older manifest lists, and old checkpoints are removed only after the next one is sealed. So a crash
at any moment leaves the newest whole checkpoint intact, and a state that cannot be saved takes no weights with it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any
from uuid import uuid4

from recipe.partial_rollout.checkpoint.lineage import SUPERSEDED, Lineage, set_aside
from recipe.partial_rollout.checkpoint.manifest import (
    DIRECTORY,
    Manifest,
    begin,
    newest_whole,
    seal,
    state_file,
    superseded,
    verify,
)
from recipe.partial_rollout.checkpoint.snapshot import TornCheckpointError, write_atomically
from recipe.partial_rollout.waits import one_line

logger = logging.getLogger(__name__)


def chosen_checkpoints(trainer: Any, *, critic: bool) -> RunCheckpoints:
    """What verl's ``config.trainer`` asks for; its keys of retention stay, in the config that is saved with the run."""
    keep = claim_retention(deepcopy(trainer), critic=critic)
    return RunCheckpoints(Path(trainer.default_local_dir), trainer.resume_mode, trainer.get("resume_from_path"), keep)


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
    """The checkpoints of one run directory, and which of them to resume.

    Its files are checked here, once. ``begin`` makes the choice the run's lineage, before the first ``save``.

    Args:
        run_dir: ``trainer.default_local_dir``.
        mode, path: ``trainer.resume_mode`` and ``resume_from_path``.
        keep: whole checkpoints to keep, the newest included, of those saved under this limit; None: all.

    Raises:
        TornCheckpointError: the checkpoint given by path is not whole, or checkpoints exist and none is whole.
        ForeignCheckpointError: something else made it.
    """

    def __init__(self, run_dir: Path, mode: str = "auto", path: str | None = None, keep: int | None = None) -> None:
        self.run_dir = run_dir
        self._keep = keep
        self._by_path = mode == "resume_path"
        self.lineage = Lineage(run_dir)
        self.chosen: Path | None = None
        """the checkpoint to resume; None: from scratch"""
        self.resumed: Manifest | None = None
        """its manifest"""
        if self._by_path:
            self.chosen = Path(str(path))
            self.resumed = verify(self.chosen)
        elif mode != "disable":
            self._choose_newest()
        self.made_of: dict[str, Any] = {}
        """what a run that resumes from its checkpoints is compared with, by key of the config; filled in from outside"""
        self._on_disk: int | None = None
        self._kept: list[int] = []
        """steps whose checkpoints ``keep`` applies to, oldest first; saved in each manifest for a process that resumes"""

    @property
    def resumed_step(self) -> int:
        """The step of the checkpoint to resume; 0 from scratch."""
        return self.resumed.step if self.resumed else 0

    def step_dir(self, step: int) -> Path:
        """verl's directory of the checkpoint of ``step``."""
        return self.run_dir / f"global_step_{step}"

    # -- what to go on from ------------------------------------------------------------------------------------------

    def _choose_newest(self) -> None:
        """The checkpoint of the present lineage that was sealed last: one of this directory, or the one it began from."""
        found, torn = newest_whole(self.run_dir, self.lineage)
        last = next((life for life in reversed(self.lineage.lives) if life.origin), None)
        if last is not None and (found is None or found.step < last.step):
            origin = Path(str(last.origin))
            if not origin.is_dir():
                raise TornCheckpointError(f"{origin}, which the run went on from, is gone; disable starts it over")
            self.chosen, self.resumed = origin, verify(origin)
            return
        if torn and found is None:
            raise TornCheckpointError(
                f"no checkpoint is whole: {', '.join(line.partition(';')[0] for line in torn)}; "
                f"trainer.resume_mode=disable starts the training over"
            )
        for line in torn:
            logger.warning("%s", line)
        self.chosen, self.resumed = found and self.step_dir(found.step), found

    @property
    def goes_on(self) -> bool:
        """Whether the checkpoint to resume leads to the present of this directory's run."""
        if self.chosen is None or self.resumed is None:
            return False
        return self.lineage.holds(self.resumed.life, self.resumed.step) if self.lineage.lives else self._is_here

    @property
    def _is_here(self) -> bool:
        return self.chosen is not None and self.chosen.resolve().parent == self.run_dir.resolve()

    def begin(self) -> Path:
        """Make the choice the run's lineage, then set aside the checkpoints that it supersedes; returns where they go.

        ``latest_checkpointed_iteration.txt``, which verl's own tools read, follows.
        """
        step = self.resumed_step
        newest = newest_whole(self.run_dir, self.lineage)[0] if self._by_path and self.goes_on else None
        branches = not self.goes_on or (newest is not None and newest.step != step)
        origin = None if self._is_here else self.chosen
        life = self.lineage.begin(self.resumed and self.resumed.life, step, origin=origin, branches=branches)
        aside = self.run_dir / SUPERSEDED / life.id
        set_aside(superseded(self.run_dir, self.lineage, unsealed=branches), aside)
        if self.resumed is not None and self.step_dir(step).is_dir():
            self._on_disk, self._kept = step, [*self.resumed.kept]
        self._track(self._on_disk)
        return aside

    def _track(self, step: int | None) -> None:
        tracker = self.run_dir / "latest_checkpointed_iteration.txt"
        if step is None:
            tracker.unlink(missing_ok=True)
        else:
            write_atomically(tracker, str(step).encode())

    def resumed_state(self, part: str) -> Path:
        """PR: the state file of ``part`` in the chosen checkpoint."""
        assert self.chosen is not None and self.resumed is not None
        return state_file(self.chosen, part, self.resumed.state)

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(
        self, step: int, in_flight: Mapping[str, Callable[[Path], object]], save_verl: Callable[[], object]
    ) -> None:
        """Write and seal the checkpoint of ``step``.

        Args:
            in_flight: PR: by part, what writes its state to the path that it is given.
            save_verl: writes verl's part; not called for the step that this process last saved or loaded: its weights
                are already on disk, and only what is in flight has changed since.

        Raises:
            RuntimeError: what is in flight cannot be saved; the weights are, and the message says what to do with them.
                Or another process has begun in the directory.
        """
        life = self.lineage.lives[-1]
        if Lineage(self.run_dir).lives[-1:] != [life]:
            raise RuntimeError(f"another process has begun to train in {self.run_dir}: step {step} is not saved")
        step_dir = self.step_dir(step)
        if step != self._on_disk:
            begin(step_dir)
            save_verl()
            # verl's save has named the step there; it counts from its seal on.
            self._track(self._on_disk)
        state = uuid4().hex[:8]
        try:
            for part, write in in_flight.items():
                write(state_file(step_dir, part, state))
        except Exception as error:
            raise RuntimeError(
                f"what is in flight at {step_dir.name} cannot be saved: {one_line(error)}; trainer.resume_mode=auto "
                f"resumes from the newest whole checkpoint, and `python -m verl.model_merger merge` makes a model of the "
                f"weights in {step_dir}/actor, to start another training from (actor_rollout_ref.model.path)"
            ) from error
        kept = [*(other for other in self._kept if other != step), step] if self._keep else []
        seal(step_dir, Manifest(step=step, life=life.id, state=state, made_of=self.made_of, kept=kept))
        self._track(step)
        self._on_disk, self._kept = step, kept
        self._tidy(step_dir, state)

    def _tidy(self, step_dir: Path, state: str) -> None:
        """Remove old checkpoints, replaced states, and unfinished checkpoints without a model."""
        if self._keep:
            for step in self._kept[: -self._keep]:
                shutil.rmtree(self.step_dir(step), ignore_errors=True)
            self._kept = self._kept[-self._keep :]
        for path in (step_dir / DIRECTORY).glob("*.state"):
            if not path.stem.endswith(state):
                path.unlink()
        for other in self.run_dir.glob("global_step_*"):
            if (other / DIRECTORY).is_dir() and not (other / "actor").is_dir():
                shutil.rmtree(other)
