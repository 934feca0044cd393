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


@pytest.fixture
def parsers_of(monkeypatch):
    """The parsers that a command makes by their own command: its own first, then its subcommands'; it parses nothing."""
    monkeypatch.setenv("COLUMNS", "160")

    def of(command):
        class Made(Exception):
            pass

        def show(parser, *_):
            raise Made(parser)

        main = importlib.import_module(COMMANDS[command]).main
        with monkeypatch.context() as patch, pytest.raises(Made) as made:
            patch.setattr(argparse.ArgumentParser, "parse_args", show)
            patch.setattr(sys, "argv", [command, "x"])
            main(["x"])
        found = {command: made.value.args[0]}
        for action in made.value.args[0]._actions:
            if isinstance(action, argparse._SubParsersAction):
                found |= {f"{command} {name}": parser for name, parser in action.choices.items()}
        return found

    return of


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_the_command_does_and_its_examples_parse(command, parsers_of):
    for name, parser in parsers_of(command).items():
        text = parser.format_help()
        assert text.startswith(f"usage: python -m {name} ")
        does = text.split("\n\n")[1].splitlines()[0]
        assert does[0].isupper() and does.endswith(".") and len(does) <= 110, does
        assert not [action.dest for action in parser._actions if not action.help and not action.choices], name
        title, *examples = parser.epilog.splitlines()
        assert title == "examples:" and examples
        for example in examples:
            # A command without options has itself for an example.
            assert f"{example.strip()} ".startswith(f"python -m {name} "), example
            parser.parse_args(shlex.split(example.strip().removeprefix(f"python -m {name}")))
