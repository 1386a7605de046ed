"""fp8_e4m3, fp8_e5m2 and their fnuz forms: every code, every rounding boundary, every way to scale."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fidelab.core import KVSpec
from fidelab.core.errors import UsageError
from fidelab.formats import create
from fidelab.formats.fp8 import Float8
from tests.formats.samples import normal
from tests.present import present

TOP = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "fp8_e4m3fnuz": 240.0, "fp8_e5m2fnuz": 57344.0}
TOP_CODE = {"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B, "fp8_e4m3fnuz": 0x7F, "fp8_e5m2fnuz": 0x7F}
NAMES = list(TOP)
both = pytest.mark.parametrize("name", NAMES)
scaled = pytest.mark.parametrize("scale", ["per-tensor", "per-channel", "per-token-head"])


def make(name: str, scale: str = "none") -> Float8:
    fmt = create(KVSpec.parse(f"{name}[scale={scale}]").k)
    assert isinstance(fmt, Float8)
    return fmt


def value_of(code: int, name: str) -> float:
    """The number behind a code, from the definition of the types (Micikevicius et al., 2022, table 1; AMD's CDNA3)."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if name.startswith("fp8_e4m3") else (5, 2, 15)
    sign = -1.0 if code & 0x80 else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    if name.endswith("fnuz"):
        bias += 1
        if code == 0x80:
            return math.nan
    if name == "fp8_e4m3" and code & 0x7F == 0x7F:
        return math.nan
    if name == "fp8_e5m2" and exponent == 31:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def values(name: str) -> NDArray[np.float64]:
    return np.array([value_of(code, name) for code in range(256)])


def codes(fmt: Float8, x: NDArray[np.float32]) -> NDArray[np.uint8]:
    out: NDArray[np.uint8] = fmt.encode(torch.from_numpy(x).view(1, 1, 1, -1))[0].flatten().numpy()
    return out


def nearest_even(x: NDArray[np.float32], name: str) -> NDArray[np.uint8]:
    """Brute force over all finite codes of the sign: the nearest one, of two equally near the even one."""
    positive = np.array([code for code in range(128) if math.isfinite(value_of(code, name))])
    distance = np.abs(np.abs(x.astype(np.float64))[:, None] - values(name)[positive][None])
    near = distance == distance.min(1, keepdims=True)
    even = near & (positive % 2 == 0)[None]
    pick = np.where(even.any(1), even.argmax(1), near.argmax(1))
    negative = np.signbit(x) & ((positive[pick] > 0) | (not name.endswith("fnuz")))  # fnuz has no -0
    sign = np.where(negative, 0x80, 0)
    out: NDArray[np.uint8] = (positive[pick] | sign).astype(np.uint8)
    return out


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_decodes_to_its_value(name: str, dtype: torch.dtype) -> None:
    part = torch.arange(256, dtype=torch.uint8).view(1, 1, 2, 128)
    out = make(name).decode((part,), 128, dtype).flatten().double().numpy()
    np.testing.assert_array_equal(out, values(name))
    numbers = ~np.isnan(out)
    assert (np.signbit(out) == np.signbit(values(name)))[numbers].all()


@both
def test_every_finite_code_survives_and_encode_rounds_to_nearest_even_at_every_boundary(name: str) -> None:
    every = np.array([code for code in range(256) if math.isfinite(value_of(code, name))])
    np.testing.assert_array_equal(codes(make(name), values(name)[every].astype(np.float32)), every)
    finite = np.sort(values(name)[:128][np.isfinite(values(name)[:128])])
    middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)  # exact: one mantissa bit more than a code
    x = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))])
    x = np.concatenate([x, -x])
    np.testing.assert_array_equal(codes(make(name), x), nearest_even(x, name))


@both
def test_scale_is_none_unless_told(name: str) -> None:
    assert create(KVSpec.parse(name).k) == make(name, "none")


@both
def test_one_scale_is_fitted_per_batch_row_or_per_head_and_channel(name: str) -> None:
    x = normal(3, 2, 5, 64)
    scale = present(make(name, "per-tensor").fit(x))
    assert (scale.shape, scale.dtype) == ((3, 1, 1, 1), torch.float32)
    assert torch.equal(scale.flatten(), torch.stack([row.abs().max() for row in x]) / TOP[name])
    x = normal(3, 2, 5, 64)
    scale = present(make(name, "per-channel").fit(x))
    assert (scale.shape, scale.dtype) == ((3, 2, 1, 64), torch.float32)
    assert scale[1, 1, 0, 7] == x[1, 1, :, 7].abs().max() / TOP[name]


