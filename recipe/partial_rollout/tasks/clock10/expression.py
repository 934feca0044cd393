"""Clock-10 problems: digits, a target, and arithmetic left to right modulo 10.

A problem has one canonical text, its prompt: `parse_problem(problem.prompt) == problem` for every valid problem, and no
other text parses. The prompt doubles as the ground truth in the data files.
"""

import operator
import random
import re
from dataclasses import dataclass
from itertools import product

MODULUS = 10
OPERATORS = "+-*"
_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
DIGIT_COUNT_WEIGHTS = {3: 0.40, 4: 0.35, 5: 0.25}
"""Number of digits -> probability. Longer problems have more candidates and so longer searches."""

_PROMPT = re.compile(r"([1-9])((?:\?[1-9]=_)+)-([0-9])=0")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: put an operator between neighbouring digits so that the result is the target."""

    digits: tuple[int, ...]
    """Operands in order, each 1..9, `[n]`."""
    target: int
    """Wanted result, 0..9."""

    @property
    def operator_count(self) -> int:
        """Operators an answer needs: one fewer than digits."""
        return len(self.digits) - 1

    @property
    def prompt(self) -> str:
        """The canonical text, such as `3?4=_?2=_?9=_-8=0`: the shape of the line that solves the problem."""
        first, *rest = self.digits
        return f"{first}" + "".join(f"?{digit}=_" for digit in rest) + f"-{self.target}=0"

    def is_solved_by(self, operators: str) -> bool:
        """Whether `operators` has the right number of operators and reaches the target."""
        return len(operators) == self.operator_count and partial_results(self.digits, operators)[-1] == self.target


def apply_operator(left: int, sign: str, right: int) -> int:
    """Return `left sign right` modulo 10."""
    return _APPLY[sign](left, right) % MODULUS


def partial_results(digits: tuple[int, ...], operators: str) -> list[int]:
    """Return the running results, left to right, `[n - 1]`; the last one is the value of the expression."""
    results: list[int] = []
    value = digits[0]
    for sign, digit in zip(operators, digits[1:], strict=True):
        value = apply_operator(value, sign, digit)
        results.append(value)
    return results


def reachable_targets(digits: tuple[int, ...]) -> list[int]:
    """Return every value that some choice of operators reaches, ascending."""
    reached = {digits[0]}
    for digit in digits[1:]:
        reached = {apply_operator(value, sign, digit) for value, sign in product(reached, OPERATORS)}
    return sorted(reached)


def draw_problem(rng: random.Random) -> Problem:
    """Draw a solvable problem: digit count by weight, digits uniform, target uniform over the reachable ones."""
    (count,) = rng.choices(list(DIGIT_COUNT_WEIGHTS), weights=list(DIGIT_COUNT_WEIGHTS.values()))
    digits = tuple(rng.randint(1, 9) for _ in range(count))
    return Problem(digits, rng.choice(reachable_targets(digits)))


def parse_problem(prompt: str) -> Problem:
    """Return the problem whose canonical text is `prompt`; ValueError for any other text."""
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        raise ValueError(f"prompt={prompt!r}: want a text such as 3?4=_?2=_-8=0")
    first, rest, target = match.groups()
    return Problem((int(first), *(int(digit) for digit in re.findall(r"\?(\d)", rest))), int(target))
