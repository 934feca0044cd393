"""Writes a data set in verl's schema, each prompt once: ``DIR/NAME/train.parquet``, ``DIR/NAME/test.parquet``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from recipe.partial_rollout.tools.command_line import Parser, typed
from recipe.partial_rollout.tools.data.made import MADE, add_options, write_made
from recipe.partial_rollout.tools.data.named import COLUMNS, DATA_SETS, write_split
from recipe.partial_rollout.tools.data.raw_files import DataError, download, files_of, rows_of
from recipe.partial_rollout.tools.table import Table


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the data sets and print a line for each file; exit code 2 for a mistake, in one line."""
    parser = Parser(
        typed("data"),
        "Write data sets in verl's schema, each prompt once, for the recipes in run_scripts.",
        [
            "gsm8k --out data",
            "dapo_math17k aime24 --out data",
            "gsm8k --out data --from downloads/gsm8k",
            "deepscaler aime24 aime25 amc23 math500 --out data",
            """reasoning_gym --task chain_sum --config '{"max_digits": 2}' --out data""",
        ],
        "Raw files come from the hub, or from --from, as parquet, JSON lines or a JSON list in the schema of "
        f"{', '.join(each.repository for each in DATA_SETS.values())}, or HuggingFaceH4/aime_2024. Exit code: 2 if they "
        "cannot be read.",
    )
    names = [*DATA_SETS, MADE]
    parser.add_argument("names", nargs="+", choices=names, metavar="NAME", help=f"one or more of {', '.join(names)}")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="write DIR/NAME/SPLIT.parquet; the scripts of run_scripts take DIR as DATA",
    )
    parser.add_argument(
        "--from", dest="place", type=Path, metavar="LOCAL", help="raw file, or folder of raw files; one NAME only"
    )
    add_options(parser.add_argument_group(f"options of {MADE}, whose problems are generated here"))
    options = parser.parse_args(arguments)
    try:
        if options.place and (len(options.names) > 1 or MADE in options.names):
            raise DataError(
                f"--from={options.place}: give exactly one NAME, and not {MADE}, whose problems are made here"
            )
        rows = [
            row
            for name in options.names
            for row in (write_made(options) if name == MADE else write(name, options.out, options.place))
        ]
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(Table("Written", COLUMNS, rows).console())
    return 0


def write(name: str, out: Path, place: Path | None = None) -> Iterator[list[str]]:
    """Write each split of data set ``name``; yield a table row for each file, with the cells of ``COLUMNS``.

    Args:
        out: folder to write into.
        place: file or folder with the raw files; None: the hub.

    Raises:
        DataError: the raw files cannot be found or read, or a row is not in the data set's schema.
    """
    data_set = DATA_SETS[name]
    source = place or download(data_set.repository, data_set.files)
    if place and place.is_file() and len(data_set.splits) > 1:
        raise DataError(f"--from={place}: give a folder with a file for each split ({', '.join(data_set.splits)})")
    for split, raw_split in data_set.splits.items():
        files = files_of(source, raw_split, data_set.folder)
        problems = data_set.problems(rows_of(files))
        yield write_split(out / name / f"{split}.parquet", problems, set(), none=f"{files[0]}: no rows")
