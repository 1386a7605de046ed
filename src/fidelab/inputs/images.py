"""Prompts with images: the package's own, drawn by code, and those of the user's log.

The drawn ones are shapes, colours, counts and digits with questions of known answers. Each image has a wrong
counterpart with another answer. A log's images are its ``data:`` URLs; other addresses are never fetched.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.requests import Tokens
from fidelab.core.errors import InputError

if TYPE_CHECKING:
    from fidelab.inputs.conversations import Traffic
    from fidelab.inputs.tokens import Template, Tokenizer

Pixels = NDArray[np.uint8]  # [height, width, 3]

MAX_IMAGE_BYTES = 8 << 20
"""Bytes of an image file, at most."""
MAX_PIXELS = 1 << 24
"""Pixels of an image, at most: 4,096 by 4,096."""
MAX_TOTAL_BYTES = 64 << 20
"""Bytes of all images of a run, at most: captures hold them."""

_PART: Mapping[str, str] = {"type": "image"}
_MAX_LISTED = 3  # bad images that a message lists
_COLORS: Mapping[str, tuple[int, int, int]] = {
    "red": (214, 40, 40),
    "green": (30, 150, 60),
    "blue": (30, 80, 200),
    "black": (20, 20, 20),
}
_SEED = 20


@dataclass(frozen=True)
class ImagePrompt:
    """A conversation that shows images.

    ``messages``: with a part ``{"type": "image"}`` in the place of each of ``images``, which are files (PNG, JPEG …);
    ``wrong``: other images in their places.  ``right``: the answer, ``others``: answers that are not right; empty where
    that is not known.
    """

    id: str
    messages: tuple[dict[str, Any], ...]
    images: tuple[bytes, ...]
    wrong: tuple[bytes, ...]
    right: str = ""
    others: tuple[str, ...] = ()


# ----------------------------------------------------------------------------------------------- drawing


def draw(color: str, shape: str, count: int, size: int = 224, reach: float = 0.35) -> Pixels:
    """Draw ``count`` equal shapes side by side on white: [size, size, 3], 8 bits per channel.

    ``reach``: from the middle of a shape to its side, as a share of its part of the width.
    """
    image: Pixels = np.full((size, size, 3), 255, dtype=np.uint8)
    reach = reach * size / count
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


# Segments of a display: top, upper left, upper right, middle, lower left, lower right, bottom.
_SEGMENTS = (
    *("1110111", "0010010", "1011101", "1011011", "0111010"),
    *("1101011", "1101111", "1010010", "1111111", "1111011"),
)


def draw_digit(digit: int, color: str = "black", size: int = 224) -> Pixels:
    """Draw one digit in seven segments on white: [size, size, 3]."""
    image: Pixels = np.full((size, size, 3), 255, dtype=np.uint8)
    left, right, thick = int(0.3 * size), int(0.7 * size), size // 14
    top, middle, bottom = int(0.15 * size), size // 2, int(0.85 * size)
    boxes = (
        (top, top, left, right),
        (top, middle, left, left),
        (top, middle, right, right),
        (middle, middle, left, right),
        (middle, bottom, left, left),
        (middle, bottom, right, right),
        (bottom, bottom, left, right),
    )
    for (y0, y1, x0, x1), lit in zip(boxes, _SEGMENTS[digit], strict=True):
        if lit == "1":
            image[y0 - thick // 2 : y1 + thick // 2, x0 - thick // 2 : x1 + thick // 2] = _COLORS[color]
    return image


def png(pixels: Pixels) -> bytes:
    """Return a PNG file of an image ``[height, width, 3]``; equal pixels give equal bytes under one version of zlib."""
    height, width, _ = pixels.shape
    rows = np.concatenate((np.zeros((height, 1), dtype=np.uint8), pixels.reshape(height, -1)), axis=1)

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
        + chunk(b"IEND", b"")
    )


def drawn_prompts() -> tuple[ImagePrompt, ...]:
    """Return sixteen questions about as many images, four each about colors, shapes, counts and digits, in turn."""
    rng = np.random.default_rng(_SEED)
    colors, shapes, counts = ("red", "green", "blue"), ("circle", "square", "triangle"), ("one", "two", "three", "four")
    digits, drawn_digits = tuple("0123456789"), rng.permutation(10).tolist()
    found = []
    for number in range(1, 5):
        color, other_color = rng.permutation(colors)[:2].tolist()
        shape, other_shape = rng.permutation(shapes)[:2].tolist()
        count, other_count = rng.permutation(4)[:2].tolist()
        digit, other_digit = drawn_digits[2 * number - 2 : 2 * number]
        reach = float(rng.uniform(0.2, 0.3))  # no two questions are about the same image
        found += [
            _drawn(
                f"color-{number}",
                "Which color is the shape in the image: red, green or blue? Answer with one word.",
                *(color, colors, *(draw(named, shape, 1, reach=reach + 0.1) for named in (color, other_color))),
            ),
            _drawn(
                f"shape-{number}",
                "Which shape is in the image: circle, square or triangle? Answer with one word.",
                *(shape, shapes, *(draw(color, named, 1, reach=reach) for named in (shape, other_shape))),
            ),
            _drawn(
                f"count-{number}",
                "How many shapes are in the image: one, two, three or four? Answer with one word.",
                *(counts[count], counts),
                *(draw(other_color, other_shape, n + 1, reach=reach + 0.05) for n in (count, other_count)),
            ),
            _drawn(
                f"digit-{number}",
                "Which digit is in the image? Answer with the digit only.",
                *(str(digit), digits, draw_digit(digit, color), draw_digit(other_digit, color)),
            ),
        ]
    return tuple(found)


def _drawn(name: str, question: str, right: str, answers: Sequence[str], image: Pixels, wrong: Pixels) -> ImagePrompt:
    content = [dict(_PART), {"type": "text", "text": question}]
    others = tuple(answer for answer in answers if answer != right)
    return ImagePrompt(name, ({"role": "user", "content": content},), (png(image),), (png(wrong),), right, others)


# ---------------------------------------------------------------------------------------- the user's own


def read_url(url: str) -> bytes:
    """Return the image file in a ``data:`` URL.

    Raises:
        InputError: If the image is at another address, is too large, or cannot be read.  The message does not show the
            URL.
    """
    head, comma, body = url.partition(",")
    if not head.startswith("data:"):
        where = "at a remote address" if head.lower().startswith(("http:", "https:", "ftp:")) else "no data: URL"
        raise InputError(f"the image is {where}, which is not fetched: write it as a data: URL")
    if not comma or not head.endswith(";base64"):
        raise InputError("the data: URL of the image has no base64 in it")
    if len(body) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise InputError(f"the image has more than {MAX_IMAGE_BYTES >> 20} MiB")
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise InputError("the data: URL of the image is not valid base64") from None
    _check(data)
    return data


def _check(data: bytes) -> None:
    """Refuse files that are not an image, or too large. The whole image is decoded."""
    try:
        import PIL.Image
    except ImportError:
        raise InputError("reading images needs Pillow: pip install 'fidelab[vision]'") from None
    try:
        with PIL.Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise InputError(f"the image has {width:,} by {height:,} pixels; at most {MAX_PIXELS:,} in all")
            image.convert("RGB")
    except InputError:
        raise
    except Exception as error:  # Pillow's decoders raise errors of many kinds
        raise InputError(f"the image cannot be read: {' '.join(str(error).split())[:100]}") from None


def traffic_image_prompts(traffic: Traffic) -> tuple[ImagePrompt, ...]:
    """Return every conversation of a log that shows images, up to the last message that is not the assistant's.

    Its wrong images are those of the next such conversation, in turn, or a drawn image where there is none.

    Raises:
        InputError: If an image cannot be read, without ``--skip-bad`` (the message has the number, and the first
            places).
    """
    found: list[tuple[str, tuple[dict[str, Any], ...], tuple[bytes, ...]]] = []
    bad: list[str] = []
    for conversation in traffic.conversations:
        messages = conversation.parts
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        number = sum(map(_images_in, messages))
        if not number:
            continue
        try:
            images = tuple(map(read_url, conversation.images[:number]))
        except InputError as error:
            bad.append(f"conversation {conversation.id}: {error}")
            continue
        found.append((conversation.id, messages, images))
    if bad and not traffic.skip_bad:
        more = f", and {len(bad) - _MAX_LISTED} more" if len(bad) > _MAX_LISTED else ""
        raise InputError(
            f"traffic file {traffic.name} has images in {len(bad)} conversations that cannot be used: "
            f"{'; '.join(bad[:_MAX_LISTED])}{more}; fix them, or skip them with --skip-bad"
        )
    drawn = png(draw("blue", "circle", 1))
    prompts = []
    for index, (name, asked, images) in enumerate(found):
        others = [other for _, _, theirs in (*found[index + 1 :], *found[:index]) for other in theirs]
        others = [other for other in others if other not in images] or [drawn]
        wrong = tuple(others[i % len(others)] for i in range(len(images)))
        prompts.append(ImagePrompt(name, asked, images, wrong))
    return tuple(prompts)


def _images_in(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    return sum(part.get("type") == "image" for part in content) if isinstance(content, list) else 0


# ------------------------------------------------------------------------------------------------ tokens


@dataclass(frozen=True)
class PromptTokens:
    """A conversation in tokens: up to its last image, the same without images, and what follows both.

    ``images`` ends with a placeholder token or what the template writes after it; ``none`` has at least one token.
    """

    images: Tokens
    none: Tokens
    rest: Tokens


def placeholder(tokenizer: Tokenizer) -> str:
    """Return the text of the image placeholder token by the model's config; empty if there is none."""
    try:
        config = json.loads((tokenizer.model.path / "config.json").read_text("utf-8"))
        index = config.get("image_token_id", config.get("image_token_index"))
        return tokenizer.pieces()[index] if isinstance(index, int) and index >= 0 else ""
    except (OSError, ValueError, AttributeError, IndexError):
        return ""


