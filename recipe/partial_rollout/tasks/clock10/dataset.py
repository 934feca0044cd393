"""Train and validation rows in verl's schema, generated from a seed.

Validation problems are distinct and never occur in training: whoever draws training problems, for these rows or for the
warm start, passes the validation problems as `held_out`.
"""

import random
from collections.abc import Collection, Iterator
from pathlib import Path

import pandas as pd

from recipe.partial_rollout.tasks.clock10.expression import Problem, draw_problem

DATA_SOURCE = "clock10"


def draw_validation(rows: int, seed: int) -> list[Problem]:
    """Return `rows` distinct problems."""
    rng = random.Random(f"validation-{seed}")
    distinct: dict[Problem, None] = {}
    while len(distinct) < rows:
        distinct[draw_problem(rng)] = None
    return list(distinct)


def draw_training(rng: random.Random, held_out: Collection[Problem]) -> Iterator[Problem]:
    """Yield training problems without end, with repeats, none of them in `held_out`."""
    while True:
        problem = draw_problem(rng)
        if problem not in held_out:
            yield problem


def to_row(problem: Problem, index: int, split: str) -> dict[str, object]:
    """Return one row in the schema that verl's RLHFDataset reads; the ground truth is the prompt text itself."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.prompt},
        "extra_info": {"index": index, "split": split},
    }


def write_dataset(folder: Path, train_rows: int, validation: Collection[Problem], seed: int) -> None:
    """Write `train.parquet` and `val.parquet` into the existing `folder`."""
    stream = draw_training(random.Random(f"training-{seed}"), frozenset(validation))
    training = [next(stream) for _ in range(train_rows)]
    for split, problems in (("train", training), ("val", validation)):
        rows = [to_row(problem, index, split) for index, problem in enumerate(problems)]
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet", index=False)
