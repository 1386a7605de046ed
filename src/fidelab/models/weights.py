"""Read a checkpoint folder: its weight files, their size, and one hash of its content."""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Event
from typing import Any

from fidelab.captures.container import Entry, read_header
from fidelab.core import canonical_json, digest, read_file, sha256_of, strict_json, usable_cores, write_atomically
from fidelab.core.errors import InputError, OutputError
from fidelab.core.paths import is_file
from fidelab.models import reading
from fidelab.models.cache import cache_dir

INDEX = "model.safetensors.index.json"
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_TOKENIZER = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_NOISE = {"transformers_version", "_name_or_path", "_model_name_or_path"}  # of a config: who wrote it, from where
_MAX_JSON_BYTES = 64 << 20  # bytes of a config or an index
_MAX_JSON_VALUES = 4_000_000  # of a config or an index
_CHUNK = 4 << 20  # bytes that are hashed between two looks at the clock
_CACHE_FROM = 1 << 20  # bytes: smaller files are hashed faster than looked up
_SHA256 = re.compile(r"[0-9a-f]{64}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.  Infinities, which some configs hold, become the text ``Infinity``.

    Raises:
        InputError: If the file cannot be read, is not JSON, or does not hold an object.
    """
    try:
        value = strict_json(read_file(path, _MAX_JSON_BYTES), not_finite=_non_finite_name, most_values=_MAX_JSON_VALUES)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} should hold a JSON object, not {type(value).__name__}")
    return value


def _non_finite_name(number: str) -> str:
    """``NaN``, ``Infinity`` or ``-Infinity`` for a number that is not finite, however it is written (``1e999``)."""
    value = float(number)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a checkpoint, sorted: by its index, else ``model.safetensors``, else all.

    Raises:
        InputError: If there are no weight files or only pickled ones, or the index names files that are missing or
            outside the folder.
    """
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(read_index(index).values()))
        missing = [name for name in names if not is_file(index.parent / name)]
        if missing:
            raise InputError(
                f"{index.parent} is incomplete: {len(missing)} of {len(names)} weight files are missing, "
                f"the first is {missing[0]}; fetch the model again"
            )
        return tuple(index.parent / name for name in names)
    single = folder / "model.safetensors"
    files = (single,) if single.is_file() else tuple(sorted(folder.glob("*.safetensors")))
    if files:
        return files
    pickled = sorted(path.name for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickled:
        raise InputError(
            f"{folder} holds pickled weights only ({pickled[0]}), which can run code when loaded; "
            "fidelab reads safetensors: convert them, or take a revision that has safetensors"
        )
    raise InputError(f"{folder} has no *.safetensors file: a model folder holds config.json, weights and a tokenizer")


def read_index(index: Path) -> dict[str, str]:
    """Return tensor name → file name from the index of a sharded checkpoint. The files need not exist.

    Raises:
        InputError: If it is not an index, or names a file outside its folder.
    """
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not entries:
        raise InputError(f"{index} has no weight_map; fetch the model again")
    shards = {name: str(file) for name, file in entries.items()}
    for name in sorted(set(shards.values())):
        pure = PurePosixPath(name.replace("\\", "/"))
        if pure.is_absolute() or ".." in pure.parts or ":" in name:
            raise InputError(f"{index} names a file outside its folder ({name!r}); do not use this checkpoint")
    return shards


@dataclass(frozen=True)
class WeightSize:
    """Totals from the headers of weight files: values, bytes, tensors, and whether an LM head exists."""

    parameters: int
    bytes: int
    tensors: int
    has_head: bool


def measure(files: tuple[Path, ...]) -> WeightSize:
    """Count the values that the files store, from their headers.  A packed 4-bit weight counts as its packed type.

    Raises:
        InputError: If a file is not a complete safetensors file.
    """
    tensors = [(name, entry) for path in files for name, entry in read_entries(path)[0].items()]
    return WeightSize(
        parameters=sum(math.prod(entry.shape) for _, entry in tensors),
        bytes=sum(entry.end - entry.start for _, entry in tensors),
        tensors=len(tensors),
        has_head=any("lm_head" in name or "embed_out" in name for name, _ in tensors),
    )


def read_entries(path: Path) -> tuple[dict[str, Entry], int]:
    """Return the tensors of a complete safetensors file, and the place of their first byte.

    As the format demands, the tensors fill the file: none begins within another, and nothing is between them.

    Raises:
        InputError: If it is not a complete safetensors file.
    """
    try:
        entries, start, size = read_header(path)
        end, before = 0, "the header"
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.start != end:
                what = "begins within" if entry.start < end else "leaves a gap behind"
                raise ValueError(f"tensor {name[:60]!r} {what} {before}")
            end, before = entry.end, repr(name[:60])
        if end != size:
            raise ValueError(f"{size} bytes of tensors where its header says {end}")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a complete safetensors file ({error}); fetch the model again") from None
    return entries, start


def folder_sha256(folder: Path, files: tuple[Path, ...]) -> str:
    """Return the SHA-256 over names and contents of weights, config and tokenizer, in sorted order.

    The place of the folder and notes about who wrote the config do not count.

    Raises:
        InputError: If a file from the hub's cache does not have the hash under which it was stored.
    """
    parts = []
    if (reads := reading.current()) is not None:
        reads.may_read_all(files)
    now = [file for file in files if reading.relied() is None or not is_named(file.resolve())]
    reading.announce(sum(file.stat().st_size for file in now if not _note(file).exists()))
    # SHA-256 is slower than most disks, and releases the interpreter: a file per core
    with ThreadPoolExecutor(max(1, usable_cores())) as pool:
        running = [pool.submit(copy_context().run, file_sha256, path) for path in files]
        hashes = [one.result() for one in running]
    for path, sha256 in zip(files, hashes, strict=True):
        # The hub's cache stores a large file under its SHA-256, so that it can be checked
        stored = path.resolve()
        if path.is_symlink() and _SHA256.fullmatch(stored.name) and stored.name != sha256:
            raise InputError(damaged(path.name, stored))
        parts.append((path.relative_to(folder).as_posix(), sha256))
    parts += [(name, file_sha256(folder / name)) for name in _TOKENIZER if (folder / name).is_file()]
    config = {key: value for key, value in read_json(folder / "config.json").items() if key not in _NOISE}
    parts.append(("config.json", digest(canonical_json(config))))
    return digest(*(text for part in sorted(parts) for text in part))


def damaged(name: str, stored: Path) -> str:
    """Return the message about a file whose bytes have another hash than the hub's name of it."""
    return f"{name} is damaged (its SHA-256 is not the hub's): delete {stored} and run again"


def content_sha256(path: Path) -> str:
    """Return the SHA-256 over names and bytes of a file, or of all files of a folder; empty if nothing exists."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    parts = ((file.relative_to(path).as_posix(), file_sha256(file)) for file in files if file.is_file())
    return digest(*(text for part in parts for text in part)) if path.exists() else ""


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes. For a large file it is cached by path, size and time of change.

    A plan that may not read the file (:mod:`fidelab.models.reading`) gets the name under which the hub's cache stores
    it, else a digest of path, size and time of change.  A run gets the name, too, and verifies it later.
    """
    real = path.resolve()
    stat = real.stat()
    if stat.st_size < _CACHE_FROM:
        return sha256_of(real)
    if (relied := reading.relied()) is not None:
        relied.states[real] = stat.st_size, stat.st_mtime_ns
    note = _note(real)
    try:
        known = note.read_text(encoding="ascii")
    except (OSError, ValueError):
        known = ""
    if _SHA256.fullmatch(known):
        return known
    reads = reading.current()
    if reads is not None and not reads.may_read(real, stat.st_size):
        return real.name if is_named(real) else digest("unread", str(real), str(stat.st_size), str(stat.st_mtime_ns))
    if is_named(real) and relied is not None:
        relied.named.add(real)
        return real.name
    value = bytes_sha256(real)
    assert value is not None
    return value


def bytes_sha256(path: Path, stop: Event | None = None) -> str | None:
    """Return the SHA-256 of a file's bytes, read now, and note it in the cache; ``None`` if ``stop`` is set before.

    Raises:
        OSError: If the file cannot be read.
    """
    note = _note(path)
    found, told = hashlib.sha256(), reading.hashing(path.stat().st_size)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
            told(len(chunk))
            if stop is not None and stop.is_set():
                return None
    with contextlib.suppress(OutputError):  # a cache that cannot be written only costs time
        write_atomically(note, found.hexdigest())
    return found.hexdigest()


def is_named(path: Path) -> bool:
    """Return whether the hub's cache stores a file under its SHA-256."""
    return path.parent.name == "blobs" and _SHA256.fullmatch(path.name) is not None


def _note(path: Path) -> Path:
    """The place of a file's hash in the cache, by path, size and time of change."""
    real = path.resolve()
    stat = real.stat()
    return cache_dir() / "hashes" / digest(str(real), str(stat.st_size), str(stat.st_mtime_ns))
