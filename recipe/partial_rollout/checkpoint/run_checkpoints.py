"""Checkpoints of a run, of either arm: verl's own and, beside it under PR, everything that is in flight.

``global_step_K/`` holds verl's files, written first, and ``partial_rollout/``: under PR the states of the manager and the
prompt source and, written last, the manifest. A checkpoint counts once its manifest lists all its files. Saving never
touches files that an older manifest lists, and old checkpoints are removed only after the next one is sealed. So a crash
at any moment leaves the newest whole checkpoint intact, and a state that cannot be saved takes no weights with it.

The processes that led to the present one are the run's lineage. ``lineage.json`` lists them, each with the step that
it went on from. Here a second process went on from step 4 of the first, and whatever the first one did after step 4
does not count::

    [{"id": "9f1c", "branch": "9f1c"}, {"id": "02ab", "branch": "9f1c", "step": 4}]

What is superseded is moved to ``superseded/ID/``, where nothing reads it and nothing deletes it. The list is written first,
so a start that is cut off in between leaves things that no longer belong to the lineage: the next start moves them.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from errno import ENOLCK, EOPNOTSUPP
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from filelock import FileLock, SoftFileLock, Timeout
from msgspec import Struct

from recipe.partial_rollout.checkpoint.manifest import (
    DIRECTORY,
    STEP,
    ForeignCheckpointError,
    Manifest,
    TornCheckpointError,
    begin,
    read,
    seal,
    state_file,
    verify,
    write_atomically,
)
from recipe.partial_rollout.config.keys import fail
from recipe.partial_rollout.waits import one_line

logger = logging.getLogger(__name__)

_LINEAGE, _LOCK, _SUPERSEDED = "lineage.json", "run.lock", "superseded"


class Life(Struct, frozen=True, omit_defaults=True):
    """A process that trains."""

    id: str
    branch: str
    """id of the life that began the run, or that went back to an earlier step of it"""
    step: int = 0
    """of the checkpoint that it goes on from; 0: from scratch"""
    origin: str | None = None
    """that checkpoint, if another run made it"""


def writable(folder: Any) -> bool:
    """Whether files can be made at ``folder``, or in the folder above it where it is not there yet."""
    try:
        path = Path(str(folder)).expanduser().absolute()
        there = next(each for each in (path, *path.parents) if each.exists())
        with tempfile.TemporaryDirectory(dir=there):
            return True
    except OSError:
        return False


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
    """The checkpoints of one run directory, the lives that lead to the run's present, and the checkpoint to resume.

    Its files are checked here, once. ``begin`` makes the choice the run's lineage, before the first ``save``.

    Args:
        run_dir: ``trainer.default_local_dir``.
        mode, path: ``trainer.resume_mode`` and ``resume_from_path``.
        keep: whole checkpoints to keep, the newest included, of those saved under this limit; None: all.

    Raises:
        TornCheckpointError: the checkpoint given by path is not whole, or checkpoints exist and none is whole.
        ForeignCheckpointError: something else made it.

    >>> run = RunCheckpoints(Path("outputs/none"))
    >>> run.lives = [Life("a", "a"), Life("b", "a", 4)]
    >>> run.holds("a", 4), run.holds("a", 6), run.holds("b", 6), run.holds("c", 6)
    (True, False, True, False)
    """

    def __init__(self, run_dir: Path, mode: str = "auto", path: str | None = None, keep: int | None = None) -> None:
        self.run_dir = run_dir
        self._keep = keep
        self._by_path = mode == "resume_path"
        self.lives = self._recorded_lives()
        """those that lead to the present, oldest first; from ``begin`` on the last is this process"""
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

    def _steps(self) -> list[tuple[int, Path]]:
        found = ((STEP.fullmatch(path.name), path) for path in self.run_dir.glob("global_step_*"))
        return [(int(match[1]), path) for match, path in found if match and path.is_dir()]

    # -- the lineage ---------------------------------------------------------------------------------------------------

    def _recorded_lives(self) -> list[Life]:
        path = self.run_dir / _LINEAGE
        try:
            return msgspec.json.decode(path.read_bytes(), type=list[Life]) if path.exists() else []
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            words = f"{path} is cut off or changed: delete it, and each checkpoint there counts"
            raise TornCheckpointError(words) from error

    def holds(self, life: str, step: int) -> bool:
        """Whether the checkpoint that ``life`` sealed at ``step`` leads to the present; any does if no life is recorded."""
        until = [later.step for _, later in pairwise(self.lives)]
        ends = zip(self.lives, [*until, step], strict=False)
        return not self.lives or any(each.id == life and step <= end for each, end in ends)

    def newest_whole(self) -> tuple[Manifest | None, list[str]]:
        """The manifest of the newest whole ``global_step_N`` of the lineage, and a line for each newer torn one.

        Steps grow along a lineage, so the newest is the highest.

        Raises:
            ForeignCheckpointError: a newer one was made by something else; the message says what to do.
        """
        refused: list[str] = []
        for step, step_dir in sorted(self._steps(), reverse=True):
            try:
                if self.holds(read(step_dir).life, step):
                    return verify(step_dir), refused
            except TornCheckpointError as error:
                refused.append(str(error))
        return None, refused

    def _choose_newest(self) -> None:
        """The checkpoint of the lineage that was sealed last: one of this directory, or the one it began from."""
        found, torn = self.newest_whole()
        last = next((life for life in reversed(self.lives) if life.origin), None)
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
        known = self._is_here or bool(self.lives)
        return known and self.resumed is not None and self.holds(self.resumed.life, self.resumed.step)

    @property
    def _is_here(self) -> bool:
        return self.chosen is not None and self.chosen.resolve().parent == self.run_dir.resolve()

    def begin(self) -> Path:
        """Make the choice the run's lineage, then set aside the checkpoints that it supersedes; returns where they go.

        ``latest_checkpointed_iteration.txt``, which verl's own tools read, follows.
        """
        step, new = self.resumed_step, uuid4().hex[:16]
        newest = self.newest_whole()[0] if self._by_path and self.goes_on else None
        branches = not self.goes_on or (newest is not None and newest.step != step)
        origin = None if self._is_here or self.chosen is None else str(self.chosen.resolve())
        before: list[Life] = []
        if self.resumed is not None:
            ids, parent = [life.id for life in self.lives], self.resumed.life
            # A directory to which checkpoints were copied knows no lives.
            unknown = [Life(parent, new)] if self._is_here else []
            before = self.lives[: ids.index(parent) + 1] if parent in ids else unknown
        # Its last life may have begun at this very checkpoint, on a branch of its own, and sealed none.
        branch = (self.lives or before)[-1].branch if before and not branches else new
        self.lives = [*before, Life(new, branch, step, origin)]
        write_atomically(self.run_dir / _LINEAGE, msgspec.json.encode(self.lives))
        aside = self.run_dir / _SUPERSEDED / new
        set_aside(self._superseded(unsealed=branches), aside)
        if self.resumed is not None and self.step_dir(step).is_dir():
            self._on_disk, self._kept = step, [*self.resumed.kept]
        self._track(self._on_disk)
        return aside

    def _superseded(self, *, unsealed: bool) -> Iterator[Path]:
        """The checkpoints in the directory that do not lead to the present; torn ones if ``unsealed``."""
        for step, step_dir in self._steps():
            try:
                stands = self.holds(read(step_dir).life, step)
            except TornCheckpointError:
                stands = not unsealed
            except ForeignCheckpointError:
                stands = False
            if not stands:
                yield step_dir

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
        life = self.lives[-1]
        if self._recorded_lives()[-1:] != [life]:
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


# -- the directory -----------------------------------------------------------------------------------------------------


def set_aside(paths: Iterable[Path], into: Path) -> None:
    """Move those of ``paths`` that exist into directory ``into``."""
    for path in filter(Path.exists, paths):
        into.mkdir(parents=True, exist_ok=True)
        shutil.move(path, into / path.name)


def cut_steps(metrics: Path, step: int, aside: Path) -> None:
    """Move the lines of ``metrics`` that are beyond ``step``, and torn ones, to a file in directory ``aside``."""
    kept, cut = [], []
    for raw in metrics.open("rb") if metrics.exists() else ():
        try:
            stays = raw.endswith(b"\n") and json.loads(raw)["step"] <= step
        except (ValueError, KeyError, TypeError, RecursionError):
            stays = False
        (kept if stays else cut).append(raw)
    if cut:
        aside.mkdir(parents=True, exist_ok=True)
        (aside / f"{metrics.stem}_beyond_{step}.jsonl").write_bytes(b"".join(cut))
        write_atomically(metrics, b"".join(kept))


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """While entered, no other process may train in ``run_dir``, which is made; taken back if nothing comes of it.

    Raises:
        ConfigError: another process holds it, or it cannot be written; the message names host and process.
    """
    key, path, is_new = "trainer.default_local_dir", run_dir / _LOCK, not run_dir.exists()
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
        print(f"{path}: {error.strerror}: see to it yourself that one process trains there", file=sys.stderr)
    try:
        if not isinstance(lock, SoftFileLock):
            # As a soft lock's, which stands in where the file system has no locks.
            path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
        yield
    finally:
        if is_new and [each.name for each in run_dir.iterdir()] == [_LOCK]:
            path.unlink()
            run_dir.rmdir()
        lock.release()
