"""Keeps the terminal for the recipe's lines and progress bars; what libraries print goes to a file.

verl, Ray, vLLM and datasets print from Python and from C, in this process and in its children. So ``libraries_apart``
points the file descriptors 1 and 2 at the file, and ``say`` writes to copies of them that still lead to the terminal.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper, UnsupportedOperation
from pathlib import Path
from typing import BinaryIO, TextIO

from tqdm import tqdm

OUTPUT = "output.log"
"""file of the run directory with what libraries print"""
_DESCRIPTORS = (1, 2)
_WITNESS = 'read -r _ || { echo "$0"; tail -n 5 "$1"; } >&2'
"""shell program that reads a line, and prints if its standard input ends without one: this process has died"""
_END_S = 5.0
"""seconds for which the end of a run waits until the witness has ended"""


class _Terminal(TextIOWrapper):
    """A stream to the terminal. If the terminal or pipe is gone, what is written is lost, and the run goes on."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            return super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _Apart:
    """The terminal and the file, while libraries print to the file."""

    def __init__(self) -> None:
        _flush()
        self.terminal = [
            _Terminal(os.fdopen(os.dup(each), "wb"), errors="backslashreplace", line_buffering=True)
            for each in _DESCRIPTORS
        ]
        """standard output and standard error, as they were"""
        self.file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115
        self.witness: subprocess.Popen[bytes] | None = None
        """process that says on the terminal that this one was killed, or was ended by a library, as Ray's may"""
        self._redirect()

    def keep(self, path: Path) -> None:
        _flush()
        # The children write to it too: each line goes to the end.
        kept = path.open("ab")
        self.file.seek(0)
        shutil.copyfileobj(self.file, kept)
        kept.flush()
        self.file.close()
        self.file = kept
        self._redirect()
        # Unbuffered, so that ``known_end`` writes at once; a session of its own, so that Ctrl-C does not reach it.
        text = f"the process ended without an error of its own: see {path}, which ends with"
        command = ["sh", "-c", _WITNESS, text, str(path)]
        self.witness = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stderr=self.terminal[1], start_new_session=True
        )

    def end(self) -> None:
        _flush()
        known_end()
        if self.witness is not None:
            # A witness that hangs must not hide how the run has ended.
            with suppress(subprocess.TimeoutExpired):
                self.witness.communicate(timeout=_END_S)
        for descriptor, stream in zip(_DESCRIPTORS, self.terminal, strict=True):
            os.dup2(stream.fileno(), descriptor)
            stream.close()
        self.file.close()

    def _redirect(self) -> None:
        for descriptor in _DESCRIPTORS:
            os.dup2(self.file.fileno(), descriptor)


_apart: _Apart | None = None


@contextmanager
def libraries_apart() -> Iterator[None]:
    """While entered, only ``say`` and progress bars reach the terminal; what libraries print is lost until ``keep_output``.

    Nothing changes if ``sys.stdout`` or ``sys.stderr`` is not the process's own, as in a notebook or a test.
    """
    global _apart
    if _apart is not None or not all(map(_is_own, (sys.stdout, sys.stderr), _DESCRIPTORS)):
        yield
        return
    _apart = _Apart()
    try:
        yield
    finally:
        _apart.end()
        _apart = None


def keep_output(path: Path) -> None:
    """Move what libraries have printed to the end of ``path``, and send there what they print from now on."""
    if _apart is not None:
        _apart.keep(path)
        say(f"verl, Ray and other libraries print to {path}")


def say(text: object, *, error: bool = False) -> None:
    """Print a line for the user, above the progress bars.

    Args:
        error: to standard error.
    """
    out, err = _apart.terminal if _apart else (sys.stdout, sys.stderr)
    stream = err if error else out
    if stream is None:
        # The process was started with a closed descriptor.
        return
    # The terminal's encoding may lack a character that a model writes.
    signs = stream.encoding or "ascii"
    with tqdm.external_write_mode(file=err):
        stream.write(f"{text}\n".encode(signs, "backslashreplace").decode(signs))
        stream.flush()


def known_end() -> None:
    """Tell the witness that this process ends by itself. ``os._exit`` needs it before; ``libraries_apart`` does it."""
    witness = _apart and _apart.witness
    if witness and witness.stdin:
        with suppress(OSError, ValueError):
            witness.stdin.write(b"\n")


def bars() -> TextIO:
    """Return the stream of progress bars."""
    return _apart.terminal[1] if _apart else sys.stderr


def _is_own(stream: TextIO, descriptor: int) -> bool:
    with suppress(UnsupportedOperation, AttributeError, ValueError):
        return stream.fileno() == descriptor
    return False


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
