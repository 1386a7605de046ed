"""Vision checks: an image drawn at run time, and a second one with another answer (the control)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VisionQuestion:
    """A question about an image.  ``image`` and ``control`` are (color, shape, how many) for
    :func:`fidelab.inputs.images.draw`.

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
