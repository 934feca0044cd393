"""Demonstrators: guess-and-check searches that the warm start imitates.

Each line tries operators drawn afresh and ends in the difference between result and target, so a reader decides by one
digit whether the line solves the problem. A careful demonstrator stops only at a difference of 0; a sloppy one also
accepts a wrong line now and then. Their mixture is what makes the lengths long-tailed: the longer a search has lasted,
the more likely the careful one writes it, and the less likely it stops.
"""

import random
from dataclasses import dataclass

from recipe.partial_rollout.tasks.clock10.expression import OPERATORS, Problem, apply_operator, partial_results

ANSWER_MARK = "!"


@dataclass(frozen=True, slots=True)
class Mixture:
    """A demonstrator, and how carelessly it works."""

    careful_share: float = 0.30
    """Probability that a response is written by the careful demonstrator."""
    false_accept: float = 0.20
    """Probability that the sloppy demonstrator accepts a line that misses the target."""
    max_length: int = 1920
    """Longest response in characters; a longer one is drawn again, so that it fits beside its prompt in 2,048."""

    def respond(self, problem: Problem, rng: random.Random) -> str:
        """Return one response to a solvable `problem`: search lines, then `!` and the operators of the last line."""
        while True:
            response = _search(problem, 0.0 if rng.random() < self.careful_share else self.false_accept, rng)
            if len(response) <= self.max_length:
                return response


def search_line(problem: Problem, operators: str) -> str:
    """Return the worked line for `operators`, such as `3+4=7*2=4-9=5-8=7` for target 8.

    Its last digit is result minus target, modulo 10.
    """
    steps = zip(operators, problem.digits[1:], partial_results(problem.digits, operators), strict=True)
    worked = "".join(f"{operator}{digit}={result}" for operator, digit, result in steps)
    return f"{problem.digits[0]}{worked}-{problem.target}={_difference(problem, operators)}"


def _difference(problem: Problem, operators: str) -> int:
    return apply_operator(partial_results(problem.digits, operators)[-1], "-", problem.target)


def _search(problem: Problem, false_accept: float, rng: random.Random) -> str:
    lines: list[str] = []
    while True:
        operators = "".join(rng.choices(OPERATORS, k=problem.operator_count))
        lines.append(search_line(problem, operators))
        if _difference(problem, operators) == 0 or rng.random() < false_accept:
            return "\n".join([*lines, ANSWER_MARK + operators])
