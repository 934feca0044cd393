"""clock10's rows with a picture in the prompt, as verl's RLHFDataset reads them: `<image>`, and a column `images`."""

import random
import re
from collections.abc import Collection
from pathlib import Path

import pandas as pd

from recipe.partial_rollout.tasks.clock10.dataset import draw_training
from recipe.partial_rollout.tasks.clock10.dataset import to_row as clock10_row
from recipe.partial_rollout.tasks.clock10.expression import Problem
from recipe.partial_rollout.tasks.pictures.picture import draw, encoded

MARK = "<image>"
_TARGET = re.compile(r"[0-9](?==0\Z)")


def prompt(problem: Problem, picture: str = MARK) -> str:
    """Return the problem's text with `picture` in place of its target.

    >>> prompt(Problem((3, 4, 2), 8))
    '3?4=_?2=_-<image>=0'
    """
    return _TARGET.sub(picture, problem.prompt)


def to_row(problem: Problem, index: int, split: str, seed: int) -> dict[str, object]:
    """Return one row; the ground truth is clock10's prompt, with the target as text."""
    picture = draw(problem.target, random.Random(f"picture-{split}-{index}-{seed}"))
    return {
        **clock10_row(problem, index, split),
        "prompt": [{"role": "user", "content": prompt(problem)}],
        "images": [{"bytes": encoded(picture), "path": None}],
    }


def write_dataset(folder: Path, train_rows: int, validation: Collection[Problem], seed: int) -> None:
    """Write `train.parquet` and `val.parquet` into the existing `folder`."""
    stream = draw_training(random.Random(f"training-{seed}"), frozenset(validation))
    training = [next(stream) for _ in range(train_rows)]
    for split, problems in (("train", training), ("val", validation)):
        rows = [to_row(problem, index, split, seed) for index, problem in enumerate(problems)]
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet", index=False)
