"""Pictures for questions: read by Pillow, and measured by means of their own."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from fidelab.inputs.questions.load import load_questions
from fidelab.inputs.questions.pictures import COLORS, PLACES, SIZE, data_url, picture

SEVEN_SEGMENTS = {  # bars from the top row to the bottom row: upper, left and right, middle, left and right, lower
    "0": "1 11 0 11 1",
    "1": "0 01 0 01 0",
    "2": "1 01 1 10 1",
    "3": "1 01 1 01 1",
    "4": "0 11 1 01 0",
    "5": "1 10 1 01 1",
    "6": "1 10 1 11 1",
    "7": "1 01 0 01 0",
    "8": "1 11 1 11 1",
    "9": "1 11 1 01 1",
}


def decoded(description: dict[str, Any]) -> NDArray[np.uint8]:
    image = Image.open(io.BytesIO(picture(description)))
    assert (image.format, image.mode) == ("PNG", "RGB")
    return np.asarray(image)


def drawn(description: dict[str, Any]) -> NDArray[np.bool_]:
    """Pixels of the color of the description."""
    return np.asarray((decoded(description) == COLORS[description.get("color", "black")]).all(axis=-1))


@pytest.mark.parametrize("color", COLORS)
def test_a_picture_of_one_color_has_that_color_everywhere(color: str) -> None:
    pixels = decoded({"color": color})
    assert pixels.shape == (SIZE, SIZE, 3)
    assert SIZE >= 224
    assert {tuple(map(int, pixel)) for pixel in pixels.reshape(-1, 3)} == {COLORS[color]}


@pytest.mark.parametrize("shape", ["disc", "square", "triangle"])
@pytest.mark.parametrize("place", PLACES)
def test_a_shape_lies_at_its_place_and_within_the_picture(shape: str, place: str) -> None:
    mask = drawn({"shape": shape, "color": "red", "place": place})
    y, x = (float(center) / SIZE for center in ndimage.center_of_mass(mask))
    sides = {"left": x < 0.4, "right": x > 0.6, "top": y < 0.4, "bottom": y > 0.6}
    assert {side for side, there in sides.items() if there} == set(place.split()) - {"center"}
    edges = np.concatenate([mask[0], mask[-1], mask[:, 0], mask[:, -1]])
    assert not edges.any()


def test_shapes_differ_by_the_share_of_their_box_that_they_fill() -> None:
    shares = {}
    for shape in ("disc", "square", "triangle"):
        mask = drawn({"shape": shape, "color": "blue"})
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        shares[shape] = mask.sum() / (np.ptp(rows) + 1) / (np.ptp(columns) + 1)
    assert shares == pytest.approx({"disc": np.pi / 4, "square": 1.0, "triangle": 0.5}, abs=0.03)


@pytest.mark.parametrize("count", range(1, 10))
def test_discs_are_as_many_as_asked_and_do_not_touch(count: int) -> None:
    labels, found = ndimage.label(drawn({"discs": count, "color": "green"}), np.ones((3, 3)))
    assert found == count
    sizes = np.bincount(labels.ravel())[1:]
    assert sizes.min() > 0.95 * sizes.max()


@pytest.mark.parametrize("text", ["407", "1", "2358", "69"])
def test_digits_have_their_seven_segments(text: str) -> None:
    mask = drawn({"digits": text})
    rows = np.flatnonzero(mask.any(axis=1))
    top, bottom = int(rows[0]), int(rows[-1]) + 1
    thick, height = 12, bottom - top
    if text == "1":  # as high as others, and without their bars
        assert mask[top:bottom].any(axis=1).all()
        return
    pitch = 78
    left = (SIZE - (len(text) - 1) * pitch - 56) // 2
    for index, digit in enumerate(text):
        box = mask[top:bottom, left + index * pitch : left + index * pitch + 56]
        middle, quarter = height // 2, height // 4
        bars = [box[thick // 2, 28], box[middle, 28], box[height - thick // 2, 28]]
        sides = [box[row, column] for row in (quarter, height - quarter) for column in (thick // 2, 56 - thick // 2)]
        upper, center, lower = map(int, bars)
        a, b, c, d = map(int, sides)
        assert f"{upper} {a}{b} {center} {c}{d} {lower}" == SEVEN_SEGMENTS[digit]


def test_pictures_of_the_questions_can_be_read() -> None:
    images = [question.image for question in load_questions() if question.image]
    assert len(images) == 8
    for image in images:
        assert decoded(dict(image)).shape == (SIZE, SIZE, 3)


def test_a_data_url_holds_the_file() -> None:
    png = picture({"color": "red"})
    head, _, body = data_url(png).partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(body) == png


@pytest.mark.parametrize(
    ("description", "fault"),
    [
        ({"colour": "red"}, "a picture has the fields"),
        ({"color": "mauve"}, "color is one of"),
        ({"color": ["red"]}, "color is one of"),
        ({"shape": "star"}, "shape is one of"),
        ({"shape": "disc", "place": "nowhere"}, "place is one of"),
        ({"discs": 10}, "discs is a number from 1 to 9"),
        ({"discs": True}, "discs is a number from 1 to 9"),
        ({"digits": "4o7"}, "digits is a text"),
        ({"digits": ""}, "digits is a text"),
    ],
)
def test_a_description_that_cannot_be_drawn_is_refused(description: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        picture(description)
