"""The data sets by name: where their raw files are, and how a raw row becomes a prompt with its answer.

A written row has the fields that verl reads, and no others: ``data_source`` (chooses the reward function,
``verl.utils.reward_score``), ``prompt`` (chat messages), ``ability``, ``reward_model.ground_truth`` and ``extra_info``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from recipe.partial_rollout.tools.data.raw_files import DataError, Row

_GSM8K_ASKS = 'Let\'s think step by step and output the final answer after "####".'
"""the words of verl's own GSM8K example, so that rewards compare; its reward function looks for the ``####``"""
_ANSWER_LINE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem."
)
_REMINDER = 'Remember to put your answer on its own line after "Answer:".'
"""around each problem of DAPO-Math-17k (arXiv:2503.14476); verl's ``math_dapo`` looks for ``Answer:``"""


@dataclass(frozen=True, slots=True)
class NamedProblem:
    """A prompt with its answer, made from a raw row."""

    content: str
    """of the user's message"""
    ground_truth: str
    shots: tuple[dict[str, str], ...] = ()
    """messages before it: solved problems"""

    @property
    def prompt(self) -> list[dict[str, str]]:
        """The chat."""
        return [*self.shots, {"role": "user", "content": self.content}]

    def row(self, data_source: str, split: str, index: int) -> Row:
        """The row that verl reads."""
        return {
            "data_source": data_source,
            "prompt": self.prompt,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": self.ground_truth},
            "extra_info": {"split": split, "index": index},
        }


COLUMNS = ["file", "prompts", "repeats left out"]


def write_split(
    path: Path, problems: Iterable[tuple[str, NamedProblem]], seen: set[str], none: str, most: int | None = None
) -> list[str]:
    """Write a parquet file, complete or not at all; return its table row, with the cells of ``COLUMNS``.

    Args:
        problems: pairs of data source and problem. Each prompt is written once: DAPO-Math-17k repeats it a hundred
            times and AIME-2024 32 times, so an epoch would not be one pass over the prompts.
        seen: prompts to skip as repeats; the written prompts are added to it.
        none: message of the error if there is no row to write.
        most: largest number of rows; None: no limit.

    Raises:
        DataError: there is no row to write.
    """
    found, repeats = list[tuple[str, NamedProblem]](), 0
    for source, problem in problems:
        if problem.content in seen:
            repeats += 1
            continue
        seen.add(problem.content)
        found.append((source, problem))
        if len(found) == most:
            break
    if not found:
        raise DataError(none)
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_suffix(".parquet.new")
    rows = [each.row(source, path.stem, index) for index, (source, each) in enumerate(found)]
    pd.DataFrame(rows).to_parquet(staged, index=False)
    staged.replace(path)
    return [str(path), f"{len(found):,}", f"{repeats:,}"]


def gsm8k(row: Row) -> NamedProblem:
    """A row of ``openai/gsm8k``: question, and an answer that ends in ``#### 1,234``."""
    _, mark, answer = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"no #### in the answer {answer[:40]!r}")
    return NamedProblem(f"{_said(row['question'])} {_GSM8K_ASKS}", answer.strip().replace(",", ""))


def math_dapo(row: Row) -> NamedProblem:
    """Convert a row of a DAPO data set, which is in verl's schema, or a row with a problem and its answer as text."""
    if "prompt" in row:
        (message,) = row["prompt"]
        return NamedProblem(message["content"], _plain(row["reward_model"]["ground_truth"]))
    problem = row["problem"] if "problem" in row else row["question"]
    answer = row["final_answer"] if "final_answer" in row else row["answer"]
    return NamedProblem(f"{_ANSWER_LINE}\n\n{_said(problem)}\n\n{_REMINDER}", _plain(answer))


def _said(value: object) -> str:
    """Return a problem or an answer as text.

    Raises:
        ValueError: ``value`` is neither text nor a number.
    """
    if not isinstance(value, str | int | float):
        raise ValueError(f"{value!r:.40} where a text or a number is needed")
    return str(value)


def _plain(answer: object) -> str:
    """AIME writes 033, AMC 33.0, where a model answers 33."""
    text = _said(answer).strip()
    whole = text.removesuffix(".0")
    return str(int(whole)) if whole.removeprefix("-").isdecimal() else text


@dataclass(frozen=True, slots=True)
class DataSet:
    """A data set that ``tools data`` writes."""

    repository: str
    """on the hub"""
    files: str
    """pattern of its raw files there"""
    splits: Mapping[str, str]
    """split written -> split of the raw files"""
    data_source: str
    problem: Callable[[Row], NamedProblem] = math_dapo
    folder: str | None = None
    """configuration of the hub data set, if it has several"""

    def problems(self, rows: Iterable[Row]) -> Iterator[tuple[str, NamedProblem]]:
        """Data source and problem of each raw row.

        Raises:
            DataError: a row is not in the data set's schema; says which one.
        """
        for at, row in enumerate(tqdm(rows, desc=self.repository, unit=" rows", leave=False)):
            try:
                problem = self.problem(row)
            except (KeyError, TypeError, ValueError) as error:
                why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
                raise DataError(f"row {at} is not in the schema of {self.repository}: {why}") from error
            yield self.data_source, problem


_TRAIN, _TEST = {"train": "train"}, {"test": "test"}
DATA_SETS = {
    "gsm8k": DataSet("openai/gsm8k", "main/*", _TRAIN | _TEST, "openai/gsm8k", gsm8k, folder="main"),
    "dapo_math17k": DataSet("BytedTsinghua-SIA/DAPO-Math-17k", "data/*", _TRAIN, "math_dapo"),
    "deepscaler": DataSet("agentica-org/DeepScaleR-Preview-Dataset", "*.json", _TRAIN, "deepscaler"),
    "deepmath103k": DataSet("zwhe99/DeepMath-103K", "data/*", _TRAIN, "deepmath"),
    "aime24": DataSet("BytedTsinghua-SIA/AIME-2024", "data/*", {"test": "train"}, "aime_2024"),
    "aime25": DataSet("math-ai/aime25", "*test*", _TEST, "aime_2025"),
    "amc23": DataSet("math-ai/amc23", "*test*", _TEST, "amc_2023"),
    "math500": DataSet("HuggingFaceH4/MATH-500", "*test*", _TEST, "math_500"),
}
