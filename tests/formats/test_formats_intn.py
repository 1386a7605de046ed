"""int2 to int8 against a brute-force oracle in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from fidelab.core import FormatSpec
from fidelab.formats import create
from fidelab.formats.base import Format
from tests.formats.samples import normal
from tests.sizes import size

BITS = {f"int{bits}": bits for bits in range(2, 9)}
QMAX = {2: 1, 3: 3, 4: 7, 5: 15, 6: 31, 7: 63, 8: 127}
each = pytest.mark.parametrize("name", list(BITS))


def make(name: str, group: int = 32) -> Format:
    return create(FormatSpec(name, (("group", str(group)),)))


def oracle(row: NDArray[np.float32], bits: int, group: int) -> tuple[list[int], list[float], list[float]]:
    """Bytes, scales and decoded values of one head of one token, value by value."""
    qmax = QMAX[bits]
    scales, codes = [], []
    for start in range(0, len(row), group):
        piece = row[start : start + group]
        exact = max(abs(v) for v in piece) / np.float32(qmax)
        scale = np.float16(min(max(exact, np.float32(2**-24)), np.float32(65504)))
        scales.append(float(scale))
        for value in piece:
            code = int(np.clip(np.rint(value / np.float32(scale)), -qmax, qmax))
            codes.append(code)
    decoded = [code * scales[i // group] for i, code in enumerate(codes)]
    width = bits if bits in (2, 4, 8) else 8  # others are stored one to a byte
    packed = []
    for start in range(0, len(codes), 8 // width):
        byte = 0
        for place, code in enumerate(codes[start : start + 8 // width]):
            byte += (code % 2**width) * 2 ** (width * place)
        packed.append(byte)
    return packed, scales, decoded


def check(name: str, group: int, row: NDArray[np.float32]) -> None:
    fmt = make(name, group)
    codes, scales = fmt.encode(torch.from_numpy(row).view(1, 1, 1, -1))
    decoded = fmt.decode((codes, scales), len(row), torch.float32)
    expected = oracle(row, BITS[name], group)
    assert (codes.flatten().tolist(), scales.flatten().tolist(), decoded.flatten().tolist()) == expected


@each
@pytest.mark.parametrize("group", [8, 32, 64, 128])
@pytest.mark.parametrize("dim", [1, 5, 40, 64, 80, 112, 128])
def test_codes_scales_and_values_are_the_oracles(name: str, group: int, dim: int) -> None:
    rng = np.random.default_rng(dim * group)
    for power in (-12, -7, -5, -2, 0, 3, 6, 12, 30):
        check(name, group, (rng.standard_normal(dim) * 10.0**power).astype(np.float32))


@each
@settings(max_examples=size(20, 60), deadline=None)
@given(row=arrays(np.float32, 21, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_any_finite_row_is_the_oracles(name: str, row: NDArray[np.float32]) -> None:
    check(name, 8, row)


@each
@settings(max_examples=size(20, 60), deadline=None)
@given(row=arrays(np.float32, 21, elements=st.integers(-254, 254).map(lambda i: i / 2)))
def test_rows_full_of_ties_are_the_oracles(name: str, row: NDArray[np.float32]) -> None:
    check(name, 8, row)


@pytest.mark.parametrize(
    ("name", "values", "packed"),
    [
        ("int8", [127, -127, 1, -1], [0x7F, 0x81, 0x01, 0xFF]),
        ("int4", [7, -7, 1, -1], [0x97, 0xF1]),
        ("int4", [7, -7, 1], [0x97, 0x01]),
        ("int2", [1, -1, 0, 1], [0b01_00_11_01]),
        ("int2", [1, -1, 0, 1, -1], [0b01_00_11_01, 0b11]),
        ("int7", [63, -63, 1], [0x3F, 0xC1, 0x01]),
        ("int3", [3, -3, 1], [0x03, 0xFD, 0x01]),
    ],
)
def test_codes_lie_packed_from_the_lowest_bits(name: str, values: list[int], packed: list[int]) -> None:
    codes, scales = make(name).encode(torch.tensor(values, dtype=torch.float32).view(1, 1, 1, -1))
    assert scales.flatten().tolist() == [1.0]
    assert codes.flatten().tolist() == packed


@each
def test_groups_have_scales_of_their_own_and_one_longer_than_the_head_is_one_group(name: str) -> None:
    x = torch.cat([torch.full((8,), 1000.0), torch.full((3,), 0.01)]).view(1, 1, 1, 11)
    fmt = make(name, 8)
    out = fmt.decode(fmt.encode(x), 11, torch.float32)
    assert torch.allclose(out, x, rtol=2**-10)
    assert make(name, 128).encode(normal(1, 1, 2, 80))[1].shape == (1, 1, 2, 1)


@each
def test_every_code_decodes_to_its_multiple_of_the_scale_and_values_beyond_saturate(name: str) -> None:
    fmt = make(name)
    out = fmt.decode(fmt.encode(torch.full((1, 1, 1, 32), -3e38)), 32, torch.float32)
    assert (out == -65504.0 * QMAX[BITS[name]]).all()
    multiples = torch.arange(-QMAX[BITS[name]], QMAX[BITS[name]] + 1, dtype=torch.float32)
    fmt = make(name, 1024)
    parts = fmt.encode(multiples.view(1, 1, 1, -1) / 4)
    assert parts[1].item() == 0.25
    assert torch.equal(fmt.decode(parts, len(multiples), torch.float32).flatten(), multiples / 4)


@pytest.mark.parametrize(("name", "size"), [("int8", 128 + 8), ("int4", 64 + 8), ("int2", 32 + 8), ("int5", 128 + 8)])
def test_bytes_at_head_dim_128(name: str, size: int) -> None:
    assert create(FormatSpec(name)).token_bytes(128) == size
