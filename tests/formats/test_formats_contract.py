"""What every format promises, run over one table of all formats and options."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from torch import Tensor

from fidelab.formats import FORMATS
from fidelab.formats.base import Format
from tests.formats.samples import make, normal


def texts_of(name: str) -> list[str]:
    """A format with all options that it names to be tested."""
    return [f"{name}[{variant}]" for variant in make(name).variants] or [name]


ALL = [text for name in FORMATS.names() for text in texts_of(name)]
DIMS = [1, 5, 40, 64, 80, 96, 112, 128]

# One or two of each family, for each push; all of them under the marker "long".
PUSH = ["bf16", "fp8_e4m3[scale=per-channel]", "int8[group=32]", "int4[group=8]", "uint3[group=32]"]
PUSH += ["nvfp4[scale=per-tensor]", "mxfp4", "lloyd3", "q8_0", "q4_0", "q4_1", "iq4_nl"]
NOW = {*PUSH} | {text for text in ALL if not any(type(make(text)) is type(make(other)) for other in PUSH)}


def cases(texts: list[str]) -> list[Any]:
    """Those of a push, and the others under the marker ``long``."""
    return [text if text in NOW else pytest.param(text, marks=pytest.mark.long) for text in texts]


every = pytest.mark.parametrize("text", cases(ALL))


def magnitudes(dim: int) -> Tensor:
    """[2, 2, 84, dim]: a magnitude per token, from float32's subnormals to its largest; then mixtures."""
    powers = torch.linspace(-45, 38, 84, dtype=torch.float64)
    x = normal(2, 2, 84, dim).double() * (10.0**powers)[:, None]
    mixed = torch.randperm(x[1].numel(), generator=torch.Generator().manual_seed(1))
    x[1] = x[1].flatten()[mixed].view(2, 84, dim)
    top = torch.finfo(torch.float32).max
    x = x.clamp(-top, top).float()
    x[0, 0, ::5] *= (normal(17, dim, seed=2) > 0).float()  # zeros among the values
    x[0, 1, 3] = 0.0
    x[0, 1, 7, 0] = top
    return x


def through(fmt: Format, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    scale = fmt.fit(x)
    return fmt.decode(fmt.encode(x, scale), x.shape[-1], dtype, scale)


def exceeds(fmt: Format, x: Tensor) -> Tensor:
    """Where the round trip is further off than ``error_bound`` says; a NaN is beyond every finite bound."""
    scale = fmt.fit(x)
    error, bound = (through(fmt, x).double() - x.double()).abs(), fmt.error_bound(x, scale).double()
    # ggml's blocks may have no bound; elsewhere float32 ends where the bound of its last numbers is computed
    boundless = bound.isinf() & (torch.tensor(fmt.overflows) | (x.abs() > 1e38))
    return ~((error <= bound) & bound.isfinite() | boundless)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def finite_floats(dim: int) -> st.SearchStrategy[NDArray[np.float32]]:
    return arrays(np.float32, (1, 1, 2, dim), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))


def test_the_sample_of_a_push_is_of_the_table() -> None:
    assert set(PUSH) <= set(ALL)


@every
@pytest.mark.parametrize("dim", [5, 64, 80, 128])
def test_the_round_trip_stays_within_the_bound_at_every_magnitude(text: str, dim: int) -> None:
    assert not exceeds(make(text), magnitudes(dim)).any()


@every
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values=finite_floats(40))
def test_the_round_trip_stays_within_the_bound_for_any_finite_values(text: str, values: NDArray[np.float32]) -> None:
    x = torch.from_numpy(values)
    assert not exceeds(make(text), x).any()


@pytest.mark.parametrize("text", cases([text for text in ALL if make(text).fit(normal(1, 1, 1, 8)) is not None]))
def test_later_tokens_stay_within_the_bound_of_the_fitted_scale(text: str) -> None:
    fmt, first, later = make(text), normal(2, 2, 4, 80) * 1e-30, magnitudes(80)
    scale = fmt.fit(first)
    error = (fmt.decode(fmt.encode(later, scale), 80, torch.float32, scale).double() - later.double()).abs()
    assert (error <= fmt.error_bound(later, scale).double()).all()


