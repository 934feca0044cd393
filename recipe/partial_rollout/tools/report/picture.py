"""Resolution and colours that the pictures of a report share."""

_HUES = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Colours of runs that people with any common kind of colour vision can tell apart (Okabe and Ito)."""
DPI = 100


def hue(index: int) -> str:
    """Return the colour of the run at ``index``; the base has index 0."""
    return _HUES[index % len(_HUES)]
