"""K16/V8 chunks as bytes: what is kept, what it takes, and that damaged or foreign bytes never become a tensor."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from held_values import through_a_cache
from k16v8.errors import K16V8Error, UnknownNameError, UsageError
from k16v8.kernels.cache import Scaling
from k16v8.plugins.lmcache import check, chunk
from k16v8.plugins.lmcache.chunk import LAYOUTS, SCALES, ChunkSpec
from k16v8.plugins.lmcache.codec import decode, encode, encode_into, verify

SPEC = ChunkSpec("a/model", layers=3, tokens=10, heads=2, head_dim=32, dtype=torch.bfloat16, key=b"first")
LARGE = ChunkSpec("a/model", layers=4, tokens=512, heads=8, head_dim=128, dtype=torch.bfloat16)
LONG = ChunkSpec("a/model", layers=2, tokens=3000, heads=8, head_dim=128, dtype=torch.float16)  # frames within layers
ODD = ChunkSpec("a/model", layers=1, tokens=3, heads=1, head_dim=5, dtype=torch.float16, scale="per-token-head")

every_scale = pytest.mark.parametrize("scale", SCALES)


def content(spec: ChunkSpec, seed: int = 0) -> Tensor:
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed)).to(spec.dtype)


def blob(spec: ChunkSpec, seed: int = 0) -> bytes:
    return b"".join(encode(content(spec, seed), spec))


def canonical(kv: Tensor, spec: ChunkSpec) -> Tensor:
    """``[2, L, T, H, D]``, by the names of the dimensions."""
    return kv.permute([spec.layout.index(letter) for letter in "2LTHD"])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def all_patterns(dtype: torch.dtype) -> Tensor:
    """Every 16-bit pattern, as keys and as values: NaNs with payloads, infinities, subnormals."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(1, 64, 8, 128)
    return torch.stack((bits, bits)).view(dtype)


@every_scale
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_are_kept_bit_by_bit_whatever_the_bits_are(dtype: torch.dtype, scale: str) -> None:
    spec = ChunkSpec("m", 1, 64, 8, 128, dtype, scale=scale)
    kv = all_patterns(dtype)
    assert same_bits(decode(encode(kv, spec), spec)[0], kv[0])