@every
def test_the_bound_is_finite_for_values_of_float16(text: str) -> None:
    x = normal(1, 2, 16, 80) * 100
    x[0, 0, 0, 0] = 65504.0
    fmt = make(text)
    assert fmt.error_bound(x, fmt.fit(x)).isfinite().all()


@every
def test_the_bound_is_reached(text: str) -> None:
    fmt, x = make(text), normal(2, 4, 64, 128)
    error, bound = (through(fmt, x) - x).abs(), fmt.error_bound(x, fmt.fit(x))
    assert (error / bound).max() > 0.9 if bound.any() else not error.any()


@pytest.mark.parametrize("text", cases([text for text in ALL if make(text).has_zero]))
def test_zero_stays_zero(text: str) -> None:
    x = normal(1, 2, 4, 80)
    x[0, 0] = 0.0
    x[0, 1, :, ::3] = 0.0
    assert (through(make(text), x)[x == 0] == 0).all()


@every
def test_nothing_but_zeros_stays_zero(text: str) -> None:
    assert (through(make(text), torch.zeros(1, 2, 4, 80)) == 0).all()


@every
@pytest.mark.parametrize("dim", DIMS)
def test_token_bytes_are_the_bytes_of_the_parts(text: str, dim: int) -> None:
    fmt, x = make(text), normal(1, 1, 3, dim)
    parts = fmt.encode(x, fmt.fit(x))
    assert fmt.token_bytes(dim) == sum(part.element_size() * part.numel() for part in parts) // 3


@every
@pytest.mark.parametrize("dim", [40, 80, 128])
def test_packing_would_save_bytes_only_where_a_format_is_emulated(text: str, dim: int) -> None:
    fmt = make(text)
    if fmt.emulated:
        assert fmt.packed_token_bytes(dim) < fmt.token_bytes(dim)
    else:
        assert fmt.packed_token_bytes(dim) == fmt.token_bytes(dim)


@every
def test_sequence_bytes_are_the_bytes_of_the_fitted_scale(text: str) -> None:
    fmt, x = make(text), normal(2, 3, 4, 80)
    scale = fmt.fit(x)
    assert fmt.sequence_bytes(3, 80) == (0 if scale is None else scale[0].numel() * scale.element_size())


@every
def test_parts_append_along_the_tokens_and_two_pieces_equal_one(text: str) -> None:
    fmt, x = make(text), normal(2, 3, 11, 80)
    for part in fmt.encode(x, fmt.fit(x)):
        assert part.shape[:3] == (2, 3, 11)
    fmt, x = make(text), normal(2, 3, 11, 80)
    scale = fmt.fit(x[:, :, :7])
    pieces = zip(fmt.encode(x[:, :, :7], scale), fmt.encode(x[:, :, 7:], scale), strict=True)
    whole = fmt.encode(x, scale)
    assert all(same_bits(torch.cat(pair, 2), part) for pair, part in zip(pieces, whole, strict=True))


@every
def test_no_tokens_encode_to_no_bytes_and_back_and_parts_append_to_theirs(text: str) -> None:
    fmt, x = make(text), torch.empty(2, 3, 0, 80)
    scale = fmt.fit(x)
    parts = fmt.encode(x, scale)
    assert [part.shape[:3] for part in parts] == [(2, 3, 0)] * len(parts)
    assert fmt.decode(parts, 80, torch.bfloat16, scale).shape == (2, 3, 0, 80)
    assert fmt.error_bound(x, scale).shape == (2, 3, 0, 80)
    fmt, x = make(text), normal(2, 3, 4, 80)
    scale = fmt.fit(x)
    pairs = zip(fmt.encode(x[:, :, :0], scale), fmt.encode(x, scale), strict=True)
    assert all(same_bits(torch.cat(pair, 2), pair[1]) for pair in pairs)


@every
@pytest.mark.parametrize("dim", DIMS)
def test_decode_gives_the_shape_and_type_asked_for(text: str, dim: int) -> None:
    out = through(make(text), normal(2, 3, 4, dim), torch.bfloat16)
    assert out.shape == (2, 3, 4, dim)
    assert out.dtype == torch.bfloat16


