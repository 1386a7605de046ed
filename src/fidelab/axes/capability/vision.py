"""Vision checks: an image drawn at run time, and another one that calls for another answer (the control).

No engine here takes images yet: the checks are listed as not applicable, and never passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["QUESTIONS", "VisionQuestion", "draw"]

Image = NDArray[np.uint8]

_COLORS: Mapping[str, tuple[int, int, int]] = {"red": (214, 40, 40), "green": (30, 150, 60), "blue": (30, 80, 200)}


@dataclass(frozen=True)
class VisionQuestion:
    """A question about an image.  ``image`` and ``control`` are (color, shape, how many) for :func:`draw`.

    Passed: ``right`` to ``image``, and not ``right`` to ``control``, which shows one of ``wrong``.
    """

    text: str
    right: str
    wrong: tuple[str, ...]
    image: tuple[str, str, int]
    control: tuple[str, str, int]


QUESTIONS = (
    VisionQuestion(
        "Which color is the shape in the image: red, green or blue? Answer with one word.",
        *("red", ("green", "blue"), ("red", "circle", 1), ("blue", "circle", 1)),
    ),
    VisionQuestion(
        "Which shape is in the image: circle, square or triangle? Answer with one word.",
        *("triangle", ("circle", "square"), ("green", "triangle", 1), ("green", "square", 1)),
    ),
    VisionQuestion(
        "How many squares are in the image: two, three or four? Answer with one word.",
        *("three", ("two", "four"), ("blue", "square", 3), ("blue", "square", 2)),
    ),
)


def draw(color: str, shape: str, count: int, size: int = 224) -> Image:
    """``count`` equal shapes side by side on white: [size, size, 3], 8 bits per channel."""
    image: Image = np.full((size, size, 3), 255, dtype=np.uint8)
    reach = 0.35 * size / count
    y, x = np.mgrid[:size, :size] + 0.5
    for n in range(count):
        dx, dy = x - (n + 0.5) * size / count, y - size / 2
        match shape:
            case "circle":
                inside = dx**2 + dy**2 <= reach**2
            case "square":
                inside = np.maximum(np.abs(dx), np.abs(dy)) <= reach
            case "triangle":
                inside = (np.abs(dy) <= reach) & (2 * np.abs(dx) <= dy + reach)
            case _:
                raise ValueError(f"no shape {shape!r}")
        image[inside] = _COLORS[color]
    return image
