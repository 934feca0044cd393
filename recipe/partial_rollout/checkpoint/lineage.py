"""The lineage of a run: the processes that led to the present one, and what they superseded.

``lineage.json`` lists them, each with the step that it went on from. Here a second process went on from step 4 of the
first, and whatever the first one did after step 4 does not count::

    [{"id": "9f1c", "branch": "9f1c"}, {"id": "02ab", "branch": "9f1c", "step": 4}]

What is superseded is moved to ``superseded/ID/``, where nothing reads it and nothing deletes it. The list is written first,
so a start that is cut off in between leaves things that no longer belong to the lineage: the next start moves them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from errno import ENOLCK, EOPNOTSUPP
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import msgspec
from filelock import FileLock, SoftFileLock, Timeout
from msgspec import Struct

from recipe.partial_rollout.checkpoint.snapshot import write_atomically
from recipe.partial_rollout.config.keys import fail

NAME, LOCK, SUPERSEDED = "lineage.json", "run.lock", "superseded"


class Life(Struct, frozen=True, omit_defaults=True):
    """A process that trains."""

    id: str
    branch: str
    """id of the life that began the run, or that went back to an earlier step of it"""
    step: int = 0
    """of the checkpoint that it goes on from; 0: from scratch"""
    origin: str | None = None
    """that checkpoint, if another run made it"""


class Lineage:
    """The lives that lead to the present of the run in ``run_dir``.

    >>> lineage = Lineage(Path("outputs/none"))
    >>> lineage.lives = [Life("a", "a"), Life("b", "a", 4)]
    >>> lineage.holds("a", 4), lineage.holds("a", 6), lineage.holds("b", 6), lineage.holds("c", 6)
    (True, False, True, False)
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / NAME
        self.lives = msgspec.json.decode(self._path.read_bytes(), type=list[Life]) if self._path.exists() else []

    def holds(self, life: str | None, step: int) -> bool:
        """Whether the checkpoint that ``life`` sealed at ``step`` leads to the present; any does if no life is recorded."""
        until = [later.step for _, later in pairwise(self.lives)]
        ends = zip(self.lives, [*until, step], strict=False)
        return not self.lives or any(each.id == life and step <= end for each, end in ends)

    def begin(self, parent: str | None, step: int, *, origin: Path | None = None, branches: bool = False) -> Life:
        """Record that this process trains on.

        Args:
            parent: the life that sealed the checkpoint of ``step`` that it goes on from; None: from scratch.
            origin: that checkpoint, if another run made it.
            branches: whether that checkpoint is not where the run had come to.
        """
        new = uuid4().hex[:16]
        ids = [life.id for life in self.lives]
        lives = self.lives[: ids.index(parent) + 1] if parent in ids else []
        if parent is not None and not lives and origin is None:
            lives = [Life(parent, new)]
        # Its last life may have begun at this very checkpoint, on a branch of its own, and sealed none.
        branch = (self.lives or lives)[-1].branch if lives and not branches else new
        self.lives = [*lives, Life(new, branch, step, origin and str(origin.resolve()))]
        write_atomically(self._path, msgspec.json.encode(self.lives))
        return self.lives[-1]


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
    key, path, is_new = "trainer.default_local_dir", run_dir / LOCK, not run_dir.exists()
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
        if is_new and [each.name for each in run_dir.iterdir()] == [LOCK]:
            path.unlink()
            run_dir.rmdir()
        lock.release()
