"""Read a GGUF file without its weights: the model's shape, its tokenizer and chat template, its config.

llama.cpp reads the file itself, so that this is all that is needed for it; :mod:`fidelab.models.convert` converts the
weights for the other engines.  The header is read here, within the bounds of the file: package ``gguf`` builds an
object for every token of the vocabulary (2 s and more for the embedded model, on a machine where this takes 0.1 s)
and trusts every number in the file.
"""

from __future__ import annotations

import io
import math
import mmap
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fidelab.core.errors import InputError
from fidelab.models.cache import build_once
from fidelab.models.hub import first_line

ORIGIN = "origin.txt"  # in what is made from a GGUF file: where that lay

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9  # kinds of values that have a length
_VERSIONS = (2, 3)  # of the file format that are read
_MAX_ARRAY_ENTRIES = 1 << 24  # of an array of strings
_MAX_TABLE_ROWS = 1 << 20  # of the tables of metadata and of tensors
_MAX_KEPT_ARRAY = 4096  # longest array of numbers that is kept: those with a number per layer
_MAX_DIMENSIONS = 8
PIECES = "tokenizer.ggml.tokens"
"""Key of the vocabulary's strings."""
_ALIGNMENT = 32  # bytes, where the file states none: the default of the format

# Pre-tokenizers that cut every digit off and then split as GPT-2 does.  Transformers builds plain GPT-2 for
# these names: white space before a number would become other tokens than in llama.cpp and in the model's own
# tokenizer.
_DIGITS_THEN_GPT2 = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


@dataclass(frozen=True)
class StoredTensor:
    """Tensor of the file: its shape as in torch, ggml's number of its type, the place of its first byte, its bytes."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    bytes: int = 0


@dataclass(frozen=True)
class Header:
    """``metadata``: keys to values; an array of strings, or of many numbers, is represented by its length.

    ``data_bytes``: bytes of all tensors.
    """

    metadata: Mapping[str, Any]
    tensors: tuple[StoredTensor, ...]
    data_bytes: int

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture, which is the prefix of the keys that describe the model."""
        return str(self.metadata["general.architecture"])

    def count(self, key: str) -> int | None:
        """Return a positive number of the architecture's keys, and for an array (one per layer) the largest."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        numbers = [n for n in (value if isinstance(value, list) else [value]) if isinstance(n, int)]
        return max(numbers, default=0) or None if not isinstance(value, bool) else None


def head_sizes(header: Header) -> tuple[set[int], set[int]]:
    """Return the sizes of the heads of keys and of values, of all kinds of layers, as the file states them."""
    heads, hidden = header.count("attention.head_count"), header.count("embedding_length")
    usual = {hidden // heads} if heads and hidden else set()

    def stated(side: str) -> set[int]:
        found: set[int] = set()
        for suffix in ("", "_swa"):
            value = header.metadata.get(f"{header.architecture}.attention.{side}_length{suffix}")
            found |= {n for n in (value if isinstance(value, list) else [value]) if isinstance(n, int) and n > 0}
        return found or usual

    return stated("key"), stated("value")


def read_header(file: Path) -> Header:
    """Read the metadata and the tensor table of a GGUF file.

    Raises:
        InputError: If it is not a GGUF file, has an unknown version, or is damaged or incomplete.
    """
    if not file.is_file():
        raise InputError(f"{file} is missing, or no regular file")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise InputError(f"{file} is not a GGUF file: it does not begin with 'GGUF'; fetch it again")
        try:
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Cursor(content).header()
        except (ValueError, struct.error, OverflowError) as error:
            what = "its header is incomplete" if isinstance(error, struct.error) else first_line(error)
            raise InputError(f"{file} is damaged or incomplete ({what}); fetch it again") from None


def read_pieces(file: Path) -> list[str]:
    """Return the strings of the vocabulary in a GGUF file, by token id; empty if it holds none.

    Raises:
        InputError: As :func:`read_header`.
    """
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            pieces = _Cursor(content, strings=(PIECES,)).header().metadata.get(PIECES)
        except (ValueError, struct.error, OverflowError) as error:
            raise InputError(f"{file} is damaged or incomplete ({first_line(error)}); fetch it again") from None
    return pieces if isinstance(pieces, list) else []


class _Cursor:
    """Reads a header from its beginning to its end; ``strings``: keys whose arrays of strings are kept."""

    def __init__(self, content: mmap.mmap, strings: Sequence[str] = ()) -> None:
        self._content = content
        self._strings = strings
        self._at = 4

    def header(self) -> Header:
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} of the format is not known")
        n_tensors, n_values = self._entries(_MAX_TABLE_ROWS), self._entries(_MAX_TABLE_ROWS)
        metadata = {}
        for _ in range(n_values):
            key = self._text()
            metadata[key] = self._value(self._number("I"), kept=key in self._strings)
        further = bool(metadata.get("split.no"))  # of the files that a model is split into, the first describes it
        if not isinstance(metadata.get("general.architecture"), str) and not further:
            raise ValueError("it does not name an architecture")
        layers = metadata.get(f"{metadata.get('general.architecture')}.block_count")
        if isinstance(layers, int) and layers > metadata.get("split.tensors.count", n_tensors):
            raise ValueError(f"it says {layers:,} layers, but holds {n_tensors:,} tensors")
        table = []
        for _ in range(n_tensors):
            name, count = self._text(), self._number("I")
            if count > _MAX_DIMENSIONS:
                raise ValueError(f"a tensor has {count} dimensions")
            shape = tuple(reversed([self._number("Q") for _ in range(count)]))  # ggml names the fastest one first
            table.append((name, shape, self._number("I"), self._number("Q")))
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError("its alignment is not a positive number")
        start = -(-self._at // alignment) * alignment
        tensors, ends = [], sorted({*(start + offset for *_, offset in table), len(self._content)})
        for name, shape, type_, place in table:
            offset = start + place
            if (size := _tensor_bytes(shape, type_)) is None:  # a type newer than the package: up to the next tensor
                size = ends[bisect_right(ends, offset)] - offset if offset < len(self._content) else 0
            if offset + size > len(self._content):
                raise ValueError(f"tensor {name!r} goes beyond the end of the file")
            tensors.append(StoredTensor(name, shape, type_, offset, size))
        return Header(metadata, tuple(tensors), max(0, len(self._content) - start))

    def _number(self, code: str) -> Any:
        [value] = struct.unpack_from(f"<{code}", self._content, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _entries(self, most: int = _MAX_ARRAY_ENTRIES) -> int:
        count: int = self._number("Q")
        if count > most:
            raise ValueError(f"it announces {count:,} entries")
        return count

    def _skip(self, size: int) -> int:
        """The place before ``size`` bytes, which are passed over."""
        here = self._at
        if size > len(self._content) - here:
            raise ValueError("a value goes beyond the end of the file")
        self._at += size
        return here

    def _text(self) -> str:
        return self._raw(self._number("Q")).decode("utf-8")

    def _raw(self, size: int) -> bytes:
        here = self._skip(size)
        return self._content[here : here + size]

    def _value(self, kind: int, *, kept: bool = False) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(self._number("I"), kept=kept)
        if kind not in _NUMBERS:
            raise ValueError(f"a value has the unknown type {kind}")
        return self._number(_NUMBERS[kind])

    def _array(self, kind: int, *, kept: bool) -> Any:
        if kind == _STRING:
            count = self._entries()
            if kept:
                return [self._raw(self._number("Q")).decode("utf-8", "replace") for _ in range(count)]
            for _ in range(count):
                self._skip(self._number("Q"))
            return count
        if kind not in _NUMBERS:
            raise ValueError(f"an array has entries of type {kind}")
        count = self._number("Q")
        here = self._skip(count * struct.calcsize(f"<{_NUMBERS[kind]}"))
        return (
            list(struct.unpack_from(f"<{count}{_NUMBERS[kind]}", self._content, here))
            if count <= _MAX_KEPT_ARRAY
            else count
        )


def _tensor_bytes(shape: Sequence[int], kind: int) -> int | None:
    """Return the bytes of a tensor; ``None`` if package gguf does not know its type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind not in {*GGMLQuantizationType}:
        return None
    per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return math.prod(shape) // per_block * block_bytes


