"""GGUF → safetensors: the same weights, dequantized to bfloat16, for engines that do not read GGUF.

llama.cpp computes on the quantized blocks, so its logits differ from those of the converted folder by more
than KV formats do: the two are compared as two engines, never as one.
"""

from __future__ import annotations

import io
import logging
import math
import struct
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, BinaryIO

from fidelab.errors import InputError
from fidelab.models.cache import build_once
from fidelab.models.hub import first_line

__all__ = ["check_header", "to_safetensors"]

_log = logging.getLogger(__name__)

# Pre-tokenizers that cut every digit off and then split as GPT-2 does.  Transformers builds plain GPT-2 for
# these names: white space before a number would become other tokens than in llama.cpp and in the model's own
# tokenizer.
_DIGITS_THEN_GPT2 = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def to_safetensors(gguf: Path, target: Path) -> Path:
    """The folder ``target`` with the file's weights in bfloat16, config, tokenizer and template; made once.

    Raises:
        InputError: the file is no GGUF, damaged, or of an architecture that Transformers cannot convert.
    """
    check_header(gguf)
    return build_once(target, lambda scratch: _convert(gguf.resolve(), scratch / "hf"))


def check_header(gguf: Path) -> None:
    """Walk through a GGUF file's header, which may come from anybody.

    Libraries loop and allocate by the counts in it before they look whether the file has as much.

    Raises:
        InputError: it does not begin as a GGUF file, or its header does not fit into it; says what is wrong.
    """
    try:
        if not gguf.is_file():
            raise ValueError("it is missing, or no regular file")
        with gguf.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise InputError(f"{gguf} is not a GGUF file: it does not begin with 'GGUF'; fetch it again")
            header = _Header(file, gguf.stat().st_size)
            [version], [tensors], [fields] = header.read("I"), header.read("Q"), header.read("Q")
            if version not in (2, 3):
                raise ValueError(f"version {version} of the format is not read")
            layers = header.skip_fields(fields)
            header.skip_tensors(tensors)
            if layers > tensors:
                raise ValueError(f"it says {layers} layers, but holds {tensors} tensors")
    except (OSError, ValueError) as error:
        raise InputError(f"{gguf} is damaged ({error}); fetch it again") from None


class _Header:
    """The header of a GGUF file behind its first four bytes; the published layout, little-endian."""

    _TYPES = ("B", "b", "H", "h", "I", "i", "f", "?", "", "", "Q", "q", "d")  # 8: a text, 9: an array
    _TEXT, _ARRAY = 8, 9
    _MOST_NAME = 1 << 16  # bytes of a field's or a tensor's name

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size

    def read(self, form: str) -> tuple[Any, ...]:
        """Numbers, by the letters of :mod:`struct`."""
        size = struct.calcsize(f"<{form}")
        self._expect(self._file.tell() + size)
        return struct.unpack(f"<{form}", self._file.read(size))

    def skip_fields(self, count: int) -> int:
        """Walk through the metadata; returns the number of layers that it says, 0 where it says none."""
        layers = 0
        self._expect(13 * count)
        for _ in range(count):
            name, [kind] = self._name(), self.read("I")
            if name.endswith(b".block_count") and kind in (4, 5, 10, 11):
                [layers] = self.read(self._TYPES[kind])
            else:
                self._skip(kind)
        return layers

    def skip_tensors(self, count: int) -> None:
        """Walk through the list of tensors."""
        self._expect(24 * count)
        for _ in range(count):
            name, [dimensions] = self._name(), self.read("I")
            if not 0 <= dimensions <= 8:
                raise ValueError(f"tensor {name[:60]!r} has {dimensions} dimensions")
            self._expect(math.prod(self.read("Q" * dimensions)) // 8)  # no type has less than a bit for a number
            self.read("IQ")

    def _skip(self, kind: int) -> None:
        if kind == self._TEXT:
            self._leap(*self.read("Q"))
        elif kind == self._ARRAY:
            inner, count = self.read("IQ")
            if inner == self._TEXT:
                self._expect(8 * count)
                for _ in range(count):
                    self._leap(*self.read("Q"))
            else:
                self._leap(count * struct.calcsize(f"<{self._letter(inner)}"))
        else:
            self.read(self._letter(kind))

    def _letter(self, kind: int) -> str:
        if not (0 <= kind < len(self._TYPES) and self._TYPES[kind]):
            raise ValueError(f"a field of type {kind}, which there is not")
        return self._TYPES[kind]

    def _name(self) -> bytes:
        [length] = self.read("Q")
        if length > self._MOST_NAME:
            raise ValueError(f"a name of {length:,} bytes")
        return self._file.read(length)

    def _expect(self, count: int) -> None:
        """Refuse what is announced and cannot be in the rest of the file."""
        if count > self._size:
            raise ValueError("its header announces more than the file holds")

    def _leap(self, count: int) -> None:
        self._expect(self._file.tell() + count)
        self._file.seek(count, io.SEEK_CUR)


def _convert(gguf: Path, out: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _log.info("converting %s to safetensors (once)", gguf)
    # Transformers also reads what lies beside the file, and would run code that a config there names.
    folder = out.parent / "alone"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / gguf.name).symlink_to(gguf)
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    try:
        with redirect_stderr(io.StringIO()):  # progress bars, some of which have no switch
            tokenizer = AutoTokenizer.from_pretrained(folder, **source)
            model = AutoModelForCausalLM.from_pretrained(
                folder, **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
            )
            _split_digits(tokenizer, gguf)
            model.save_pretrained(out)
            tokenizer.save_pretrained(out)
    except Exception as error:  # readers of damaged files fail in many ways
        if isinstance(error, OSError) and error.errno is not None:  # the disk: build_once says so
            raise
        raise InputError(
            f"{gguf} cannot be converted for Transformers ({first_line(error)}); "
            "use the model's safetensors or another GGUF file"
        ) from error
    return out


def _split_digits(tokenizer: Any, gguf: Path) -> None:
    """Have the tokenizer split digits where the file's pre-tokenizer does."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() in _DIGITS_THEN_GPT2:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