@every_scale
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_what_a_cache_holds(dtype: torch.dtype, scale: Scaling) -> None:
    spec = ChunkSpec("m", 1, 64, 8, 128, dtype, scale=scale)
    kv = all_patterns(dtype)
    due = through_a_cache(kv[1, 0], scale)
    back = decode(encode(kv, spec), spec)[1, 0]
    torch.testing.assert_close(back, due, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(back.isnan(), kv[1, 0].isnan() | due.isnan())
    if scale == "none":
        assert back[~back.isnan()].abs().max() == 448


@every_scale
def test_an_infinity_or_a_nan_leaves_the_scale_of_its_neighbours_alone(scale: Scaling) -> None:
    spec = dataclasses.replace(SPEC, scale=scale)
    kv = 3000 * content(spec)
    kv[1, 0, 2, 1, 7], kv[1, 1, 3, 0, 4] = float("inf"), float("nan")
    due = torch.stack([through_a_cache(layer, scale) for layer in kv[1]])
    back = decode(encode(kv, spec), spec)[1]
    torch.testing.assert_close(back, due, rtol=0, atol=0, equal_nan=True)


@every_scale
@pytest.mark.parametrize("spec", [LARGE, ODD])
def test_finite_values_of_many_blocks_are_what_a_cache_holds(spec: ChunkSpec, scale: Scaling) -> None:
    spec = dataclasses.replace(spec, scale=scale)
    kv = content(spec) * torch.logspace(-3, 2.5, spec.tokens).to(spec.dtype).view(-1, 1, 1)
    due = torch.stack([through_a_cache(layer, scale) for layer in kv[1]])
    assert torch.equal(decode(encode(kv, spec), spec)[1], due)


@every_scale
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_holds_the_same_bytes_behind_its_header(layout: str, scale: str) -> None:
    spec = dataclasses.replace(SPEC, scale=scale)
    other = dataclasses.replace(spec, layout=layout)
    kv = content(spec)
    turned = kv.permute(["2LTHD".index(letter) for letter in layout])
    assert not turned.is_contiguous() or layout == "2LTHD"
    back = decode(encode(turned, other), other)
    assert back.shape == other.shape
    assert same_bits(canonical(back, other), decode(encode(kv, spec), spec))
    assert list(encode(turned, other))[1::2] == list(encode(kv, spec))[1::2]


def test_decoding_into_a_tensor_fills_it_in_place_also_where_it_is_strided() -> None:
    spec = dataclasses.replace(SPEC, layout="LT2HD")
    memory = torch.zeros(3, 10, 2, 2, 64, dtype=torch.bfloat16)
    view = memory[..., ::2]
    assert decode(blob(spec), spec, view) is view
    assert same_bits(view, decode(blob(spec), spec))
    assert not memory[..., 1::2].any()


def test_encoding_the_same_content_twice_gives_the_same_bytes() -> None:
    assert blob(SPEC) == blob(SPEC)


def test_version_2_stays_what_it_was() -> None:
    spec = ChunkSpec("a/model", 1, 1, 1, 2, torch.float16, scale="per-token-head", key=b"first")
    kv = torch.tensor([1.0, -2.0, 0.5, 448.0], dtype=torch.float16).view(spec.shape)
    recorded = bytes.fromhex(
        "46444c4b31365638 0200 03 01 00 01 0000 01000000010000000100000002000000"
        "a383f3f42a9ac40a73f320a69a55bab6 1c6616224336f5d2ea1e55c74768eac0 0000000000000000 d709be4c"
        "003c00c0 2d0137d3 307e 003c ee20287c"
    )
    assert b"".join(encode(kv, spec)) == recorded
    assert same_bits(decode(recorded, spec), kv)


@every_scale
def test_a_chunk_takes_three_quarters(scale: str) -> None:
    spec = dataclasses.replace(LARGE, scale=scale)
    assert len(blob(spec)) / content(spec).nbytes == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("spec", [SPEC, LARGE, LONG, ODD])
def test_the_size_is_known_before_anything_is_encoded(spec: ChunkSpec) -> None:
    assert len(blob(spec)) == spec.encoded_bytes()


@pytest.mark.parametrize("spec", [SPEC, LONG, ODD])
def test_a_buffer_gets_the_bytes_of_the_stream_and_none_behind_them(spec: ChunkSpec) -> None:
    buffer = np.full(spec.encoded_bytes() + 5, 7, np.uint8)
    assert encode_into(content(spec), spec, buffer[1:]) == spec.encoded_bytes()  # unaligned
    assert buffer[1:-4].tobytes() == blob(spec)
    assert buffer[0] == 7
    assert (buffer[-4:] == 7).all()


def test_a_buffer_that_is_too_small_is_refused_before_it_is_written() -> None:
    buffer = np.zeros(SPEC.encoded_bytes() - 1, np.uint8)
    with pytest.raises(UsageError, match="does not fit"):
        encode_into(content(SPEC), SPEC, buffer)
    assert not buffer.any()


def test_no_piece_of_a_stream_is_larger_than_a_frame() -> None:
    assert max(len(piece) for piece in encode(content(LONG), LONG)) <= 4 << 20


def test_pieces_are_checked_as_they_come_and_no_more_are_taken_after_a_bad_one() -> None:
    pieces: list[bytes | memoryview] = list(encode(content(LONG), LONG))
    assert len(pieces) > 10
    pieces[2] = b"\0\0\0\0"  # the checksum of the first frame
    coming = iter(pieces)
    with pytest.raises(chunk.CorruptError):
        decode(coming, LONG)
    assert list(coming) == pieces[3:]


def test_a_stream_may_be_cut_anywhere() -> None:
    whole = blob(SPEC)
    due = decode(whole, SPEC)
    for size in (1, 7, 76, 1000):
        assert same_bits(decode((whole[i : i + size] for i in range(0, len(whole), size)), SPEC), due)
    assert same_bits(decode([b"", memoryview(whole)[:50], bytearray(), whole[50:], b""], SPEC), due)


MISMATCHES: dict[str, tuple[ChunkSpec, type[chunk.ChunkError]]] = {
    "model": (dataclasses.replace(SPEC, model="b/model"), chunk.ModelError),
    "key": (dataclasses.replace(SPEC, key=b"second"), chunk.ChunkKeyError),
    "layers": (dataclasses.replace(SPEC, layers=2), chunk.ShapeError),
    "tokens": (dataclasses.replace(SPEC, tokens=30, layers=1), chunk.ShapeError),  # as many bytes
    "heads": (dataclasses.replace(SPEC, heads=1, head_dim=64), chunk.ShapeError),
    "head_dim": (dataclasses.replace(SPEC, head_dim=64), chunk.ShapeError),
    "dtype": (dataclasses.replace(SPEC, dtype=torch.float16), chunk.DtypeError),
    "layout": (dataclasses.replace(SPEC, layout="L2THD"), chunk.LayoutError),
    "scale": (dataclasses.replace(SPEC, scale="per-token-head"), chunk.ScaleError),
}


@pytest.mark.parametrize("field", MISMATCHES)
def test_a_chunk_of_another_kind_is_refused_by_name(field: str) -> None:
    spec, error = MISMATCHES[field]
    with pytest.raises(error) as caught:
        decode(blob(SPEC), spec)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


def _with(at: int, new: bytes, *, sealed: bool) -> bytes:
    """A chunk with other bytes in its header; ``sealed``: with the checksum to go with them."""
    raw = bytearray(blob(SPEC))
    raw[at : at + len(new)] = new
    if sealed:
        raw[72:76] = struct.pack("<I", zlib.crc32(raw[:72]))
    return bytes(raw)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", chunk.TruncatedError),
        (blob(SPEC)[:40], chunk.TruncatedError),
        (blob(SPEC)[:-1], chunk.TruncatedError),
        (blob(SPEC)[:4000], chunk.TruncatedError),  # between keys and values
        (blob(SPEC) + b"\0", chunk.TrailingError),
        (b"\x80" * 5000, chunk.ForeignError),
        (_with(8, b"\1", sealed=True), chunk.VersionError),
        (_with(72, b"\0\0\0\0", sealed=False), chunk.CorruptError),
        (_with(30, b"\7", sealed=False), chunk.CorruptError),
        (_with(10, b"\1", sealed=True), chunk.CorruptError),  # keys alone
        (_with(11, b"\7", sealed=True), chunk.CorruptError),
        (_with(12, b"\7", sealed=True), chunk.CorruptError),
        (_with(13, b"\7", sealed=True), chunk.CorruptError),
        (_with(14, b"\7", sealed=True), chunk.CorruptError),
        (_with(64, b"\7", sealed=True), chunk.CorruptError),
        (_with(16, b"\xff" * 16, sealed=True), chunk.ShapeError),  # sizes that no memory holds
    ],
)
def test_what_is_not_this_chunk_raises_the_error_of_its_kind(raw: bytes, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        decode(raw, SPEC)
    assert type(caught.value) is error
    with pytest.raises(error):
        verify(raw, SPEC)


def test_a_frame_at_another_place_does_not_fit() -> None:
    pieces = list(encode(content(LONG), LONG))
    assert len(pieces[1]) == len(pieces[5])  # the first frames of the keys of layers 0 and 1
    pieces[1:3], pieces[5:7] = pieces[5:7], pieces[1:3]
    with pytest.raises(chunk.CorruptError, match="keys of layer 0"):
        decode(pieces, LONG)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: encode(content(SPEC)[:, :, :9], SPEC), chunk.ShapeError),
        (lambda: encode(content(SPEC).half(), SPEC), chunk.DtypeError),
        (lambda: encode(content(SPEC).float(), SPEC), chunk.DtypeError),
        (lambda: decode(blob(SPEC), SPEC, torch.empty(SPEC.shape)), chunk.DtypeError),
        (lambda: decode(blob(SPEC), SPEC, content(LARGE)), chunk.ShapeError),
        (lambda: dataclasses.replace(SPEC, dtype=torch.float32), chunk.DtypeError),
        (lambda: dataclasses.replace(SPEC, layout="THD"), UnknownNameError),
        (lambda: dataclasses.replace(SPEC, scale="per-tensor"), UnknownNameError),
        (lambda: dataclasses.replace(SPEC, tokens=0), UsageError),
    ],
)
def test_tensors_and_descriptions_that_cannot_be_are_refused_at_once(
    make: Callable[[], object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        make()


def test_every_error_is_one_that_the_user_can_fix() -> None:
    kinds = [
        kind
        for kind in vars(chunk).values()
        if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == chunk.__name__
    ]
    assert chunk.CorruptError in kinds
    assert all(issubclass(kind, chunk.ChunkError) and issubclass(kind, K16V8Error) for kind in kinds)


SMALL = {
    scale: ChunkSpec("a/model", layers=2, tokens=3, heads=1, head_dim=5, dtype=torch.bfloat16, scale=scale)
    for scale in SCALES
}
SOURCES = [(spec, seed) for spec in SMALL.values() for seed in (0, 1)]
edits = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), st.integers(0, 4000), st.integers(0, 7)),
        st.tuples(st.just("set"), st.integers(0, 400), st.integers(0, 255)),
        st.tuples(st.just("cut"), st.integers(0, 400), st.integers(0, 400)),
        st.tuples(st.just("repeat"), st.integers(0, 400), st.integers(0, 400)),
        st.tuples(st.just("insert"), st.integers(0, 400), st.binary(max_size=8)),
    ),
    max_size=3,
)


