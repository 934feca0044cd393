"""``--help`` of every tool: it exits with 0, says first what the tool does, and its examples parse."""

import argparse
import importlib
import shlex
import sys

import pytest

from recipe.partial_rollout.tools import __main__ as door
from recipe.partial_rollout.tools.bench.command import BENCHMARKS
from recipe.partial_rollout.tools.command_line import HERE, described
from recipe.partial_rollout.tools.study.named import STUDIES

COMMANDS = [
    *([name] for name in door.TOOLS),
    *(["bench", name] for name in BENCHMARKS),
    *(["study", name] for name in STUDIES),
]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


def help_of(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        door.main([*arguments, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.fixture
def parser_of(monkeypatch):
    """The parser that a tool makes; it parses nothing."""

    def of(tool):
        class Made(Exception):
            pass

        def show(parser, *_):
            raise Made(parser)

        module = importlib.import_module(f"{HERE}.{door.TOOLS[tool].module}")
        with monkeypatch.context() as patch, pytest.raises(Made) as made:
            patch.setattr(argparse.ArgumentParser, "parse_args", show)
            patch.setattr(sys, "argv", [tool])
            module.main([tool])
        return made.value.args[0]

    return of


def subparsers(parser):
    """(arguments, parser) of ``parser`` and of each of its commands."""
    yield [], parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from (([name], command) for name, command in action.choices.items())


def examples(parser):
    title, *lines = parser.epilog.splitlines()
    assert title == "examples:"
    return [line.strip() for line in lines]


def test_door_lists_every_tool_in_a_line_of_its_own(capsys):
    text = help_of([], capsys)
    assert text.startswith(f"usage: python -m {HERE} ")
    listed = text.partition("\ntools:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == list(door.TOOLS)
    assert all(tool.help in line for tool, line in zip(door.TOOLS.values(), listed, strict=True))


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_help_has_usage_then_what_the_command_does(arguments, capsys):
    text = help_of(arguments, capsys)
    assert text.startswith(f"usage: python -m {HERE} {' '.join(arguments)} ")
    does = text.split("\n\n")[1].splitlines()[0]
    assert does[0].isupper() and does.endswith(".") and len(does) <= 110, does
    assert "``" not in text and "default: None" not in text and "default: False" not in text
    assert f"examples:\n  python -m {HERE} {' '.join(arguments)} " in text


@pytest.mark.parametrize("tool", door.TOOLS)
def test_commands_tested_here_are_all_that_a_tool_has(tool, parser_of):
    assert {(tool, *arguments) for arguments, _ in subparsers(parser_of(tool))} <= set(map(tuple, COMMANDS))


@pytest.mark.parametrize("tool", door.TOOLS)
def test_examples_parse_and_name_their_command(tool, parser_of):
    for arguments, parser in subparsers(parser_of(tool)):
        prefix = " ".join([f"python -m {HERE}", tool, *arguments])
        for example in examples(parser):
            # A tool without options has itself for an example.
            assert f"{example} ".startswith(f"{prefix} "), example
            parser.parse_args(shlex.split(example.removeprefix(prefix)))


@pytest.mark.parametrize("tool", door.TOOLS)
def test_every_option_has_words(tool, parser_of):
    for arguments, parser in subparsers(parser_of(tool)):
        wordless = [action.dest for action in parser._actions if not action.help and not action.choices]
        assert not wordless, (arguments, wordless)


def test_help_shows_the_defaults_that_say_something():
    parser = argparse.ArgumentParser(**described("plan", "Plans.", "--rounds 3"))
    parser.add_argument("--rounds", type=int, default=24, help="rounds")
    parser.add_argument("--seeds", nargs="+", default=[1, 2], metavar="S", help="seeds")
    parser.add_argument("--keep", action="store_true", help="keep")
    parser.add_argument("--json", help="file")
    shown = {line.split()[0]: line for line in parser.format_help().splitlines() if line.startswith("  --")}
    assert shown["--rounds"].endswith("rounds (default: 24)")
    assert shown["--seeds"].endswith("seeds (default: 1 2)")
    assert shown["--keep"].endswith("keep") and shown["--json"].endswith("file")


def test_door_refuses_an_unknown_tool_by_name(capsys):
    with pytest.raises(SystemExit) as end:
        door.main(["reports"])
    assert end.value.code == 2
    assert "invalid choice: 'reports'" in capsys.readouterr().err