def tokens_around(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], template: Template, placeholder: str
) -> PromptTokens:
    """Return a conversation as the model's chat template writes it with images and without.

    ``raw``, and a model without a template: the placeholder for each image, a line end, and the text.

    Raises:
        InputError: If the template refuses these messages, or writes nothing for an image.
    """
    plain = [_without_images(message) for message in messages]
    if template == "chat" and tokenizer.template == "chat":
        full = tokenizer.encode(tokenizer.render(messages, generation=True, private=True))
        none = tokenizer.encode(tokenizer.render(plain, generation=True, private=True))
    else:
        bos = () if tokenizer.bos_id is None else (tokenizer.bos_id,)
        text = "\n\n".join(str(message["content"]) for message in plain)
        shown = f"{placeholder}\n" * sum(map(_images_in, messages))
        full, none = ((*bos, *tokenizer.encode(written)) for written in (shown + text, text))
    same = 0
    while same < min(len(none) - 1, len(full)) and full[-1 - same] == none[-1 - same]:
        same += 1
    special = tokenizer.special_ids()
    if sum(map(special.__contains__, full)) <= sum(map(special.__contains__, none)):
        raise InputError(f"the chat template of {tokenizer.model.name} has no placeholder for an image")
    return PromptTokens(full[: len(full) - same], none[: len(none) - same], full[len(full) - same :])


def _without_images(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without its images, as one text, because templates of text models take no parts."""
    content = message["content"]
    if isinstance(content, list):
        content = "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
    return {**message, "content": content}
