"""Checks a response to the embedded task: prints 1.0 if it ends in operators that solve the problem, else 0.0.

It runs in a sandbox, without the repository, and imports `sys` alone: Python then starts in 8 ms.

    python -I -S clock10_check.py problem.txt < response.txt
"""

import sys

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def score(problem: str, response: str) -> float:
    """As `tasks/clock10/reward.py`; ValueError or IndexError for a text that is no problem."""
    chain, _, goal = problem.rpartition("-")
    value, *digits = (int(part[0]) for part in chain.split("?"))
    _, mark, operators = response.rpartition("!")
    if not mark or len(operators) != len(digits) or not OPERATIONS.keys() >= set(operators):
        return 0.0
    for operator, digit in zip(operators, digits, strict=True):
        value = OPERATIONS[operator](value, digit) % 10
    return float(value == int(goal.removesuffix("=0")))


if __name__ == "__main__":
    with open(sys.argv[1]) as problem:
        print(score(problem.read(), sys.stdin.read()))
