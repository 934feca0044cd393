"""How an error is told in one line."""

from __future__ import annotations


def one_line(error: BaseException | None) -> str:
    """Type and last line of ``error``: Ray puts a remote traceback before the message that matters."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1].strip() if lines else '(no message)'}"
