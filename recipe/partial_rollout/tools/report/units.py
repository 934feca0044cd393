"""Numbers formatted for reading; `-` if a figure is unknown."""

UNKNOWN = "-"


def seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.0f} s" if abs(value) >= 100 else f"{value:.1f} s" if abs(value) >= 1 else f"{value * 1000:.0f} ms"


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def count(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"


def decimal(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def precise(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"
