"""nvfp4 and mxfp4: every code, every scale byte, the nearest number by brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.formats.samples import make, normal

SIZE = {"nvfp4": 16, "nvfp4[scale=per-tensor]": 16, "mxfp4": 32}
each = pytest.mark.parametrize("text", list(SIZE))
ONE = {"nvfp4": 0x38, "mxfp4": 127}  # the byte of scale 1
unscaled = pytest.mark.parametrize("name", list(ONE))


def e2m1(code: int) -> float:
    """The number behind a code: one sign bit, two of exponent (bias 1), one of mantissa."""
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if code & 8 else magnitude


def e4m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def unpacked(packed: Tensor) -> NDArray[np.int64]:
    raw = packed.flatten().numpy().astype(np.int64)
    return np.stack([raw & 15, raw >> 4], -1).flatten()


def block(name: str, values: list[float]) -> Tensor:
    """One block whose scale is 1: a 6 in front, zeros behind."""
    filled = [6.0, *values, *[0.0] * (SIZE[name] - 1 - len(values))]
    return torch.tensor(filled).view(1, 1, 1, -1)


@unscaled
def test_every_byte_decodes_to_its_two_numbers(name: str) -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 256)
    scales = torch.full((1, 1, 1, 512 // SIZE[name]), ONE[name], dtype=torch.uint8)
    out = make(name).decode((packed, scales), 512, torch.float32).flatten().numpy()
    expected = np.array([[e2m1(byte & 15), e2m1(byte >> 4)] for byte in range(256)]).flatten()
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(np.signbit(out), np.signbit(expected))


def test_scale_bytes_are_e4m3_numbers_of_nvfp4_and_powers_of_two_of_mxfp4() -> None:
    packed = torch.full((1, 1, 127, 8), 0x22, dtype=torch.uint8)  # ones
    scales = torch.arange(127, dtype=torch.uint8).view(1, 1, 127, 1)
    out = make("nvfp4").decode((packed, scales), 16, torch.float32)[0, 0, :, 0]
    assert out.tolist() == [e4m3(byte) for byte in range(127)]
    packed = torch.full((1, 1, 255, 16), 0x22, dtype=torch.uint8)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 1, 255, 1)
    out = make("mxfp4").decode((packed, scales), 32, torch.float32)[0, 0, :, 0]
    assert out.tolist() == [2.0 ** (byte - 127) for byte in range(255)]


@pytest.mark.parametrize(("name", "byte"), [("nvfp4", 0x7F), ("mxfp4", 255)])
def test_the_nan_scale_decodes_to_nan(name: str, byte: int) -> None:
    packed = torch.zeros(1, 1, 1, SIZE[name] // 2, dtype=torch.uint8)
    scales = torch.full((1, 1, 1, 1), byte, dtype=torch.uint8)
    assert make(name).decode((packed, scales), SIZE[name], torch.float32).isnan().all()


@unscaled
def test_encode_takes_the_nearest_and_of_two_the_even_code(name: str) -> None:
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
    around = [middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(9))]
    x = np.concatenate([*around, np.linspace(0, 6, 979, dtype=np.float32)])
    x = np.concatenate([x, -x]).reshape(-1, 8)
    blocks = torch.cat([block(name, row.tolist()) for row in x], 2)
    codes, scales = make(name).encode(blocks)
    assert (scales == ONE[name]).all()
    distance = np.abs(np.abs(x.astype(np.float64))[..., None] - np.array([e2m1(code) for code in range(8)]))
    distance += np.array([0, 1e-12] * 4)  # an odd code only where it is nearer
    taken = unpacked(codes).reshape(-1, SIZE[name])[:, 1:9]
    np.testing.assert_array_equal(taken & 7, distance.argmin(-1))
    np.testing.assert_array_equal((taken & 8 > 0)[x != 0], (x < 0)[x != 0])


@each
def test_codes_are_the_nearest_under_the_stored_scale(text: str) -> None:
    fmt, x = make(text), normal(2, 2, 20, 96) * 10.0 ** torch.linspace(-2, 2, 20)[:, None]
    fitted = fmt.fit(x)
    parts = fmt.encode(x, fitted)
    out = fmt.decode(parts, 96, torch.float32, fitted)
    ones = (torch.full_like(parts[0], 0x22), parts[1])
    scales = fmt.decode(ones, 96, torch.float32, fitted)
    candidates = torch.tensor([e2m1(code) for code in range(16)]) * scales[..., None]
    best = (candidates - x[..., None]).abs().amin(-1)
    assert ((out - x).abs() <= best * (1 + 1e-6)).all()


def test_the_mxfp4_scale_is_the_specifications_power_of_two_and_saturates_between_six_and_eight() -> None:
    amax = np.concatenate([10.0 ** np.linspace(-44, 38.5, 2000), 2.0 ** np.arange(-149, 128)]).astype(np.float32)
    scales = make("mxfp4").encode(torch.from_numpy(amax)[None, None, :, None])[1].flatten().tolist()
    exponents = [max(math.frexp(value)[1] - 1 - 2, -127) for value in amax.tolist()]
    assert scales == [exponent + 127 for exponent in exponents]
    x = torch.tensor([7.99, -6.5, 3.0]).view(1, 1, 1, 3)
    fmt = make("mxfp4")
    assert fmt.decode(fmt.encode(x), 3, torch.float32).flatten().tolist() == [6, -6, 3]


def test_the_nvfp4_scale_is_amax_over_six() -> None:
    x = torch.zeros(1, 1, 126, 16)
    x[0, 0, :, 3] = torch.tensor([-6 * e4m3(byte) for byte in range(1, 127)])
    parts = make("nvfp4").encode(x)
    assert parts[1].flatten().tolist() == list(range(1, 127))
    assert torch.equal(make("nvfp4").decode(parts, 16, torch.float32), x)


def test_the_fitted_scale_uses_the_whole_range_of_block_scales() -> None:
    x = normal(3, 2, 5, 64) * 1e-6
    fmt = make("nvfp4[scale=per-tensor]")
    scale = fmt.fit(x)
    assert scale is not None
    assert (scale.shape, scale.dtype) == ((3, 1, 1, 1), torch.float32)
    torch.testing.assert_close(scale.flatten(), x.abs().amax((1, 2, 3)) / 2688)
    assert (fmt.encode(x, scale)[1].amax((1, 2, 3)) == 0x7E).all()


def test_padding_does_not_count_in_fit_and_a_missing_fitted_scale_is_an_error() -> None:
    x = normal(1, 2, 6, 64)
    padded = torch.cat([x, torch.full((1, 2, 1, 64), 1e3)], 2)
    fmt = make("nvfp4[scale=per-tensor]")
    scale, expected = fmt.fit(padded, torch.tensor([[True] * 6 + [False]])), fmt.fit(x)
    assert scale is not None
    assert expected is not None
    assert torch.equal(scale, expected)
    with pytest.raises(ValueError, match=r"needs the scale that fit\(\) returned"):
        make("nvfp4[scale=per-tensor]").encode(normal(1, 2, 3, 64))


@each
@pytest.mark.parametrize("dim", [5, 80, 112])
def test_the_tail_is_filled_up_with_zeros(text: str, dim: int) -> None:
    fmt, x = make(text), normal(2, 2, 4, dim)
    full = torch.nn.functional.pad(x, (0, -dim % SIZE[text]))
    scale = fmt.fit(x)
    assert all(torch.equal(a, b) for a, b in zip(fmt.encode(x, scale), fmt.encode(full, scale), strict=True))
