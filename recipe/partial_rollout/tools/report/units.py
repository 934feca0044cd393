"""Figures formatted for reading; `-` if one is unknown."""

from recipe.partial_rollout.records.figures import Spread

UNKNOWN = "-"


def seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.0f} s" if abs(value) >= 100 else f"{value:.1f} s" if abs(value) >= 1 else f"{value * 1000:.0f} ms"


def hours(value: float) -> str:
    """Of seconds, as `h:mm`."""
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours}:{minutes:02}"


def kilo_seconds(value: float | None) -> str:
    """Of a thousand, from the seconds of one."""
    return seconds(None if value is None else 1000 * value)


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def count(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"


def decimal(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def precise(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"


def pair(value: tuple[float | None, ...] | None) -> str:
    return " / ".join(map(count, value)) if value else UNKNOWN


def shares(value: tuple[float | None, ...] | None) -> str:
    return " / ".join(map(share, value)) if value else UNKNOWN


def spread(value: Spread | None) -> str:
    return f"{value.mean:.2f} / {value.p95:.0f} / {value.max:.0f}" if value else UNKNOWN


def spread_s(value: Spread | None) -> str:
    return " / ".join(map(seconds, (value.mean, value.p95, value.max))) if value else UNKNOWN
