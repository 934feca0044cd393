"""Checkpoints of a run, under PR and noPR: verl's files and, under PR, everything that is in flight.

``global_step_K/`` holds verl's files, written first, and a directory ``partial_rollout/``. That has the states of the
manager and the prompt source (PR only) and, written last, the manifest. A checkpoint counts once its manifest lists all
its files. Saving a step leaves all other checkpoints as they are, and old ones are removed only after the new one is
sealed. So a crash at any moment leaves the newest whole checkpoint intact. If a state cannot be saved, the weights of
that step are on disk nevertheless.

verl's file ``latest_checkpointed_iteration.txt`` (the tracker) says which step the run has reached. Checkpoints of
later steps are ignored. A start that continues the run first writes the step that it resumes into the tracker. Then it
moves the whole checkpoints of later steps to ``superseded/ID/`` (each start has its own ID), where the recipe neither
reads nor deletes them::

    global_step_2  global_step_4  global_step_6      the tracker names 6
    resume_path=.../global_step_4                    the tracker names 4, global_step_6 is moved aside

If a start is killed between the two, the next start moves the rest.

A start from scratch, or from another run's checkpoint, first writes 0 into the tracker and moves every old checkpoint
aside. For another run's checkpoint it then makes a link to it in the directory and writes its step into the tracker, so
that ``auto`` and verl's own tools find it.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from errno import ENOLCK, EOPNOTSUPP
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import FileLock, SoftFileLock, Timeout
from msgspec import structs

from recipe.partial_rollout.checkpoint.manifest import (
    DIRECTORY,
    STEP,
    CheckpointError,
    Manifest,
    TornCheckpointError,
    begin,
    seal,
    state_file,
    verify,
    write_atomically,
    write_manifest,
)
from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.terminal import say
from recipe.partial_rollout.waits import one_line

TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file of the newest step: verl's save writes it, and verl's own tools read it"""
_MODEL = "actor"
"""verl's directory of a model within a step directory"""
_LOCK, _SUPERSEDED = "run.lock", "superseded"


def writable(folder: Any) -> bool:
    """Return whether files can be made in ``folder`` or, if it does not exist yet, in its nearest existing parent."""
    try:
        path = Path(str(folder)).expanduser().absolute()
        there = next(each for each in (path, *path.parents) if each.exists())
        with tempfile.TemporaryDirectory(dir=there):
            return True
    except OSError:
        return False


def claim_retention(trainer: Any, *, critic: bool) -> int | None:
    """Return the number of checkpoints to keep (None: all), and set verl's keys for it in ``trainer`` to None.

    The keys are ``max_actor_ckpt_to_keep`` and ``max_critic_ckpt_to_keep``. verl would remove the old actor at the end
    of its own save, before the new checkpoint is sealed; the recipe removes it afterwards. A checkpoint is kept or
    removed as a whole: with a critic, the larger of both keys counts.
    """
    limits = [trainer.get(f"max_{part}_ckpt_to_keep") for part in ("actor", "critic")[: 1 + critic]]
    trainer.max_actor_ckpt_to_keep = trainer.max_critic_ckpt_to_keep = None
    limited = all(isinstance(limit, int) and limit > 0 for limit in limits)
    return max(limits) if limited else None


