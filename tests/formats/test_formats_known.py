"""The second reading of every format, against the formats themselves, gguf's dequantizers and searches by hand."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from fidelab.core import FormatSpec, KVSpec
from fidelab.formats import FORMATS, create, known
from fidelab.formats.iq4 import LEVELS
from fidelab.formats.known import KNOWN, canonical, encodes_like, names_of, values_of

FP8 = ["fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz"]
OPTIONS = [
    *(
        f"{name}[scale={scale}]"
        for name in FP8
        for scale in ("per-tensor", "per-head", "per-channel", "per-token-head")
    ),
    *("nvfp4[scale=per-tensor]", "int4[group=8]", "int4[group=64]", "int8[group=128]", "int3[group=8]"),
    *("uint4[group=8]", "uint3[group=64]", "uint4[axis=channel,group=8]", "uint5[axis=channel,group=24]"),
]
# In this module's own words: what numbers the bytes of a type stand for, by PyTorch.
TORCH = {"fp8_e4m3": "e4m3fn", "fp8_e5m2": "e5m2", "fp8_e4m3fnuz": "e4m3fnuz", "fp8_e5m2fnuz": "e5m2fnuz"}


def content(dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(dim)
    return (torch.randn(2, 3, 24, dim, generator=generator) * 3).to(dtype)


def test_every_format_has_a_second_reading_and_a_known_vector() -> None:
    assert KNOWN == {*FORMATS.names()} == {*known._VECTORS.values()}


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of these in every size and type for each push; of the others in one.
PUSH = {"bf16", "fp8_e4m3[scale=per-channel]", "int8", "int4[group=8]", "uint4", "nvfp4", "lloyd3", "q8_0"}


def _cases() -> list[Any]:
    found = []
    for kv, dim, dtype in itertools.product([*FORMATS.names(), *OPTIONS], [8, 24, 64, 80], DTYPES):
        now = kv in PUSH or (dim, dtype) == (24, torch.bfloat16)
        found.append(pytest.param(kv, dim, dtype, marks=[] if now else [pytest.mark.long]))
    return found


@pytest.mark.parametrize(("kv", "dim", "dtype"), _cases())
def test_stored_parts_have_one_name_and_it_is_their_formats(kv: str, dim: int, dtype: torch.dtype) -> None:
    spec = KVSpec.parse(kv).k
    fmt, x = create(spec), content(dim, dtype)
    scale = fmt.fit(x)
    parts = fmt.encode(x, scale)
    decoded = fmt.decode(parts, dim, dtype, scale)
    assert names_of(parts, dim, decoded, scale) == [canonical(spec, dim)]
    assert names_of(parts, dim, x, scale, exact=False) == [canonical(spec, dim)]
    broken = decoded.clone()
    broken[0, 0, -1, -1] += 1
    assert names_of(parts, dim, broken, scale) == []


@pytest.mark.parametrize("name", FP8)
def test_the_256_codes_of_an_8_bit_float_are_pytorchs(name: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 256)
    theirs = codes.view(getattr(torch, f"float8_{TORCH[name]}")).float()
    assert torch.equal(values_of(name, (codes,), 256).nan_to_num(1234.0), theirs.nan_to_num(1234.0))


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"])
def test_blocks_are_read_as_gguf_reads_them(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name.upper()]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(0).integers(0, 256, (50, 4 * size), dtype=np.uint8)
    raw.reshape(50, 4, size)[:, :, 1] &= 0x3F  # no infinite headers
    raw.reshape(50, 4, size)[:, :, 3] &= 0x3F
    expected = gguf.quants.dequantize(raw, kind)
    found = values_of(name, (torch.from_numpy(raw)[None, None],), 128)[0, 0].numpy()
    np.testing.assert_array_equal(found, expected)


def test_other_layouts_of_one_size_are_no_parts_of_a_format() -> None:
    with pytest.raises(ValueError, match="not parts of q8_0"):
        values_of("q8_0", (torch.zeros(1, 1, 1, 32, dtype=torch.uint8),), 32)
    assert names_of((torch.zeros(1, 1, 1, 31),), 32, torch.zeros(1, 1, 1, 32)) == []


# ------------------------------------------------------------------------------------------ known vectors


@pytest.mark.parametrize("name", FORMATS.names())
def test_a_format_encodes_the_known_vector_as_recorded(name: str) -> None:
    assert encodes_like(create(FormatSpec(name)).encode) == name


def test_another_rounding_of_the_same_format_is_told_apart() -> None:
    fmt = create(FormatSpec("fp8_e4m3"))
    assert encodes_like(lambda x: fmt.encode(x.bfloat16().float() * (1 - 2**-6))) is None


@pytest.mark.parametrize("name", ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
def test_the_known_vectors_of_blocks_are_ggufs(name: str) -> None:
    raw = gguf.quants.quantize(known._vector().numpy().reshape(1, 32), gguf.GGMLQuantizationType[name.upper()])
    assert known._VECTORS[known._digest((torch.from_numpy(raw),))] == name


@pytest.mark.parametrize("name", FP8)
def test_the_known_vectors_of_8_bit_floats_are_the_nearest_numbers_with_even_codes_at_ties(name: str) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(getattr(torch, f"float8_{TORCH[name]}")).float().tolist()
    finite = [(Fraction(v), code) for code, v in enumerate(values) if math.isfinite(v) and code != 0x80]

    def nearest(x: float) -> int:
        return min(finite, key=lambda one: (abs(one[0] - Fraction(x)), one[1] % 2))[1]

    codes = torch.tensor([nearest(x) for x in known._vector().flatten().tolist()], dtype=torch.uint8)
    assert known._VECTORS[known._digest((codes,))] == name


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_known_vectors_of_integers_are_quotients_rounded_to_even(bits: int) -> None:
    x = [Fraction(v) for v in known._vector().flatten().tolist()]
    top = (1 << bits - 1) - 1
    scale = np.float16(np.float32(float(max(map(abs, x)))) / np.float32(top))
    codes = [max(-top, min(top, round(v / Fraction(float(scale))))) for v in x]
    stored = bits if bits in (2, 4, 8) else 8
    packed = [
        sum((code & (1 << stored) - 1) << stored * place for place, code in enumerate(codes[at : at + 8 // stored]))
        for at in range(0, 32, 8 // stored)
    ]
    parts = (torch.tensor(packed, dtype=torch.uint8), torch.from_numpy(np.array([scale])))
    assert known._VECTORS[known._digest(parts)] == f"int{bits}"


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_known_vectors_of_asymmetric_integers_are_quotients_rounded_to_even(bits: int) -> None:
    x = known._vector().flatten().numpy()
    least, top = np.float16(x.min()), (1 << bits) - 1
    step = np.float16((x.max() - np.float32(least)) / np.float32(top))
    codes = [max(0, min(top, round(float((v - np.float32(least)) / np.float32(step))))) for v in x]
    stored = bits if bits in (2, 4, 8) else 8
    packed = [
        sum(code << stored * place for place, code in enumerate(codes[at : at + 8 // stored]))
        for at in range(0, 32, 8 // stored)
    ]
    parts = (torch.tensor(packed, dtype=torch.uint8), *(torch.from_numpy(np.array([n])) for n in (step, least)))
    assert known._VECTORS[known._digest(parts)] == f"uint{bits}"


@pytest.mark.parametrize("bits", range(1, 5))
def test_the_known_vectors_of_codebooks_are_the_nearest_levels(bits: int) -> None:
    x = known._vector().flatten().double().numpy()
    norm = np.float16(math.sqrt(float((x * x).sum())))
    codes = [int(np.abs(np.array(known._lloyd_levels(bits)) - v * math.sqrt(32) / float(norm)).argmin()) for v in x]
    stored = 8 if bits == 3 else bits
    packed = [
        sum(code << stored * place for place, code in enumerate(codes[at : at + 8 // stored]))
        for at in range(0, 32, 8 // stored)
    ]
    parts = (torch.tensor(packed, dtype=torch.uint8), torch.from_numpy(np.array([norm])))
    assert known._VECTORS[known._digest(parts)] == f"lloyd{bits}"


@pytest.mark.parametrize(("name", "size"), [("nvfp4", 16), ("mxfp4", 32)])
def test_the_known_vectors_of_4_bit_floats_are_the_nearest_numbers(name: str, size: int) -> None:
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes: list[int] = []
    scales: list[int] = []
    for block in known._vector().view(-1, size).tolist():
        amax = max(map(abs, block))
        if name == "mxfp4":
            exponent = math.floor(math.log2(amax)) - 2
            scale, byte = 2.0**exponent, exponent + 127
        else:
            exact = torch.tensor(amax / 6).to(torch.float8_e4m3fn)
            scale, byte = float(exact), int(exact.view(torch.uint8))
        scales.append(byte)
        for x in block:
            distances = [
                (abs(Fraction(abs(x)) - Fraction(n) * Fraction(scale)), i % 2, i) for i, n in enumerate(numbers)
            ]
            codes.append(min(distances)[2] | (8 if x < 0 else 0))
    packed = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    parts = tuple(torch.tensor(x, dtype=torch.uint8) for x in (packed, scales))
    assert known._VECTORS[known._digest(parts)] == name


def test_the_known_vector_of_iq4_nl_is_the_nearest_level_and_the_weighted_least_squares_scale() -> None:
    x = known._vector().flatten().double().numpy()
    largest = x[np.abs(x).argmax()]
    levels = np.array(LEVELS, dtype=np.float64)
    codes = np.abs(x[:, None] * (-127 / largest) - levels).argmin(1)
    chosen = levels[codes]
    scale = np.float16((x**3 * chosen).sum() / (x**2 * chosen**2).sum())
    raw = np.concatenate([np.array([scale]).view(np.uint8), (codes[:16] | codes[16:] << 4).astype(np.uint8)])
    assert known._VECTORS[known._digest((torch.from_numpy(raw),))] == "iq4_nl"


@pytest.mark.parametrize(("name", "kind"), [("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16")])
def test_the_known_vectors_of_native_types_are_pytorchs(name: str, kind: str) -> None:
    assert known._VECTORS[known._digest((known._vector().to(getattr(torch, kind)),))] == name
