"""A task whose responses stay long: count from one number to another. Ranges have a long tail."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

ROWS, HELD_OUT = 2048, 64
LARGEST = 400
"""numbers of a range"""


def ranges(rows: int, median: float, seed: int) -> list[tuple[int, int]]:
    """First and last number of each row: lognormal lengths."""
    random = np.random.default_rng(seed)
    counts = np.clip(random.lognormal(np.log(median), 0.9, rows), 3, LARGEST).astype(int)
    firsts = random.integers(1, 100, rows)
    return [(int(first), int(first + count - 1)) for first, count in zip(firsts, counts, strict=True)]


def write(folder: Path, median: float) -> None:
    """Write ``train.parquet`` and ``val.parquet`` in verl's schema, unless they are there."""
    import pandas as pd

    folder.mkdir(parents=True, exist_ok=True)
    for split, rows, seed in (("train", ROWS, 1), ("val", HELD_OUT, 2)):
        records = [
            {
                "data_source": "counting",
                "prompt": [{"role": "user", "content": question(first, last)}],
                "reward_model": {"style": "rule", "ground_truth": f"{first} {last}"},
                "extra_info": {"index": index},
            }
            for index, (first, last) in enumerate(ranges(rows, median, seed))
        ]
        pd.DataFrame(records).to_parquet(folder / f"{split}.parquet")


def question(first: int, last: int) -> str:
    """The prompt of a range, with a short example."""
    return f"Count from 7 to 11: 7, 8, 9, 10, 11\nCount from {first} to {last}:"


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Numbers that are right from the start on, as a share of those wanted or of those written, whichever are more."""
    first, last = map(int, ground_truth.split())
    wanted = list(range(first, last + 1))
    written = [int(number) for number in re.findall(r"\d{1,9}", solution_str)]
    right = 0
    for ours, theirs in zip(written, wanted, strict=False):
        if ours != theirs:
            break
        right += 1
    return right / max(len(wanted), len(written))
