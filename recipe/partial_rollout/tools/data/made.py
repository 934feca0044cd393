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
"""problems made for one asked for, until no more is expected of a task with few problems"""


def add_options(parser: argparse._ActionsContainer) -> None:
    """The options that ``write_made`` reads, beside ``out``."""
    parser.add_argument("--task", nargs="+", metavar="TASK", help="the library's name; several are mixed, in turn")
    parser.add_argument(
        "--config", default="{}", metavar="JSON", help="the task's options; of several, {TASK: options}"
    )
    parser.add_argument("--ask", default=_ASK, metavar="TEXT", help="what follows each question")
    parser.add_argument(
        "--shots", type=int, default=0, help="solved problems before each question, for models that need to be shown"
    )
    parser.add_argument("--rows", type=int, default=2000, help="of the training split, at most")
    parser.add_argument("--held-out", type=int, default=200, metavar="ROWS", help="of the test split, at most")


def write_made(options: argparse.Namespace) -> Iterator[list[str]]:
    """Write ``test.parquet``, then ``train.parquet``; what ``COLUMNS`` say of each.

    Raises:
        DataError: an option does not hold, or the package is missing.
    """
    if not options.task:
        raise DataError(f"--task: the name of a task, for {MADE}")
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
        few = f"--task={' '.join(options.task)}: a task with more problems than the {len(seen)} held out"
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
        raise DataError(f"--config={text}: of several tasks, options by their names, not {unknown[0]}")
    return {task: given.get(task, {}) for task in tasks}


def _stream(task: str, settings: dict, ask: str, shots: int) -> Iterator[tuple[str, NamedProblem]]:
    """The task's problems, each after the same ``shots`` solved ones, which come first and are none of them."""
    try:
        made = (
            NamedProblem("\n\n".join(filter(None, (question, ask))), truth)
            for question, truth in problems(task, {"seed": 1, **settings})
        )
        solved = list(itertools.islice(made, shots))
        answers = [ast.literal_eval(each.ground_truth)[2]["answer"] for each in solved]
        if None in answers:
            raise DataError(f"--shots={shots}: 0 for {task}, whose problems have no one answer")
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
