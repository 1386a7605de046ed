"""The second reading of every format, against the formats themselves, gguf's dequantizers and searches by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from fidelab.core import FormatSpec, KVSpec
from fidelab.formats import FORMATS, create, known
from fidelab.formats.base import Parts
from fidelab.formats.known import KNOWN, canonical, digest_of, encodes_like, names_of, values_of
from tests.formats import known_vectors

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


def test_every_format_has_a_second_reading_and_known_vectors() -> None:
    assert {*FORMATS.names()} == KNOWN
    assert known.known_vectors().keys() == {*known_vectors.listed()} >= KNOWN
    assert len({*known.known_vectors().values()}) == len(known.known_vectors())


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


LISTED = known_vectors.listed()


@pytest.mark.parametrize("text", LISTED)
def test_known_vectors_are_what_a_second_encoder_makes_of_them(text: str) -> None:
    """To write the table anew: python -m tests.formats.known_vectors."""
    assert known.known_vectors()[text] == digest_of(known_vectors.SecondEncoder.of(text))


@pytest.mark.parametrize("text", LISTED)
def test_a_format_encodes_the_known_vectors_as_recorded(text: str) -> None:
    assert encodes_like(create(KVSpec.parse(text).k)) == text


class Wrapped:
    """A format whose encoder looks at the shape of what it is given."""

    def __init__(self, text: str, dishonest: Callable[[torch.Size], bool]) -> None:
        self._format, self._dishonest = create(KVSpec.parse(text).k), dishonest

    @property
    def token_block(self) -> int:
        return self._format.token_block

    def fit(self, x: Tensor, mask: Tensor | None = None) -> Tensor | None:
        return self._format.fit(x, mask)

    def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
        return self._format.encode(x * (1 - 2**-4) if self._dishonest(x.shape) else x, scale)


@pytest.mark.parametrize("text", ["int4", "fp8_e4m3", "q4_0", "nvfp4", "lloyd3", "fp8_e4m3[scale=per-head]"])
@pytest.mark.parametrize(
    "dishonest",
    [
        lambda shape: shape[2] > 1,  # several tokens
        lambda shape: shape[2] == 1,
        lambda shape: shape[1] > 1,  # several heads
        lambda shape: shape[0] > 1,  # a batch
        lambda shape: shape[3] >= 128,
        lambda shape: shape[2] % 2 == 1 and shape[2] > 1,
        lambda shape: shape[2] > 32,
    ],
)
def test_an_encoder_that_is_honest_for_some_shapes_alone_is_told_apart(
    text: str, dishonest: Callable[[torch.Size], bool]
) -> None:
    assert encodes_like(Wrapped(text, dishonest)) is None
    assert encodes_like(Wrapped(text, lambda shape: False)) == text


def test_another_rounding_of_the_same_format_is_told_apart() -> None:
    fmt = create(FormatSpec("fp8_e4m3"))

    class Otherwise(Wrapped):
        def encode(self, x: Tensor, scale: Tensor | None = None) -> Parts:
            return fmt.encode(x.bfloat16().float() * (1 - 2**-6))

    assert encodes_like(Otherwise("fp8_e4m3", lambda shape: False)) is None