@every
def test_a_nan_stays_nan_in_its_scale_group_and_nowhere_else(text: str) -> None:
    x = normal(2, 2, 6, 80)
    x[0, 1, 2, 33] = torch.nan
    reach = make(text).nan_reach(80)
    first = 33 // reach * reach
    expected = torch.zeros(x.shape, dtype=torch.bool)
    expected[0, 1, 2, first : first + reach] = True
    assert torch.equal(through(make(text), x).isnan(), expected)


@pytest.mark.parametrize("text", cases([text for text in ALL if make(text).saturates]))
def test_an_infinity_saturates(text: str) -> None:
    x = normal(1, 2, 6, 80)
    x[0, 1, 2, 33], x[0, 1, 2, 34] = torch.inf, -torch.inf
    out = through(make(text), x)
    assert out.isfinite().all()
    assert out[0, 1, 2, 33] == out[0, 1, :, 33].max() >= x[0, 1, [0, 1, 3, 4, 5], 33].max()
    assert out[0, 1, 2, 34] == out[0, 1, :, 34].min() <= x[0, 1, [0, 1, 3, 4, 5], 34].min()


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_encodes_as_its_float32_value_and_decode_rounds_once(text: str, dtype: torch.dtype) -> None:
    fmt, x = make(text), normal(2, 3, 4, 80).to(dtype)
    scale = fmt.fit(x)
    pairs = zip(fmt.encode(x, scale), fmt.encode(x.float(), scale), strict=True)
    assert all(same_bits(*pair) for pair in pairs)
    fmt, x = make(text), normal(2, 3, 4, 80)
    assert torch.equal(through(fmt, x, dtype), through(fmt, x).to(dtype))


@pytest.mark.parametrize("text", cases([text for text in ALL if make(text).saturates]))
def test_decode_to_float16_saturates(text: str) -> None:
    x = torch.full((1, 1, 2, 80), 65504.0)
    x[..., ::2] = 1e9
    assert through(make(text), x, torch.float16).isfinite().all()


@every
@pytest.mark.parametrize("dim", [64, 80])
def test_content_and_parts_of_any_strides_give_the_same(text: str, dim: int) -> None:
    fmt = make(text)
    x = normal(4, dim, 6, 2, seed=3).permute(3, 2, 0, 1)[:, ::2]
    assert not x.is_contiguous()
    scale = fmt.fit(x.contiguous())
    assert scale is None or same_bits(scale, fmt.fit(x))  # type: ignore[arg-type]
    pairs = zip(fmt.encode(x, scale), fmt.encode(x.contiguous(), scale), strict=True)
    assert all(same_bits(*pair) for pair in pairs)
    fmt, x = make(text), normal(2, 3, 4, dim)
    scale = fmt.fit(x)
    parts = fmt.encode(x, scale)
    strided = tuple(part.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for part in parts)
    assert same_bits(fmt.decode(strided, dim, torch.float32, scale), fmt.decode(parts, dim, torch.float32, scale))


@every
def test_encode_leaves_its_input_alone_and_warns_of_nothing(text: str) -> None:
    fmt, x = make(text), magnitudes(80)
    before = x.clone()
    fmt.error_bound(x, fmt.fit(x))
    through(fmt, x)
    assert same_bits(x, before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        through(make(text), magnitudes(80))


@every
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_bits_of_the_cpu(text: str) -> None:
    fmt, x = make(text), magnitudes(80)
    scale, scale_there = fmt.fit(x), fmt.fit(x.cuda())
    parts, parts_there = fmt.encode(x, scale), fmt.encode(x.cuda(), scale_there)
    assert all(same_bits(a, b.cpu()) for a, b in zip(parts, parts_there, strict=True))
    there = fmt.decode(parts_there, 80, torch.float32, scale_there)
    assert there.is_cuda
    torch.testing.assert_close(there.cpu(), fmt.decode(parts, 80, torch.float32, scale), rtol=0, atol=0, equal_nan=True)
