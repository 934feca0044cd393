"""Images of dataset rows: a row is closed while a prompt waits, travels or is saved, and opened for its agent loop.

An opened row has PIL images, as verl's dataset makes them; they would be copied, pickled and saved as pixels, 3 MiB a
megapixel for each sample. A closed row has the bytes of image files instead. A part of a message, opened and closed::

    {"type": "image", "image": <image>, "bytes": <its file>, "path": None}  ->  the same without "image"
    {"type": "image", "image": <image>}                                     ->  {"type": "image", "bytes": <as PNG>}

A dataset class may change the image and leave the file beside it; then the image becomes the file. An image that the row
names by its path or address stays as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image
from PIL.ImageFile import ImageFile

MESSAGES = "raw_prompt"
"""column of verl's dataset with the messages of the prompt"""
_PNG_MODES = {"1", "L", "LA", "P", "RGB", "RGBA", "I;16"}
"""modes of PIL that a PNG file keeps"""
_SAME = (MESSAGES,)
"""in a closed row, the value of another column with the same list of messages; verl's dataset has two such columns"""


def closed_row(row: dict[str, Any]) -> dict[str, Any]:
    """``row`` with its images closed; a row without any is returned as it is."""
    messages = row.get(MESSAGES)
    if not has_images(messages):
        return row
    others = {key: _SAME if each is messages else each for key, each in row.items()}
    return {**others, MESSAGES: closed(messages)}


def opened_row(row: dict[str, Any]) -> dict[str, Any]:
    """``row`` with its images opened: as PIL images, which verl's agent loops and rewards read."""
    messages = row.get(MESSAGES)
    if not has_images(messages):
        return row
    messages = _changed(messages, _open)
    others = {key: messages if isinstance(each, tuple) and each == _SAME else each for key, each in row.items()}
    return {**others, MESSAGES: messages}


def closed(messages: Any) -> Any:
    """``messages`` with their images closed."""
    return _changed(messages, _close)


def has_images(messages: Any) -> bool:
    """Whether ``messages``, opened or closed, show an image."""
    return "image" in kinds_of(messages)


def kinds_of(messages: Any) -> set[str]:
    """Types of the parts of ``messages``: text, image, video, audio."""
    if not isinstance(messages, list | np.ndarray):
        return set()
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return {part.get("type") for content in contents if isinstance(content, list) for part in content if _is_part(part)}


def _is_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("type"), str)


def _changed(messages: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a copy of ``messages`` with ``change`` applied to each part, or ``messages`` themselves without an image.

    ``change`` gets parts of every type. It must return a part that is no image as it is.
    """
    if not has_images(messages):
        return messages
    return [
        {**message, "content": [change(part) if _is_part(part) else part for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _close(part: dict[str, Any]) -> dict[str, Any]:
    image = part.get("image")
    if part["type"] != "image" or not isinstance(image, Image.Image):
        return part
    rest = {key: value for key, value in part.items() if key != "image"}
    data = rest.get("bytes")
    return {**rest, "bytes": data if _is_of(image, data) else png(image)}


def _is_of(image: Image.Image, data: Any) -> bool:
    """Whether ``data`` is a file with the pixels of ``image``."""
    if not isinstance(data, bytes):
        return False
    file = opened(data)
    # Of an image that nobody has read yet, Pillow lists what is to be read. Then no pixel need be decoded.
    source, unread = getattr(image, "fp", None), getattr(image, "tile", None)
    if unread and unread == file.tile and isinstance(source, BytesIO) and source.getvalue() == data:
        return True
    return (image.mode, image.size) == (file.mode, file.size) and _coloured(image).tobytes() == _coloured(
        file
    ).tobytes()


def _coloured(image: Image.Image) -> Image.Image:
    """``image`` with colours as pixels. Those of an image with a palette are indices into it."""
    return image.convert("RGBA") if image.mode in ("P", "PA") else image


def _open(part: dict[str, Any]) -> dict[str, Any]:
    data = part.get("bytes")
    if part["type"] != "image" or not isinstance(data, bytes) or {"image", "image_url"} & part.keys():
        return part
    return {**part, "image": opened(data)}


def png(image: Image.Image) -> bytes:
    """Return ``image`` as the bytes of a PNG file, which keeps every pixel's value.

    A mode that PNG lacks becomes RGB, as the code of verl, vLLM and the processors would make it.
    """
    file = BytesIO()
    image = image if image.mode in _PNG_MODES else image.convert("RGB")
    # The lowest level takes a third of the time for a few percent more bytes.
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def opened(data: bytes) -> ImageFile:
    """The image of a file; its pixels are decoded once they are read."""
    return Image.open(BytesIO(data))


def listed(images: Any) -> list[Any]:
    """``images`` as an agent loop may give them: in a list or a tuple, one alone, or None for none."""
    return [*images] if isinstance(images, list | tuple) else [] if images is None else [images]


def digest(image: Any) -> bytes:
    """Digest of the mode and the pixels of ``image``, of PIL or an array, which counts as RGB."""
    mode = getattr(image, "mode", "RGB")
    pixels = np.asarray(_coloured(image) if isinstance(image, Image.Image) else image)
    return hashlib.blake2b(f"{mode} {pixels.shape} {pixels.dtype}".encode() + pixels.tobytes(), digest_size=16).digest()
