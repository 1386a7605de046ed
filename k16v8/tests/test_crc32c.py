"""CRC-32C against the published vectors and against the definition, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from k16v8.plugins.lmcache import crc32c as module
from k16v8.plugins.lmcache.crc32c import HARDWARE, crc32c_numpy

Checksum = Callable[..., int]

POLYNOMIAL = (1 << 32) | 0x1EDC6F41


@pytest.fixture(params=["numpy", "google-crc32c"])
def crc32c(request: pytest.FixtureRequest) -> Checksum:
    """Both ways to compute it, each where it is installed."""
    if request.param == "numpy":
        return crc32c_numpy
    if not HARDWARE:
        pytest.skip("google-crc32c is not installed here")
    return module.crc32c


def defined(data: bytes) -> int:
    """Shift register, one bit at a time."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # RFC 3720, appendix B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(reversed(range(32))), 0x113FDB5C),
        (b"", 0),
    ],
)
def test_published_vectors(crc32c: Checksum, data: bytes, crc: int) -> None:
    assert crc32c(data) == crc


# around: the register, a word, what the table takes, what is folded by bytes and by words
@pytest.mark.parametrize(
    "size", [1, 2, 3, 4, 5, 7, 8, 9, 63, 5684, 5685, 5686, 10_007, 45_479, 45_480, 45_488, 100_003]
)
def test_every_length_agrees_with_the_definition(crc32c: Checksum, size: int) -> None:
    data = random.Random(size).randbytes(size)
    assert crc32c(data) == defined(data)


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 5000, 5999, 6000])
def test_a_message_may_come_in_two_parts(crc32c: Checksum, cut: int) -> None:
    data = random.Random(cut).randbytes(6000)
    assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)


def test_messages_longer_than_a_segment_are_the_sum_of_their_parts(crc32c: Checksum) -> None:
    data = random.Random(0).randbytes((4 << 20) + 12_345)
    crc = 0
    for start in range(0, len(data), 1_000_003):
        crc = crc32c(data[start : start + 1_000_003], crc)
    assert crc32c(data) == crc


def test_the_sparse_polynomial_is_a_multiple_of_the_crcs() -> None:
    remainder = sum(1 << power for power in (module._A, module._B, module._C, 0))
    while (length := remainder.bit_length()) > 32:
        remainder ^= POLYNOMIAL << (length - 33)
    assert remainder == 0


def test_the_buffer_is_left_as_it_was(crc32c: Checksum) -> None:
    data = bytearray(random.Random(0).randbytes(60_000))
    before = bytes(data)
    crc32c(data)
    assert data == before


def test_every_kind_of_buffer_gives_the_same(crc32c: Checksum) -> None:
    data = random.Random(0).randbytes(1001)
    writable = bytearray(data)
    buffers = (writable, memoryview(writable), memoryview(data), np.frombuffer(data, np.uint8))
    assert {crc32c(buffer) for buffer in buffers} == {defined(data)}
