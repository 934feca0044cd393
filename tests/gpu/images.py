"""Images: not possible, because the recipe trains none."""

import sys
from argparse import Namespace

from tests.gpu.figures import Figures

NOT_POSSIBLE = 4


def run(options: Namespace, figures: Figures) -> int:
    """Say so; the exit code is ``NOT_POSSIBLE``."""
    print("images: not possible before the recipe trains prompts with images", file=sys.stderr)
    return NOT_POSSIBLE
