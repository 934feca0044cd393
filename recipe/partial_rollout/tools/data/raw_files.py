"""Rows of raw files, parquet, JSON lines or a JSON list, from this machine or the hub's cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq

from recipe.partial_rollout.waits import one_line

Row = dict[str, Any]

SUFFIXES = (".parquet", ".jsonl", ".json")


class DataError(ValueError):
    """A data set cannot be read, in one line that says what to do."""


def download(repository: str, pattern: str) -> Path:
    """The local copy of the files of a hub data set that match ``pattern``; downloads what the cache lacks.

    Raises:
        DataError: the hub cannot be reached, or refuses.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, repo_type="dataset", allow_patterns=pattern))
    except Exception as error:
        # Any error: the client raises errors of several libraries, and the user can act on each in the same way.
        raise DataError(
            f"{repository} cannot be downloaded ({one_line(error)}): on a machine that reaches the hub, "
            f"`hf download {repository} --repo-type dataset --local-dir DIR`, then --from DIR here"
        ) from error


def files_of(place: Path, split: str, folder: str | None = None) -> list[Path]:
    """Return the raw files of ``split`` at ``place``, a file or a folder.

    A file in a folder belongs to ``split`` if its name contains the split's name. If no name contains ``train`` or
    ``test``, all files belong.

    Args:
        folder: if ``place`` has a folder of this name, only it is searched (the configuration of a hub data set).

    Raises:
        DataError: there is no such file.
    """
    if place.is_file():
        return [place]
    root = place / folder if folder and (place / folder).is_dir() else place
    found = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
    # JSON files beside files of another type may only describe them.
    found = [path for path in found if path.suffix != ".json"] or found
    named = [path for path in found if split in path.name]
    if not named and not any(other in path.name for path in found for other in ("train", "test")):
        named = found
    if not named:
        raise DataError(f"--from={place}: needs a {' or '.join(SUFFIXES)} file, or a folder with one of split {split}")
    return named


def rows_of(files: list[Path]) -> Iterator[Row]:
    """The rows in order.

    Raises:
        DataError: a file is not what its suffix says.
    """
    for path in files:
        try:
            if path.suffix == ".parquet":
                # The 1.8 million rows of DAPO-Math-17k would fill a small machine as Python objects, as would the usual
                # 65,536 rows of DeepMath-103K, each with three solutions of 16,000 characters.
                for batch in pq.ParquetFile(path).iter_batches(batch_size=1024):
                    yield from batch.to_pylist()
            elif path.suffix == ".json":
                yield from msgspec.json.decode(path.read_bytes(), type=list[Row])
            else:
                yield from msgspec.json.Decoder(Row).decode_lines(path.read_bytes())
        except (ValueError, OSError, msgspec.DecodeError) as error:
            raise DataError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
