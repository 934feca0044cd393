"""Parts that the pictures of a report share."""

_HUES = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Told apart by every common kind of colour vision (Okabe and Ito)."""
DPI = 100


def hue(index: int) -> str:
    """Colour of the run at ``index``; the base is 0."""
    return _HUES[index % len(_HUES)]
