"""Figures formatted for reading; `-` if one is unknown."""

from collections.abc import Callable
from typing import Any

from recipe.partial_rollout.records.metrics import Spread

UNKNOWN = "-"


def _known(words: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return a function that formats by `words`, and returns `-` for None."""
    return lambda value: UNKNOWN if value is None else words(value)


share = _known("{:.1%}".format)
count = _known("{:,.0f}".format)
decimal = _known("{:.2f}".format)
precise = _known("{:.3f}".format)


@_known
def seconds(value: float) -> str:
    return f"{value:,.0f} s" if abs(value) >= 100 else f"{value:.1f} s" if abs(value) >= 1 else f"{value * 1000:.0f} ms"


kilo_seconds = _known(lambda value: seconds(1000 * value))
"""formats the time of 1,000 units; its argument is the seconds of one"""
pair = _known(lambda value: " / ".join(map(count, value)))
shares = _known(lambda value: " / ".join(map(share, value)))


def hours(value: float) -> str:
    """Format seconds as `h:mm`."""
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours}:{minutes:02}"


@_known
def spread(value: Spread) -> str:
    return f"{value.mean:.2f} / {value.p95:.0f} / {value.max:.0f}"


@_known
def spread_s(value: Spread) -> str:
    return " / ".join(map(seconds, (value.mean, value.p95, value.max)))