def edited(raw: bytes, changes: list[tuple[str, int, int | bytes]]) -> bytes:
    data = bytearray(raw)
    for kind, at, what in changes:
        at %= max(1, len(data))
        if isinstance(what, bytes):
            data[at:at] = what
        elif kind == "flip" and data:
            data[at] ^= 1 << what
        elif kind == "set" and data:
            data[at] = what
        elif kind == "cut":
            del data[at : at + what]
        elif kind == "repeat":
            data[at:at] = data[at : at + what]
    return bytes(data)


def due(raw: bytes, spec: ChunkSpec, seeds: tuple[int, ...] = (0, 1)) -> Tensor | None:
    """What sound bytes decode to; ``None`` for bytes that nobody encoded."""
    for seed in seeds:
        if raw == blob(spec, seed):
            return decode(raw, spec)
    return None


@settings(deadline=None, max_examples=400)
@given(source=st.sampled_from(SOURCES), changes=edits, asked=st.sampled_from(list(SCALES)))
def test_mutated_bytes_decode_to_the_same_tensor_or_to_a_typed_error(
    source: tuple[ChunkSpec, int], changes: list[tuple[str, int, int | bytes]], asked: str
) -> None:
    spec, seed = source
    raw = edited(blob(spec, seed), changes)
    try:
        got = decode(raw, SMALL[asked])
    except chunk.ChunkError:
        assert raw != blob(spec, seed) or spec != SMALL[asked]
    else:
        assert raw == blob(SMALL[asked], seed)
        assert same_bits(got[0], content(spec, seed)[0])


