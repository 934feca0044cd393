"""What the pictures of all studies share."""

from __future__ import annotations

from matplotlib.axes import Axes

BASELINE_HUE, OURS_HUE, OTHERS_HUE = "#555555", "#0072B2", "#D55E00"
DPI = 110


def plain(axes: Axes) -> None:
    """Horizontal grid lines, and no frame on the right and above."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E6E6E6")
