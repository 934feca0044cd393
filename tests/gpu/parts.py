"""A folder as compressed parts that each fit one call, and back. Needs tar and xz; standard library alone."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

PART_BYTES = 55 * 2**20
"""a call carries 64 MiB, with the repository"""


class PartsError(RuntimeError):
    """A part is missing or damaged."""


def pack(folder: Path, name: str, out: Path, limit: int = PART_BYTES) -> list[Path]:
    """Write ``folder`` as ``out/NAME_1/NAME.1``, ``out/NAME_2/NAME.2`` and so on; the last has a digest beside it."""
    archive = folder.with_name(f"{name}.tar.xz")
    with archive.open("wb") as file:
        tar = ["tar", "--sort=name", "--exclude=__pycache__", "-C", str(folder), "-cf", "-", "."]
        with subprocess.Popen(tar, stdout=subprocess.PIPE) as reading:
            subprocess.run(["nice", "xz", "-6", "-T0"], stdin=reading.stdout, stdout=file, check=True)
        if reading.returncode:
            raise PartsError(f"tar of {folder} failed")
    data, written = archive.read_bytes(), list[Path]()
    for number, start in enumerate(range(0, len(data), limit), 1):
        part = out / f"{name}_{number}" / f"{name}.{number}"
        part.parent.mkdir(parents=True)
        part.write_bytes(data[start : start + limit])
        written.append(part)
    whole = {"parts": len(written), "sha256": hashlib.sha256(data).hexdigest()}
    (written[-1].parent / f"{name}.json").write_text(json.dumps(whole) + "\n")
    archive.unlink()
    return written


def unpack(name: str, carried: Path, folder: Path) -> bool:
    """Make ``folder`` from the parts in ``carried``; whether there are any. A folder that is there stays.

    Raises:
        PartsError: a part is missing or damaged; names it.
    """
    there = sorted(carried.glob(f"{name}.*"))
    if folder.is_dir() or not there:
        return folder.is_dir()
    described = carried / f"{name}.json"
    if not described.exists():
        raise PartsError(f"{described} is missing: carry the last part of {name}")
    whole = json.loads(described.read_text())
    paths = [carried / f"{name}.{number}" for number in range(1, whole["parts"] + 1)]
    if missing := [path.name for path in paths if not path.exists()]:
        raise PartsError(f"{', '.join(missing)} missing in {carried}: carry {missing[0].replace('.', '_')}")
    data = b"".join(path.read_bytes() for path in paths)
    if hashlib.sha256(data).hexdigest() != whole["sha256"]:
        raise PartsError(f"the parts of {name} in {carried} are of different packs: carry them all again")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with subprocess.Popen(["xz", "-dc", "-T0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reading:
        with subprocess.Popen(["tar", "-C", str(partial), "-xf", "-"], stdin=reading.stdout) as writing:
            assert reading.stdin is not None
            with reading.stdin as pipe:
                pipe.write(data)
        if writing.returncode:
            raise PartsError(f"the parts of {name} in {carried} cannot be unpacked")
    partial.rename(folder)
    return True
