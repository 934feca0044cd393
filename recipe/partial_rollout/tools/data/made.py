"""Rows of ``reasoning_gym``, made from a seed: each prompt once, and none of the held-out ones in the training split."""

from __future__ import annotations

import argparse
import ast
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace

from recipe.partial_rollout.tasks.reasoning_gym import problems
from recipe.partial_rollout.tools.data.named import NamedProblem, write_split
from recipe.partial_rollout.tools.data.raw_files import DataError

MADE = "reasoning_gym"
_ASK = "Give the final answer alone between <answer> and </answer>."
_TRIES = 4
"""problems generated per wanted row, at most: a task with few problems repeats them, and would never fill the split"""


def add_options(parser: argparse._ActionsContainer) -> None:
    """Add the options that ``write_made`` reads, except ``--out``."""
    parser.add_argument(
        "--task", nargs="+", metavar="TASK", help="name of a reasoning_gym task; problems of several alternate"
    )
    parser.add_argument(
        "--config", default="{}", metavar="JSON", help="options of the task; for several tasks {TASK: options}"
    )
    parser.add_argument("--ask", default=_ASK, metavar="TEXT", help="text after each question")
    parser.add_argument(
        "--shots", type=int, default=0, help="solved problems before each question, for models that need to be shown"
    )
    parser.add_argument("--rows", type=int, default=2000, help="most rows of the training split")
    parser.add_argument("--held-out", type=int, default=200, metavar="ROWS", help="most rows of the test split")


def write_made(options: argparse.Namespace) -> Iterator[list[str]]:
    """Write ``test.parquet``, then ``train.parquet``; yield a table row for each, with the cells of ``COLUMNS``.

    Raises:
        DataError: an option is wrong, or the package is missing.
    """
    if not options.task:
        raise DataError(f"--task is missing: name a task of {MADE}")
    if min(options.rows, options.held_out) < 1:
        raise DataError(f"--rows={options.rows} --held-out={options.held_out}: at least 1 each")
    if options.shots < 0:
        raise DataError(f"--shots={options.shots}: at least 0")
    streams = [
        _stream(task, settings, options.ask, options.shots)
        for task, settings in _settings(options.task, options.config).items()
    ]
    seen = set[str]()
    for split, wanted in (("test", options.held_out), ("train", options.rows)):
        in_turn = (next(stream) for stream in itertools.cycle(streams))
        problems = itertools.islice(in_turn, _TRIES * wanted)
        few = f"--task={' '.join(options.task)}: no problems but the {len(seen)} held out; name one with more problems"
        yield write_split(options.out / MADE / f"{split}.parquet", problems, seen, none=few, most=wanted)


def _settings(tasks: list[str], text: str) -> dict[str, dict]:
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise DataError(f"--config={text}: must be a JSON object ({error})") from error
    if len(tasks) == 1:
        return {tasks[0]: given}
    if unknown := sorted(given.keys() - set(tasks)):
        raise DataError(f"--config={text}: must be options by task name, and {unknown[0]} is not in --task")
    return {task: given.get(task, {}) for task in tasks}


def _stream(task: str, settings: dict, ask: str, shots: int) -> Iterator[tuple[str, NamedProblem]]:
    """Yield data source and problem, without end. The task's first ``shots`` problems, solved, stand before each
    problem.

    Args:
        settings: options of the task.
        ask: text after each question.
    """
    try:
        made = (
            NamedProblem("\n\n".join(filter(None, (question, ask))), truth)
            for question, truth in problems(task, {"seed": 1, **settings})
        )
        solved = list(itertools.islice(made, shots))
        answers = [ast.literal_eval(each.ground_truth)[2]["answer"] for each in solved]
        if None in answers:
            raise DataError(f"--shots={shots}: must be 0 for {task}, whose problems have no single answer")
        form = "<answer>{}</answer>" if "<answer>" in ask else "{}"
        before = tuple(
            message
            for each, answer in zip(solved, answers, strict=True)
            for message in [*each.prompt, {"role": "assistant", "content": form.format(answer)}]
        )
        shown = {each.content for each in solved}
        for problem in made:
            if problem.content not in shown:
                yield f"{MADE}/{task}", replace(problem, shots=before)
    except ValueError as error:
        raise DataError(str(error)) from error
