"""What the pictures of a report share."""

from recipe.partial_rollout.tools.report.lanes import Trainer

_HUES = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Told apart by every common kind of colour vision (Okabe and Ito)."""
_MARKS = "sovD^Px"
DPI = 100
IDLE_COLOUR, TRAIN_COLOUR, VALIDATE_COLOUR = "#FBF3D0", "#DCDCDC", "#C9B8D8"
HELD_COLOUR, TOOLS_COLOUR = "#1A1A1A", "#E377C2"
TRAINER_COLOURS = {
    Trainer.WAIT: IDLE_COLOUR,
    Trainer.TRAIN: "#A8A8A8",
    Trainer.STAGE: "#7FB08A",
    Trainer.LOAD: HELD_COLOUR,
    Trainer.VALIDATE: VALIDATE_COLOUR,
}


def hue(index: int) -> str:
    """Colour of the run at ``index``; the base is 0."""
    return _HUES[index % len(_HUES)]


def mark(index: int) -> str:
    """Its marker in a line."""
    return _MARKS[index % len(_MARKS)]
