"""``--help`` of every command: it exits with 0, says first what the command does, and its examples parse."""

import argparse
import importlib
import shlex
import sys

import pytest

from recipe.partial_rollout.tools import __main__ as door
from recipe.partial_rollout.tools.command_line import HERE

COMMANDS = {
    **{f"{HERE} {name}": f"{HERE}.{tool.module}" for name, tool in door.TOOLS.items()},
    **{name: f"{name}.__main__" for name in ("tests.bench", "tests.chaos", "tests.studies")},
}
"""what follows ``python -m``, and the module whose ``main`` it is"""


class Made(Exception):
    """A parser is made; nothing is parsed."""


def made(parser, *_):
    raise Made(parser)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_the_command_does_and_its_examples_parse(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    with monkeypatch.context() as patch, pytest.raises(Made) as caught:
        patch.setattr(argparse.ArgumentParser, "parse_args", made)
        patch.setattr(sys, "argv", [command, "x"])
        importlib.import_module(COMMANDS[command]).main(["x"])
    parsers = {command: caught.value.args[0]}
    for action in parsers[command]._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers |= {f"{command} {name}": parser for name, parser in action.choices.items()}
    for name, parser in parsers.items():
        text = parser.format_help()
        assert text.startswith(f"usage: python -m {name} ")
        does = text.split("\n\n")[1].splitlines()[0]
        assert does[0].isupper() and does.endswith("."), does
        assert not [action.dest for action in parser._actions if not action.help and not action.choices], name
        title, *examples = parser.epilog.splitlines()
        assert title == "examples:" and examples
        for example in examples:
            # A command without options has itself for an example.
            assert f"{example.strip()} ".startswith(f"python -m {name} "), example
            parser.parse_args(shlex.split(example.strip().removeprefix(f"python -m {name}")))