@settings(deadline=None, max_examples=400)
@given(first=st.sampled_from(SOURCES), second=st.sampled_from(SOURCES), at=st.integers(0, 260), to=st.integers(0, 260))
def test_bytes_spliced_of_two_chunks_decode_to_one_of_them_or_to_a_typed_error(
    first: tuple[ChunkSpec, int], second: tuple[ChunkSpec, int], at: int, to: int
) -> None:
    spec = first[0]
    raw = blob(*first)[:at] + blob(*second)[to:]
    sound = due(raw, spec)
    if sound is None:
        with pytest.raises(chunk.ChunkError):
            decode(raw, spec)
    else:
        assert same_bits(decode(raw, spec), sound)


@settings(deadline=None, max_examples=200)
@given(raw=st.binary(max_size=300), begin=st.sampled_from([b"", b"FDLK16V8", b"FDLK16V8\1\0\3\0\0\0\0\0"]))
def test_random_bytes_are_refused_with_a_typed_error(raw: bytes, begin: bytes) -> None:
    with pytest.raises(chunk.ChunkError):
        verify(begin + raw, SMALL["none"])


def test_the_gates_of_the_codec_pass() -> None:
    found = list(check.codec_gates())
    assert [name for name, passed, _, _ in found if not passed] == []
    assert len(found) == 5


@pytest.mark.parametrize("fault", ["keys", "values", "checks"])
def test_a_broken_codec_fails_its_gates(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(stream: Any, spec: ChunkSpec) -> Tensor:
        if fault == "checks":
            return torch.zeros(spec.shape, dtype=spec.dtype)
        kv = decode(stream, spec)
        kv[0 if fault == "keys" else 1, -1, -1, -1, -1] += 1
        return kv

    monkeypatch.setattr(check, "decode", broken)
    failed = [name for name, passed, _, _ in check.codec_gates() if not passed]
    assert len(failed) == (5 if fault == "checks" else 4)
