"""Pictures for questions about images: PNG files drawn from a description, with numpy and zlib alone."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIZE = 336  # pixels; models with vision read at least 224
COLORS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (30, 60, 220),
    "yellow": (250, 220, 30),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
}
PLACES: Mapping[str, tuple[float, float]] = {
    "center": (0.5, 0.5),
    "left": (0.2, 0.5),
    "right": (0.8, 0.5),
    "top": (0.5, 0.2),
    "bottom": (0.5, 0.8),
    "top left": (0.2, 0.2),
    "top right": (0.8, 0.2),
    "bottom left": (0.2, 0.8),
    "bottom right": (0.8, 0.8),
}
"""Centers of shapes, as shares of width and height from the upper left corner."""
SHAPES = ("disc", "square", "triangle")
MAX_DISCS = 9
_RADIUS = 0.14  # of a shape, as a share of the width
_SEGMENTS = {  # a: top, b: upper right, c: lower right, d: bottom, e: lower left, f: upper left, g: middle
    "0": "abcdef",
    "1": "bc",
    "2": "abged",
    "3": "abgcd",
    "4": "fgbc",
    "5": "afgcd",
    "6": "afgedc",
    "7": "abc",
    "8": "abcdefg",
    "9": "abcdfg",
}
_FIELDS = {"color", "background", "shape", "place", "discs", "digits"}

Pixels = NDArray[np.uint8]


def picture(description: Mapping[str, Any]) -> bytes:
    """Return the PNG file of a description: 336 × 336 pixels, RGB.

    - ``{"color": "red"}``: one colour;
    - ``{"shape": "disc", "color": "red", "place": "left"}``: a disc, square or triangle at a place;
    - ``{"discs": 3, "color": "blue"}``: one to nine discs that do not touch;
    - ``{"digits": "407", "color": "black"}``: up to four digits of seven segments.

    ``background`` is white unless it is given.

    Raises:
        ValueError: If the description has an unknown field or value.
    """
    return _png(_pixels(description))


def data_url(png: bytes) -> str:
    """Return a PNG file as a ``data:`` URL, as chat requests carry it."""
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def _pixels(description: Mapping[str, Any]) -> Pixels:
    if unknown := sorted(map(str, set(description) - _FIELDS)):
        raise ValueError(f"a picture has the fields {', '.join(sorted(_FIELDS))}; found {', '.join(unknown)}")
    color = _one_of("color", description.get("color", "black"), COLORS)
    if not {"shape", "discs", "digits"} & set(description):
        return np.full((SIZE, SIZE, 3), color, dtype=np.uint8)
    canvas = np.full(
        (SIZE, SIZE, 3), _one_of("background", description.get("background", "white"), COLORS), dtype=np.uint8
    )
    if "shape" in description:
        place = _one_of("place", description.get("place", "center"), PLACES)
        shape = _one_of("shape", description["shape"], {name: name for name in SHAPES})
        canvas[_shape(shape, place)] = color
    elif "discs" in description:
        canvas[_discs(description["discs"])] = color
    else:
        canvas[_digits(description["digits"])] = color
    return canvas


def _one_of(field: str, value: Any, known: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{field} is one of {', '.join(known)}; found {value!r}")
    return known[value]


def _shape(shape: str, place: tuple[float, float], radius: float = _RADIUS) -> NDArray[np.bool_]:
    y, x = np.mgrid[:SIZE, :SIZE] / SIZE
    dx, dy = x - place[0], y - place[1]
    if shape == "disc":
        return np.asarray(dx**2 + dy**2 <= radius**2)
    if shape == "square":
        return np.asarray(np.maximum(abs(dx), abs(dy)) <= radius)
    return np.asarray((abs(dy) <= radius) & (abs(dx) <= (dy + radius) / 2))  # a triangle that points up


def _discs(count: Any) -> NDArray[np.bool_]:
    if type(count) is not int or not 1 <= count <= MAX_DISCS:
        raise ValueError(f"discs is a number from 1 to {MAX_DISCS}; found {count!r}")
    columns = 3 if count > 4 else 2 if count > 1 else 1
    rows = -(-count // columns)
    drawn = np.zeros((SIZE, SIZE), dtype=bool)
    for index in range(count):
        row, column = divmod(index, columns)
        center = ((column + 0.5) / columns, (row + 0.5) / rows)
        drawn |= _shape("disc", center, 0.11)
    return drawn


def _digits(text: Any) -> NDArray[np.bool_]:
    if not isinstance(text, str) or not 1 <= len(text) <= 4 or not set(text) <= set(_SEGMENTS):
        raise ValueError(f"digits is a text of one to four digits; found {text!r}")
    drawn = np.zeros((SIZE, SIZE), dtype=bool)
    width, gap, thick = 56, 22, 12
    height = 2 * width
    left = (SIZE - len(text) * width - (len(text) - 1) * gap) // 2
    top = (SIZE - height) // 2
    middle = top + (height - thick) // 2
    for digit in text:
        right = left + width
        boxes = {
            "a": (top, top + thick, left, right),
            "g": (middle, middle + thick, left, right),
            "d": (top + height - thick, top + height, left, right),
            "f": (top, middle + thick, left, left + thick),
            "b": (top, middle + thick, right - thick, right),
            "e": (middle, top + height, left, left + thick),
            "c": (middle, top + height, right - thick, right),
        }
        for segment in _SEGMENTS[digit]:
            y0, y1, x0, x1 = boxes[segment]
            drawn[y0:y1, x0:x1] = True
        left = right + gap
    return drawn


def _png(pixels: Pixels) -> bytes:
    """A PNG file of 8-bit RGB pixels (PNG 1.2, sections 4.1 and 6.2): each line begins with filter type 0."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
