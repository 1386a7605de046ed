"""q8_0, q5_1, q5_0, q4_1 and q4_0: the bytes of the gguf package, both ways."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from fidelab.core import FormatSpec
from fidelab.formats import create

TYPES = {name: gguf.GGMLQuantizationType[name.upper()] for name in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")}
SIZE = {"q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18}
TOP = {"q8_0": 127, "q5_0": 16, "q4_0": 8}
STEPS = {"q5_1": 31, "q4_1": 15}
each = pytest.mark.parametrize("name", list(TYPES))


def theirs(name: str, x: NDArray[np.float32]) -> NDArray[np.uint8]:
    with np.errstate(all="ignore"):
        out: NDArray[np.uint8] = gguf.quants.quantize(x, TYPES[name])
    return out


def ours(name: str, x: NDArray[np.float32]) -> NDArray[np.uint8]:
    (part,) = create(FormatSpec(name)).encode(torch.from_numpy(x)[None, None])
    out: NDArray[np.uint8] = part[0, 0].numpy()
    return out


def same(name: str, x: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(ours(name, x), theirs(name, x))


def random(rows: int, dim: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, dim)).astype(np.float32)


@each
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
def test_random_content_has_ggufs_bytes(name: str, dim: int) -> None:
    same(name, random(500, dim))


@each
def test_content_of_every_magnitude_mixed_or_subnormal_has_ggufs_bytes(name: str) -> None:
    powers = 10.0 ** np.linspace(-45, 38, 500)[:, None]
    same(name, np.clip(random(500, 64) * powers, -3.4e38, 3.4e38).astype(np.float32))
    powers = 10.0 ** np.random.default_rng(1).uniform(-9, 0, (500, 64))
    same(name, (random(500, 64) * powers).astype(np.float32))
    bits = np.random.default_rng(3).integers(0, 1 << 23, (500, 32), dtype=np.uint32)
    bits >>= np.arange(500, dtype=np.uint32)[:, None] % 23
    signs = np.random.default_rng(4).integers(0, 2, (500, 32), dtype=np.uint32) << 31
    same(name, (bits | signs).view(np.float32))


@each
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_have_ggufs_bytes(name: str, zero: float) -> None:
    same(name, np.full((2, 64), zero, dtype=np.float32))


@pytest.mark.parametrize("name", list(TOP))
def test_ties_have_ggufs_bytes(name: str) -> None:
    # the first value makes d a power of two, so that the others lie exactly between two codes
    x = np.random.default_rng(2).integers(-2 * TOP[name], 2 * TOP[name], (500, 32)) / 2
    x[:, 0] = TOP[name] * np.where(np.arange(500) % 2, 1, -1)
    same(name, (x * 2.0 ** np.arange(-250, 250).clip(-20, 10)[:, None]).astype(np.float32))


@pytest.mark.parametrize("name", list(STEPS))
def test_ties_above_a_smallest_value_have_ggufs_bytes(name: str) -> None:
    x = np.random.default_rng(2).integers(0, 2 * STEPS[name], (500, 32)) / 2
    x[:, 0], x[:, 1] = 0, STEPS[name]
    shift = np.random.default_rng(3).integers(-50, 50, (500, 1))
    same(name, ((x + shift) * 2.0 ** np.arange(-250, 250).clip(-20, 10)[:, None]).astype(np.float32))


@each
@settings(max_examples=150, deadline=None)
@given(x=arrays(np.float32, (1, 32), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_any_finite_content_has_ggufs_bytes(name: str, x: NDArray[np.float32]) -> None:
    # of 0 and -0 numpy's min takes either, by machine: no -0 for the formats that store a smallest value
    same(name, x + np.float32(0) if name in STEPS else x)


@pytest.mark.parametrize("name", list(STEPS))
@pytest.mark.parametrize(("first", "m"), [(0.0, 0x0000), (-0.0, 0x8000)])
def test_the_first_of_two_smallest_zeros_gives_its_sign_and_no_other_value(name: str, first: float, m: int) -> None:
    x = np.ones((1, 32), dtype=np.float32)
    x[0, 5], x[0, 20] = first, -first
    assert ours(name, x)[0, 2:4].view(np.uint16)[0] == m
    expected = gguf.quants.dequantize(theirs(name, x), TYPES[name])
    np.testing.assert_array_equal(gguf.quants.dequantize(ours(name, x), TYPES[name]), expected)


@pytest.mark.parametrize("name", ["q5_0", "q4_0"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_first_of_two_equal_magnitudes_gives_its_sign(name: str, sign: float) -> None:
    x = np.zeros((1, 32), dtype=np.float32)
    x[0, 5], x[0, 20] = sign * 3, -sign * 3
    same(name, x)
    assert ours(name, x)[0, :2].view(np.float16)[0] == sign * 3 / -TOP[name]


@each
@pytest.mark.parametrize("dim", [32, 128])
def test_any_bytes_decode_to_ggufs_values(name: str, dim: int) -> None:
    raw = np.random.default_rng(5).integers(0, 256, (2000, dim // 32 * SIZE[name]), dtype=np.uint8)
    part = torch.from_numpy(raw)[None, None]
    out = create(FormatSpec(name)).decode((part,), dim, torch.float32)[0, 0].numpy()
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, TYPES[name])
    np.testing.assert_array_equal(out, expected)


@each
@pytest.mark.parametrize("dim", [5, 80, 112])
def test_the_tail_is_filled_up_with_zeros(name: str, dim: int) -> None:
    x = random(50, dim)
    full = np.pad(x, ((0, 0), (0, -dim % 32)))
    np.testing.assert_array_equal(ours(name, x), theirs(name, full))


@pytest.mark.parametrize(("name", "size"), [("q8_0", 136), ("q5_1", 96), ("q5_0", 88), ("q4_1", 80), ("q4_0", 72)])
def test_bytes_at_head_dim_128(name: str, size: int) -> None:
    assert create(FormatSpec(name)).token_bytes(128) == size


@each
def test_a_block_beyond_float16_has_an_infinite_bound(name: str) -> None:
    fmt = create(FormatSpec(name))
    x = torch.ones(1, 1, 1, 64)
    x[..., 40] = -65520.0 * TOP.get(name, 1)
    assert torch.equal(fmt.error_bound(x).isinf()[0, 0, 0], torch.arange(64) >= 32)


@pytest.mark.parametrize("name", list(STEPS))
def test_the_extremes_of_a_block_come_back(name: str) -> None:
    x = torch.linspace(-3, STEPS[name] / 8 - 3, 32).view(1, 1, 1, 32)
    fmt = create(FormatSpec(name))
    out = fmt.decode(fmt.encode(x), 32, torch.float32)
    assert [out.min().item(), out.max().item()] == [-3, STEPS[name] / 8 - 3]


@pytest.mark.parametrize("name", ["q5_0", "q4_0"])
def test_the_bound_where_codes_end_before_the_largest_magnitude_is_the_error_there(name: str) -> None:
    fmt, x = create(FormatSpec(name)), torch.zeros(1, 1, 1, 32)
    x[..., 3], x[..., 9] = -TOP[name], TOP[name]  # one step below zero's code has no code above it
    error = (fmt.decode(fmt.encode(x), 32, torch.float32) - x).abs()[0, 0, 0]
    assert error.nonzero().tolist() == [[9]]
    assert fmt.error_bound(x)[0, 0, 0, [3, 9]].tolist() == pytest.approx([0.5, float(error[9])], rel=1e-2)
