"""iq4_nl: gguf's values for any bytes, the nearest level for any content."""

from __future__ import annotations

import itertools

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from fidelab.core import FormatSpec
from fidelab.formats import create
from fidelab.formats.iq4 import LEVELS

FORMAT = create(FormatSpec("iq4_nl"))


def content(rows: int, seed: int = 0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, 32)) * 10.0 ** rng.uniform(-4, 4, (rows, 1))).astype(np.float32)


def encoded(x: NDArray[np.float32]) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """``d`` per row, and codes ``[rows, 32]``."""
    raw = FORMAT.encode(torch.from_numpy(x)[None, None])[0][0, 0].numpy()
    return raw[:, :2].copy().view(np.float16)[:, 0], np.concatenate([raw[:, 2:] & 15, raw[:, 2:] >> 4], -1)


def test_any_bytes_decode_to_ggufs_values_and_every_code_to_its_level() -> None:
    raw = np.random.default_rng(5).integers(0, 256, (3000, 2 * 18), dtype=np.uint8)
    out = FORMAT.decode((torch.from_numpy(raw)[None, None],), 64, torch.float32)[0, 0].numpy()
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.IQ4_NL)
    np.testing.assert_array_equal(out, expected)
    codes = np.arange(16, dtype=np.uint8)
    block = np.concatenate([np.array([0.5], dtype=np.float16).view(np.uint8), codes | codes[::-1] << 4])
    decoded = FORMAT.decode((torch.from_numpy(block)[None, None, None],), 32, torch.float32).flatten()
    assert decoded.tolist() == [level / 2 for level in (*LEVELS, *LEVELS[::-1])]


def test_codes_are_the_nearest_levels_under_the_first_scale() -> None:
    x = content(500)
    first = x[np.arange(500), np.abs(x).argmax(-1)].astype(np.float64) / -127
    distance = np.abs((x / first[:, None])[..., None] - np.array(LEVELS))
    _, codes = encoded(x)
    taken = np.take_along_axis(distance, codes[..., None].astype(np.int64), -1)[..., 0]
    assert (taken <= distance.min(-1) + 1e-4).all()


def test_halfway_between_two_levels_the_upper_one_is_taken() -> None:
    middles = [(low + high) / 2 for low, high in itertools.pairwise(LEVELS)]
    x = np.array([[-127, *middles, *[0] * 16]], dtype=np.float32)
    np.testing.assert_array_equal(encoded(x)[1][0, : len(LEVELS)], [0, *range(1, len(LEVELS))])


def test_d_is_the_weighted_least_squares_fit() -> None:
    x = content(500)
    d, codes = encoded(x)
    levels, wide = np.array(LEVELS, dtype=np.float64)[codes], x.astype(np.float64)
    fit = (wide**3 * levels).sum(-1) / (wide**2 * levels**2).sum(-1)
    np.testing.assert_allclose(d.astype(np.float64), fit, rtol=2**-10, atol=2**-25)


def test_levels_come_back_tails_are_filled_with_zeros_and_a_block_beyond_float16_has_an_infinite_bound() -> None:
    x = torch.tensor([*LEVELS, *LEVELS], dtype=torch.float32).view(1, 1, 1, 32) * 2.0**-6
    assert torch.equal(FORMAT.decode(FORMAT.encode(x), 32, torch.float32), x)
    x = torch.ones(1, 1, 1, 64)
    x[..., 40] = 1e8
    assert torch.equal(FORMAT.error_bound(x).isinf()[0, 0, 0], torch.arange(64) >= 32)
    x = torch.from_numpy(content(20)).view(1, 1, 8, 80)
    full = torch.nn.functional.pad(x, (0, 16))
    assert torch.equal(FORMAT.encode(x)[0], FORMAT.encode(full)[0])
    assert FORMAT.token_bytes(80) == 3 * 18
