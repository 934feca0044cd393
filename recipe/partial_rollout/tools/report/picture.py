"""What the pictures of a report share."""

HUES = ("#D55E00", "#0072B2")
"""Base, other: told apart by every common kind of colour vision."""
DPI = 100
