"""Token ids → text, from the vocabulary that lies beside the captures: scoring needs no tokenizer.

Three notations for a token's bytes cover what decoders use: ``<0x41>`` (byte tokens), the printable stand-ins for
bytes of GPT-2's vocabulary (``Ġ`` for a space), and SentencePiece's ``▁`` for a space.  What fits none is taken
literally, as special tokens are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property

__all__ = ["Detokenizer"]

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


def _stand_ins() -> dict[str, int]:
    """The character that stands for each byte: itself where it is printable, else the next one from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_STAND_INS = _stand_ins()


class Detokenizer:
    """Reads ids with a vocabulary's pieces (the tokenizer's own string for each id)."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def __call__(self, ids: Iterable[int]) -> str:
        """The text of some ids, special tokens included; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return b"".join(map(self._bytes, ids)).decode("utf-8", errors="replace")

    @cached_property
    def _stands_for_bytes(self) -> bool:
        """More words begin with GPT-2's space than with SentencePiece's; ``Ġ`` is a letter too, but a rare one."""
        first = [piece[0] for piece in self._pieces if len(piece) > 1]
        return first.count("Ġ") > first.count(_SPACE)

    def _bytes(self, token: int) -> bytes:
        piece = self._pieces[token] if 0 <= token < len(self._pieces) else ""
        if self._stands_for_bytes:
            if all(char in _STAND_INS for char in piece):
                return bytes(_STAND_INS[char] for char in piece)
            return piece.encode("utf-8", errors="replace")
        if match := _BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(_SPACE, " ").encode("utf-8", errors="replace")
