"""CRC-32C (Castagnoli, reflected, as in iSCSI: RFC 3720 appendix B.4).

Where google-crc32c is installed (``pip install 'k16v8[lmcache]'``) it computes the checksum with the processor's own
instructions; else :func:`crc32c_numpy` does, which gives the same numbers and is slower (``benchmarks/kv_codec.py``
prints both).  :data:`HARDWARE` says which of the two is in use.

In numpy, at the speed of a few XORs per word: a CRC is the remainder of the message, read as a polynomial over GF(2),
modulo ``P``.  ``P`` has the sparse multiple ``T = x^A + x^B + x^C + 1``, and squaring is linear, so ``T(x^8)`` and
``T(x^64)`` are multiples of ``P``, too: a byte or a word in front can be cancelled by XORing it into three later ones,
thousands of neighbours at once.  That folds any message into its last ``A`` bytes, whose remainder is the XOR of one
table entry per set bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

try:
    import google_crc32c
except ImportError:
    HARDWARE = False
else:
    HARDWARE = google_crc32c.implementation == "c"  # it has a path in Python, too, slower than ours

__all__ = ["HARDWARE", "crc32c", "crc32c_numpy"]

_POLYNOMIAL = 0x82F63B78  # reflected: bit 31 - i is the coefficient of x^i, x^32 is left out

# Of all multiples with four terms and a degree under 9,000 the one with a wide gap A - B (how many units are folded
# at once) and a small A (what is left for the table).  Fewer than four terms cannot be: x + 1 divides P.
_A, _B, _C = 5685, 1362, 426

_SEGMENT = 1 << 22  # bytes copied and folded at a time; the copy is what bounds the memory


Buffer = bytes | bytearray | memoryview | NDArray[np.uint8]


def crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC-32C of ``data``, or of what ``crc`` stands for followed by ``data``."""
    if HARDWARE:
        return cast(int, google_crc32c.extend(crc, np.frombuffer(data, np.uint8)))
    return crc32c_numpy(data, crc)


def crc32c_numpy(data: Buffer, crc: int = 0) -> int:
    """As :func:`crc32c`, without the library."""
    message = np.frombuffer(data, np.uint8)
    for start in range(0, message.size, _SEGMENT):
        crc = _segment(message[start : start + _SEGMENT], crc)
    return crc


def _segment(message: NDArray[np.uint8], crc: int) -> int:
    # The register before a message counts as an XOR into its first four bytes; shorter ones are filled up in front,
    # where zeros do not count, and the register moves with the message.
    register = crc ^ 0xFFFFFFFF
    size = message.size
    front = -size % 8 if size >= 4 else 8 - size
    work = np.zeros(front + size, np.uint8)
    work[front:] = message
    if size >= 4:
        work[front : front + 4] ^= np.frombuffer(register.to_bytes(4, "little"), np.uint8)
        carried = 0
    else:
        low = register & ((1 << 8 * size) - 1)
        work[front:] ^= np.frombuffer(low.to_bytes(size, "little"), np.uint8)
        carried = register >> 8 * size
    rest = _fold(_fold(work.view(np.uint64)).view(np.uint8))
    bits = np.unpackbits(rest, bitorder="little")
    remainder = int(np.bitwise_xor.reduce(_remainders()[-bits.size :] * bits))
    return remainder ^ carried ^ 0xFFFFFFFF


def _fold(units: NDArray[Any]) -> NDArray[Any]:
    """Cancel units in front, in place, until at most ``A`` are left."""
    done, step = 0, _A - _B
    while (left := units.size - _A - done) > 0:
        count = min(step, left)
        block = units[done : done + count]
        for offset in (_A - _B, _A - _C, _A):
            units[done + offset : done + offset + count] ^= block
        done += count
    return units[done:]


@cache
def _remainders() -> NDArray[np.uint32]:
    """``x^(32 + i) mod P`` of the bit that i bits follow, for a message of ``A`` bytes, its first bit first."""
    table = np.empty(8 * _A, np.uint32)
    value = _POLYNOMIAL
    for i in range(table.size):
        table[-1 - i] = value
        value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
    return table
