"""Pictures of a target from 0 to 9, in 64 x 64 pixels: as a digit, as that many squares, or as a colour."""

import io
import random

from PIL import Image, ImageDraw

SIDE, CELL = 64, 16
"""pixels of a picture, and of a cell that holds one square; a model's patch has that size"""
INKS = ((230, 60, 60), (70, 200, 80), (80, 120, 240))
COLOURS = (
    (0, 0, 0),
    (130, 75, 30),
    (230, 20, 20),
    (250, 140, 0),
    (250, 240, 40),
    (30, 160, 50),
    (30, 60, 220),
    (160, 50, 200),
    (128, 128, 128),
    (255, 255, 255),
)
"""Colours by the digit that they stand for, as on a resistor: black, brown, red, orange, yellow, green, and so on."""
GLYPHS = (
    "111101101101111",
    "010110010010111",
    "111001111100111",
    "111001111001111",
    "101101111001001",
    "111100111001111",
    "111100111101111",
    "111001001001001",
    "111101111101111",
    "111101111001111",
)
"""Digits in three columns and five rows, row by row."""
_DOT = 8
"""pixels of a glyph's dot"""


def draw(target: int, rng: random.Random) -> Image.Image:
    """Return a picture of `target`; what it shows, in which cells and in which ink is drawn from `rng`."""
    picture = Image.new("RGB", (SIDE, SIDE), (20, 20, 20))
    rng.choice((_digit, _squares, _colour))(ImageDraw.Draw(picture), target, rng)
    return picture


def encoded(picture: Image.Image) -> bytes:
    """Return the bytes of `picture` as PNG, which loses nothing."""
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


def opened(data: bytes) -> Image.Image:
    """Return the picture whose PNG file is `data`."""
    return Image.open(io.BytesIO(data))


def _digit(canvas: ImageDraw.ImageDraw, target: int, rng: random.Random) -> None:
    ink = rng.choice(INKS)
    for place, dot in enumerate(GLYPHS[target]):
        if dot == "1":
            _fill(canvas, 20 + place % 3 * _DOT, 12 + place // 3 * _DOT, _DOT, ink)


def _squares(canvas: ImageDraw.ImageDraw, target: int, rng: random.Random) -> None:
    ink, across = rng.choice(INKS), SIDE // CELL
    for cell in rng.sample(range(across**2), target):
        _fill(canvas, cell % across * CELL + 3, cell // across * CELL + 3, CELL - 6, ink)


def _colour(canvas: ImageDraw.ImageDraw, target: int, _rng: random.Random) -> None:
    _fill(canvas, 4, 4, SIDE - 8, COLOURS[target])


def _fill(canvas: ImageDraw.ImageDraw, left: int, top: int, side: int, ink: tuple[int, int, int]) -> None:
    canvas.rectangle((left, top, left + side - 1, top + side - 1), fill=ink)
