"""The vocabulary of a GGUF file without a tokenizer library: which bytes of a text each token stands for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fidelab.core import Vocabulary, digest
from fidelab.models.gguf import read_header, read_pieces

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # SentencePiece writes it for a space


def _byte_of_characters() -> dict[str, int]:
    """Return GPT-2's characters for the 256 bytes: printable ones are themselves, others begin at 256."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}


@dataclass(frozen=True)
class Pieces:
    """``strings``: by token id, as the file has them; ``kind``: llama.cpp's name of the tokenizer.

    ``bos``: the token that begins a sequence, if the file names one.
    """

    strings: Sequence[str]
    kind: str
    bos: int | None

    @classmethod
    def read(cls, file: Path) -> Pieces:
        """Read the vocabulary of a file.

        Raises:
            InputError: If the file is damaged.
        """
        metadata = read_header(file).metadata
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        kind = str(metadata.get("tokenizer.ggml.model", ""))
        return cls(read_pieces(file), kind, bos if isinstance(bos, int) else None)

    @property
    def vocabulary(self) -> Vocabulary:
        """Size and hash, as a tokenizer's: equal hashes mean that equal ids are equal strings."""
        return Vocabulary(len(self.strings), digest(*self.strings))

    @cached_property
    def _characters(self) -> dict[str, int]:
        return _byte_of_characters()

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes of a token in a text; ``None`` for tokenizers whose pieces are not those of the text."""
        piece = self.strings[token]
        if self.kind == "gpt2":
            known = [self._characters.get(character) for character in piece]
            return piece.encode() if None in known else bytes(byte for byte in known if byte is not None)
        if self.kind == "llama":
            byte = _BYTE.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()
        return None

    def ends(self, tokens: Sequence[int], text: bytes) -> list[int] | None:
        """Return where in a text each token ends, bytes; ``None`` if the tokens do not spell the beginning of the text.

        A first token that begins the sequence has no bytes, and SentencePiece may have put a space before the text.
        """
        spelled = [self.bytes_of(token) for token in tokens]
        if any(piece is None for piece in spelled):
            return None
        pieces = [piece or b"" for piece in spelled]
        if pieces and tokens[0] == self.bos and not text.startswith(pieces[0]):
            pieces[0] = b""
        whole = b"".join(pieces)
        shift = 1 if whole[:1] == b" " != text[:1] else 0
        if whole[shift:] != text[: len(whole) - shift]:
            return None
        ends, at = [], -shift
        for piece in pieces:
            at += len(piece)
            ends.append(max(0, at))
        return ends
