r"""Demonstrations: guess, ask the calculator, answer at 0.

A conversation for the prompt `3?4=_?2=_-8=0`, one turn a line::

    assistant   <tool_call>\n{"name": "calculator", "arguments": {"expression": "3*4-2-8"}}\n</tool_call>
    tool        2
    assistant   <tool_call>\n{"name": "calculator", "arguments": {"expression": "3+4*2-8"}}\n</tool_call>
    tool        6
    assistant   <tool_call>\n{"name": "calculator", "arguments": {"expression": "3-4*2-8"}}\n</tool_call>
    tool        0
    assistant   !-*

As in clock10, a careful demonstrator answers only at 0, a sloppy one also at another value now and then.
"""

import random
import re
from dataclasses import dataclass
from typing import Any

import torch

from recipe.partial_rollout.tasks.calculator.tokenizer import (
    CALL_END,
    CALL_START,
    EXPRESSION_END,
    EXPRESSION_START,
    VOCABULARY,
)
from recipe.partial_rollout.tasks.clock10.demonstration import ANSWER_MARK, Mixture
from recipe.partial_rollout.tasks.clock10.expression import OPERATORS, Problem, partial_results
from recipe.partial_rollout.tasks.clock10.tokenizer import TURN_END, TURN_START

_EXPRESSION = re.compile(r"[0-9](?:[+\-*][0-9])+")


def evaluate(expression: str) -> str:
    """Return the value of digits and operators, left to right modulo 10; `?` for any other text.

    >>> evaluate("3+4*2-8"), evaluate("3+")
    ('6', '?')
    """
    if not _EXPRESSION.fullmatch(expression):
        return "?"
    return str(partial_results(tuple(int(digit) for digit in expression[::2]), expression[1::2])[-1])


def call(expression: str) -> str:
    """Return the assistant's turn that asks for the value of `expression`, without its end."""
    return f"{CALL_START}{EXPRESSION_START}{expression}{EXPRESSION_END}{CALL_END}"


@dataclass(frozen=True, slots=True)
class Conversations(Mixture):
    """A demonstrator, and how carelessly it works."""

    max_calls: int = 23
    """Most calls of a conversation; a longer one is drawn again."""

    def respond(self, problem: Problem, rng: random.Random) -> str:
        """Return all that follows the prompt of a solvable `problem`, tool turns included, without the last turn's end."""
        while True:
            false_accept = 0.0 if rng.random() < self.careful_share else self.false_accept
            turns: list[str] = []
            while len(turns) < self.max_calls:
                operators = "".join(rng.choices(OPERATORS, k=problem.operator_count))
                expression = _line(problem, operators)
                value = evaluate(expression)
                turns.append(call(expression) + _answered(value))
                if value == "0" or rng.random() < false_accept:
                    return "".join([*turns, ANSWER_MARK + operators])


def _line(problem: Problem, operators: str) -> str:
    worked = "".join(f"{operator}{digit}" for operator, digit in zip(operators, problem.digits[1:], strict=True))
    return f"{problem.digits[0]}{worked}-{problem.target}"


def _answered(value: str) -> str:
    return f"{TURN_END}\n{TURN_START}tool\n{value}{TURN_END}\n{TURN_START}assistant\n"


def own_turns(ids: torch.Tensor) -> torch.Tensor:
    """Return which of the token ids `[conversations, tokens]` the model says itself, the ends of its turns included."""
    begun = torch.zeros_like(ids)
    begun[:, 2:] = (ids == VOCABULARY.index("assistant")).cumsum(1)[:, :-2]
    ended = torch.zeros_like(ids)
    ended[:, 1:] = (ids == VOCABULARY.index(TURN_END)).cumsum(1)[:, :-1]
    # Before its turn k + 1 are the ends of the prompt, and of k turns of its own and of the tool each.
    return ended == 2 * begun - 1


def mute_the_tool(model: Any, arguments: Any, keywords: dict[str, Any], output: Any) -> None:
    """Forward hook of a model: no gradient from what the tool says, or from the frame of its turn."""
    own = own_turns(keywords["input_ids"])
    # Logits at a position are those of the next token.
    own = torch.cat([own[:, 1:], own[:, -1:]], dim=1)
    output.logits = torch.where(own[..., None], output.logits, output.logits.detach())