class RunCheckpoints:
    """The checkpoints of one run directory. The constructor chooses the one to resume, and verifies its files once.

    ``begin`` writes this choice into the tracker. Call it before the first ``save``; the directory must exist by then.

    Args:
        run_dir: ``trainer.default_local_dir``.
        mode, path: ``trainer.resume_mode`` and ``resume_from_path``.
        keep: number of whole checkpoints to keep, the newest included; None: all. A checkpoint that was saved without a
            limit is never removed.

    Raises:
        TornCheckpointError: the checkpoint given by path is not whole, or checkpoints exist and none is whole.
        CheckpointError: this version of the recipe did not make the checkpoint to resume.
    """

    def __init__(self, run_dir: Path, mode: str = "auto", path: str | None = None, keep: int | None = None) -> None:
        # Absolute: the manager's process writes there as well, and may have another working directory.
        self.run_dir = run_dir.absolute()
        self._keep = keep
        self.run = uuid4().hex[:16]
        """id of the run for trackers; ``begin`` takes over the id of a run that continues"""
        self.chosen: Path | None = None
        """the checkpoint to resume; None: from scratch"""
        self.resumed: Manifest | None = None
        """its manifest"""
        self._found = sorted(self._steps())
        if mode == "resume_path":
            self.chosen = Path(str(path))
            if self.chosen.parent.resolve() == self.run_dir.resolve():
                # Whichever link leads there: below, paths of this directory are compared.
                self.chosen = self.run_dir / self.chosen.name
            self.resumed = verify(self.chosen)
        elif mode != "disable":
            self._choose_newest()
        self.made_of: dict[str, Any] = {}
        """facts that a run must match to resume from its checkpoints, by key of the config; the preflight sets them"""
        self._on_disk: int | None = None
        self._kept: list[int] = []
        """steps of the checkpoints saved under a limit (``keep``), oldest first; each manifest has them, for a resume
        """

    @property
    def resumed_step(self) -> int:
        """The step of the checkpoint to resume; 0 from scratch."""
        return self.resumed.step if self.resumed else 0

    def step_dir(self, step: int) -> Path:
        """verl's directory of the checkpoint of ``step``."""
        return self.run_dir / f"global_step_{step}"

    def _steps(self) -> list[tuple[int, Path]]:
        found = ((STEP.fullmatch(path.name), path) for path in self.run_dir.glob("global_step_*"))
        return [(int(match[1]), path) for match, path in found if match and path.is_dir()]

    # -- the lineage ---------------------------------------------------------------------------------------------------

    def _tracked(self) -> int | None:
        """The step that the tracker names; None if there is no tracker, or if verl's write of it was cut off."""
        path = self.run_dir / TRACKER
        try:
            return int(path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}); remove it") from None

    def _choose_newest(self) -> None:
        """Choose the checkpoint of the step that the tracker names, or the newest whole one before it."""
        tracked, torn = self._tracked(), []
        for step, step_dir in sorted(self._steps(), reverse=True):
            if tracked is not None and step > tracked:
                continue
            try:
                self.resumed, self.chosen = verify(step_dir), step_dir
                break
            except TornCheckpointError as error:
                torn.append(str(error))
        if self.chosen is None and (torn or tracked):
            found = (
                ", ".join(line.partition(";")[0] for line in torn) or f"{TRACKER} names step {tracked}, which is gone"
            )
            raise TornCheckpointError(
                f"{self.run_dir} has no whole checkpoint: {found}; trainer.resume_mode=resume_path with "
                "trainer.resume_from_path resumes another run's, trainer.resume_mode=disable starts the training over"
            )
        for line in torn:
            say(line, error=True)

    @property
    def continues(self) -> bool:
        """Whether the run of this directory continues, instead of starting over or from another run's checkpoint."""
        if self.chosen is None or self.chosen.parent.resolve() != self.run_dir.resolve():
            return False
        tracked = self._tracked()
        return tracked is None or self.resumed_step <= tracked

    def begin(self) -> Path:
        """Write the step to resume into the tracker, then move the checkpoints of later steps aside.

        A run that starts over, or from another run's checkpoint, moves all checkpoints of its directory.

        Returns:
            the folder for what is moved; it need not exist.

        Raises:
            ConfigError: another process has saved or removed checkpoints since the constructor chose the one to resume.
        """
        if sorted(self._steps()) != self._found:
            words = (
                "a directory in which nothing else trains: its checkpoints have changed during this start; start again"
            )
            raise fail("trainer.default_local_dir", self.run_dir, words)
        step, continues = self.resumed_step, self.continues
        aside = self.run_dir / _SUPERSEDED / self.run
        # A run that does not continue counts from 0 until the checkpoint that it begins from is in its place.
        reached = step if continues else 0
        beyond = [step_dir for other, step_dir in self._steps() if other > reached and step_dir != self.chosen]
        # A run that continues will overwrite the torn checkpoints, which a kill during a save left: they stay in place.
        superseded = [
            step_dir for step_dir in beyond if not (continues and isinstance(_fault(step_dir), TornCheckpointError))
        ]
        # The tracker first: if this start is killed below, the next one follows its choice and moves the rest.
        self._track(reached)
        if continues and self.chosen is not None and self.resumed is not None:
            # A link leads to a checkpoint that this run began from. It may have been moved aside in this directory.
            own = not self.chosen.is_symlink()
            if superseded:
                # A new tracker id: trackers ignore a step that they already have.
                self.resumed = structs.replace(self.resumed, run=self.run)
                write_manifest(self.chosen, self.resumed)
            elif own and self.resumed.run_dir == str(self.run_dir.resolve()):
                self.run = self.resumed.run
            if own and self.chosen.absolute() == self.step_dir(step):
                self._on_disk, self._kept = step, [*self.resumed.kept]
        set_aside(superseded, aside)
        if self.chosen is not None and not continues:
            place = self.step_dir(step)
            if not place.exists():
                # A link to a checkpoint that is gone may be there.
                place.unlink(missing_ok=True)
                place.symlink_to(self.chosen.resolve())
            self._track(step)
        return aside

    def _track(self, step: int) -> None:
        write_atomically(self.run_dir / TRACKER, str(step).encode())

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
            in_flight: PR: a function for each part, which writes its state to the path that it is given.
            save_verl: writes verl's part; not called for the step that this process last saved or loaded, if it is
                still whole: its weights are already on disk, and only what is in flight has changed since.

        Raises:
            RuntimeError: verl's files are not in the step directory, or a state cannot be saved. In the second case the
                weights are saved, and the message says how to use them.
        """
        step_dir = self.step_dir(step)
        # A stop saves the step again that was saved last: its weights would be the same bytes.
        if step != self._on_disk or _fault(step_dir) is not None:
            if step_dir.is_symlink():
                # Another run's checkpoint stays as it is.
                step_dir.unlink()
            begin(step_dir)
            save_verl()
            if not any(path.is_file() for path in (step_dir / _MODEL).rglob("*")):
                raise RuntimeError(
                    f"step {step} is not saved: the trainer's workers left nothing in {step_dir}/{_MODEL} for this process "
                    "to see; trainer.default_local_dir must be a directory that all nodes share"
                )
        # New file names: the step may have a manifest already, whose state files must stay valid until the next seal.
        state = uuid4().hex[:8]
        try:
            for part, write in in_flight.items():
                write(state_file(step_dir, part, state))
        except Exception as error:
            raise RuntimeError(
                f"the samples in flight and the data's position at {step_dir.name} cannot be saved: {one_line(error)}; "
                f"trainer.resume_mode=auto resumes from the newest whole checkpoint, or `python -m verl.model_merger "
                f"merge` makes a model of the weights in {step_dir}/actor, to start another training from "
                f"(actor_rollout_ref.model.path)"
            ) from error
        kept = [*(other for other in self._kept if other != step), step] if self._keep else []
        run_dir = str(self.run_dir.resolve())
        manifest = Manifest(step=step, run=self.run, run_dir=run_dir, state=state, made_of=self.made_of, kept=kept)
        seal(step_dir, manifest)
        self._track(step)
        self._on_disk, self._kept = step, kept
        self._tidy(step_dir, state)

    def _tidy(self, step_dir: Path, state: str) -> None:
        """Remove checkpoints beyond the limit, and states that a later seal has replaced."""
        if self._keep:
            for step in self._kept[: -self._keep]:
                shutil.rmtree(self.step_dir(step), ignore_errors=True)
            self._kept = self._kept[-self._keep :]
        for path in (step_dir / DIRECTORY).glob("*.state"):
            if not path.stem.endswith(state):
                path.unlink()


def _fault(step_dir: Path) -> CheckpointError | None:
    """Return why the checkpoint cannot be resumed; None if it is whole."""
    try:
        verify(step_dir)
    except CheckpointError as error:
        return error
    return None


# -- the directory -----------------------------------------------------------------------------------------------------


def set_aside(paths: Iterable[Path], into: Path) -> None:
    """Move each of ``paths`` that exists into directory ``into``."""
    for path in filter(Path.exists, paths):
        into.mkdir(parents=True, exist_ok=True)
        shutil.move(path, into / path.name)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep other processes from training in ``run_dir`` while entered.

    On a file system without locks, print a warning instead.

    Raises:
        ConfigError: another process trains in ``run_dir`` (the message names its host and process), or it is not
            writable.
    """
    key, path = "trainer.default_local_dir", run_dir / _LOCK
    lock = FileLock(path)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        pid, host = [*path.read_text().split(), "?", "?"][:2]
        words = f"another directory, or wait: process {pid} on host {host} trains in it"
        if isinstance(lock, SoftFileLock):
            words += f"; if that has died, delete {path}"
        raise fail(key, run_dir, words) from None
    except OSError as error:
        if error.errno not in (ENOLCK, EOPNOTSUPP):
            raise fail(key, run_dir, f"a directory that can be written ({error.strerror})") from error
        say(
            f"{path}: {error.strerror}: cannot lock it; make sure that only one process uses this directory",
            error=True,
        )
    try:
        # A soft lock, which stands in where the file system has no locks, has written the same.
        path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
        yield
    finally:
        lock.release()