def text_folder(file: Path, target: Path) -> Path:
    """Write the file's tokenizer, chat template and, if possible, config to the folder ``target``; once, in seconds.

    Raises:
        InputError: If Transformers cannot build a tokenizer of this kind.
    """
    return build_once(target, lambda scratch: _write_text(file.resolve(), scratch))


def _write_text(file: Path, scratch: Path) -> Path:
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    out = scratch / "text"
    out.mkdir()
    try:
        architecture, vocabulary, special = get_gguf_tokenizer(str(file))
        backend, more = convert_gguf_tokenizer(architecture, vocabulary)
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **special, **more)
        # Have the tokenizer split digits where the file's pre-tokenizer does
        from tokenizers import pre_tokenizers

        if vocabulary.get("pre_tokenizer_type") in _DIGITS_THEN_GPT2:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        tokenizer.save_pretrained(out)
    except Exception as error:  # readers of damaged files fail in many ways
        _reraise_disk(error)
        raise InputError(f"{file} has no tokenizer that Transformers can build ({first_line(error)})") from error
    with suppress(InputError):  # llama.cpp may know the architecture all the same
        hf_config(file, scratch).save_pretrained(out)
    (out / ORIGIN).write_text(f"{file}\n", encoding="utf-8")
    return out


def hf_config(file: Path, scratch: Path) -> Any:
    """Return Transformers' config of the model in a GGUF file; ``scratch``: a folder for a link to the file.

    Raises:
        InputError: If Transformers does not know the architecture.
    """
    from transformers import AutoConfig

    # Transformers also reads the folder of the file, and would run code that a config there names.
    folder = scratch / "alone"
    folder.mkdir(exist_ok=True)
    link = folder / "model.gguf"
    link.unlink(missing_ok=True)
    link.symlink_to(file)
    try:
        with redirect_stderr(io.StringIO()):  # progress bars, some of which have no switch
            return AutoConfig.from_pretrained(
                folder, gguf_file=link.name, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # readers of damaged files fail in many ways
        _reraise_disk(error)
        raise cannot_convert(file, error) from error


def cannot_convert(file: Path, why: Exception | str) -> InputError:
    """Return the error for a file whose weights Transformers cannot load."""
    reason = first_line(why) if isinstance(why, Exception) else why
    return InputError(
        f"{file} cannot be converted for Transformers ({reason}); "
        "use engine llamacpp, the model's safetensors or another GGUF file"
    )


def _reraise_disk(error: Exception) -> None:
    """Raise an error of the disk again, which ``build_once`` explains."""
    if isinstance(error, OSError) and error.errno is not None:
        raise error