@both
@pytest.mark.parametrize("scale", ["per-tensor", "per-channel"])
def test_padding_nan_and_infinity_do_not_count_in_fit_and_by_themselves_fit_one(name: str, scale: str) -> None:
    x = normal(2, 2, 6, 64)
    mask = torch.tensor([[False, False, True, True, True, True], [True, True, True, True, True, False]])
    padded = torch.where(mask[:, None, :, None], x, 1000.0)
    fmt = make(name, scale)
    expected = torch.cat([need(fmt.fit(x[:1, :, 2:])), need(fmt.fit(x[1:, :, :5]))])
    assert torch.equal(need(fmt.fit(padded, mask)), expected)
    fmt = make(name, scale)
    hidden = fmt.fit(normal(2, 2, 6, 64), torch.zeros(2, 6, dtype=torch.bool))
    assert (need(hidden) == 1).all()
    assert (need(fmt.fit(torch.zeros(2, 2, 6, 64))) == 1).all()
    assert (need(fmt.fit(torch.empty(2, 2, 0, 64))) == 1).all()
    x = normal(1, 2, 6, 64)
    damaged = torch.cat([x, torch.full((1, 2, 1, 64), torch.nan), torch.full((1, 2, 1, 64), -torch.inf)], 2)
    fmt = make(name, scale)
    assert torch.equal(need(fmt.fit(damaged)), need(fmt.fit(x)))


@both
@pytest.mark.parametrize("scale", ["none", "per-token-head"])
def test_nothing_is_fitted_without_a_sequence_scale(name: str, scale: str) -> None:
    assert make(name, scale).fit(normal(1, 2, 6, 64)) is None


@both
def test_number_as_scale_is_what_a_fitted_scale_of_that_value_gives(name: str) -> None:
    x = normal(1, 2, 6, 64)
    fitted = need(make(name, "per-tensor").fit(x))
    fixed = make(name, f"{float(fitted):.12g}")
    given = make(name, "per-tensor")
    same_scale = need(fixed.fit(10 * x))  # whatever is written first
    assert torch.equal(fixed.encode(x, same_scale)[0], given.encode(x, fitted)[0])
    same = (
        fixed.decode(fixed.encode(x, same_scale), 64, torch.float32, same_scale),
        given.decode(given.encode(x, fitted), 64, torch.float32, fitted),
    )
    assert torch.equal(*same)


@both
@pytest.mark.parametrize("scale", ["0", "-1", "1e31", "nan", "1e-60"])
def test_number_that_cannot_scale_is_refused(name: str, scale: str) -> None:
    with pytest.raises(UsageError, match="option scale"):
        make(name, scale)


@both
@pytest.mark.parametrize("scale", ["per-tensor", "per-channel"])
def test_subnormal_content_fits_a_normal_scale_and_a_missing_scale_is_an_error(name: str, scale: str) -> None:
    fitted = need(make(name, scale).fit(torch.full((1, 2, 6, 64), 1e-44)))
    assert (fitted == torch.finfo(torch.float32).smallest_normal).all()
    fmt = make(name, scale)
    with pytest.raises(ValueError, match=r"needs the scale that fit\(\) returned"):
        fmt.encode(normal(1, 2, 3, 64))


@both
@scaled
def test_the_largest_value_takes_the_largest_code_and_tiny_content_keeps_its_precision(name: str, scale: str) -> None:
    x = normal(1, 2, 6, 64) * 100
    fmt = make(name, scale)
    part = fmt.encode(x, fmt.fit(x))[0]
    assert (part & 0x7F).max() == TOP_CODE[name]
    # one part in 2^3 (e5m2): without a scale everything here would be zero
    x = normal(1, 2, 6, 64).sign() * torch.linspace(1e-6, 2e-6, 64)
    fmt = make(name, scale)
    fitted = fmt.fit(x)
    out = fmt.decode(fmt.encode(x, fitted), 64, torch.float32, fitted)
    assert ((out - x).abs() <= x.abs() / 7).all()


@both
def test_later_tokens_saturate_at_the_fitted_range(name: str) -> None:
    fmt = make(name, "per-tensor")
    scale = need(fmt.fit(torch.ones(1, 1, 1, 64) * 2))
    later = torch.full((1, 1, 1, 64), 5.0)
    assert (fmt.decode(fmt.encode(later, scale), 64, torch.float32, scale) == TOP[name] * scale).all()


@both
def test_the_token_scale_is_the_smallest_float16_that_nothing_overflows_and_decode_uses_it(name: str) -> None:
    x = normal(2, 4, 200, 64) * 10.0 ** torch.linspace(-6, 4, 200)[:, None]
    scale = make(name, "per-token-head").encode(x)[1]
    assert (scale.shape, scale.dtype) == ((2, 4, 200, 1), torch.float16)
    amax = x.abs().amax(-1, keepdim=True).numpy() / np.float32(TOP[name])
    below = np.nextafter(scale.numpy(), np.float16(0))
    assert (scale.numpy() >= amax).all()
    assert (below < amax).all()
    fmt = make(name, "per-token-head")
    x = normal(1, 2, 3, 64)
    part, scale = fmt.encode(x)
    unscaled = make(name).decode((part,), 64, torch.float32)
    assert torch.equal(fmt.decode((part, scale), 64, torch.float32), unscaled * scale.float())


@both
def test_the_token_scale_of_zeros_is_one_and_that_of_huge_values_finite(name: str) -> None:
    assert (make(name, "per-token-head").encode(torch.zeros(1, 2, 3, 64))[1] == 1).all()
    assert (make(name, "per-token-head").encode(torch.full((1, 2, 3, 64), 1e38))[1] == 65504).all()


def need(scale: Tensor | None) -> Tensor:
    assert scale is not None
    return scale
