"""Writes a data set in verl's schema, each prompt once: ``DIR/NAME/train.parquet``, ``DIR/NAME/test.parquet``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from recipe.partial_rollout.tools.command_line import described
from recipe.partial_rollout.tools.data.made import MADE, add_options, write_made
from recipe.partial_rollout.tools.data.named import DATA_SETS, DataSet, NamedProblem
from recipe.partial_rollout.tools.data.raw_files import DataError, download, files_of, rows_of, write_rows
from recipe.partial_rollout.tools.table import Table

_QUANTILES = (0.5, 0.95, 1.0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        **described(
            "data",
            "Write data sets in verl's schema, each prompt once, for the recipes in run_scripts.",
            "gsm8k --out data",
            "dapo_math17k aime24 --out data",
            "gsm8k --out data --from downloads/gsm8k",
            "deepscaler aime24 aime25 amc23 math500 --out data",
            """reasoning_gym --task chain_sum --config '{"max_digits": 2}' --out data""",
            more="Raw files come from the hub, or from --from: parquet, JSON lines or a JSON list in the schema of "
            f"{', '.join(each.repository for each in DATA_SETS.values())}, or HuggingFaceH4/aime_2024. Exit code: 2 if "
            "they cannot be read.",
        )
    )
    names = [*DATA_SETS, MADE]
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="write DIR/NAME/SPLIT.parquet; DATA of run_scripts"
    )
    parser.add_argument(
        "--from", dest="place", type=Path, metavar="LOCAL", help="raw file, or folder of raw files; one NAME only"
    )
    add_options(parser.add_argument_group(f"problems of {MADE}, made here"))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the data sets and print a line for each file; exit code 2 for a mistake, in one line."""
    options = _parser().parse_args(arguments)
    try:
        if options.place and len(options.names) > 1:
            raise DataError(f"--from={options.place}: one NAME, not {' '.join(options.names)}")
        if options.place and MADE in options.names:
            raise DataError(f"--from={options.place}: not with {MADE}, whose problems are made here")
        if options.place and not options.place.exists():
            raise DataError(f"--from={options.place}: an existing file or folder")
        rows = [
            _summary(path, problems, repeats)
            for name in options.names
            for path, problems, repeats in (
                write_made(options) if name == MADE else write(name, options.out, options.place)
            )
        ]
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(_table(rows).console())
    return 0


def write(name: str, out: Path, place: Path | None = None) -> Iterator[tuple[Path, list[NamedProblem], int]]:
    """Write each split of data set ``name``: its file, its problems, and how many repeated rows were left out.

    Raises:
        DataError: the raw files cannot be found or read.
    """
    data_set = DATA_SETS[name]
    source = place or download(data_set.repository, data_set.files)
    if place and place.is_file() and len(data_set.splits) > 1:
        raise DataError(f"--from={place}: a folder with a file of each split ({', '.join(data_set.splits)})")
    for split, raw_split in data_set.splits.items():
        problems, repeats = unique_problems(data_set, files_of(source, raw_split, data_set.folder))
        path = out / name / f"{split}.parquet"
        write_rows(path, [each.row(data_set.data_source, split, index) for index, each in enumerate(problems)])
        yield path, problems, repeats


def unique_problems(data_set: DataSet, files: list[Path]) -> tuple[list[NamedProblem], int]:
    """The problems in the order of their first row, and the number of rows that repeat an earlier prompt.

    DAPO-Math-17k has each prompt a hundred times, AIME-2024 32 times: an epoch would not be one.

    Raises:
        DataError: a row is not in the data set's schema, or there is none.
    """
    found: dict[str, NamedProblem] = {}
    seen = 0
    for row in tqdm(rows_of(files), desc=data_set.repository, unit=" rows", leave=False):
        problem = data_set.problem_of(row, seen)
        found.setdefault(problem.content, problem)
        seen += 1
    if not found:
        raise DataError(f"{files[0]}: no rows")
    return list(found.values()), seen - len(found)


def _table(rows: list[list[str]]) -> Table:
    header = ["file", "prompts", "repeats left out", "median characters", "p95 characters", "longest characters"]
    return Table("Written", header, rows)


def _summary(path: Path, problems: list[NamedProblem], repeats: int) -> list[str]:
    lengths = np.quantile([len(each.content) for each in problems], _QUANTILES)
    return [str(path), f"{len(problems):,}", f"{repeats:,}", *(f"{round(value):,}" for value in lengths)]
