"""Shared basic types: arms, KV specs, statuses.  Standard library only.

All records are frozen and have a canonical JSON form.  Captures are looked up by the fingerprints of these records, in
this process and in engine processes of other environments.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import json
import math
import os
import re
import secrets
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from fidelab.core.errors import NotSupportedError, OutputError, UsageError
from fidelab.core.locks import lock
from fidelab.core.paths import expand
from fidelab.core.serial import OMIT, AsText

_CACHE_PARAMETERS = ("cache", "past_key_values", "cache_params")


class Status(StrEnum):
    """The outcome of a configuration, a test or a bench."""

    OK = "ok"
    IDENTICAL = "identical"  # same output as the reference, with positive proof that the format ran
    FAILED = "failed"
    NOT_ENGAGED = "not_engaged"  # evidence that the format ran is absent or contradicting
    NOT_SUPPORTED = "not_supported"
    NOT_MEASURABLE = "not_measurable"


class Estimator(StrEnum):
    """Source of a next-token distribution, in order of quality. See docs/metrics/distributions.md#estimators."""

    HIDDEN = "hidden"
    LOGPROBS = "logprobs"
    TOPK = "topk"


_LONGEST_SLUG = 60  # a folder's name has three of them and two digests; file systems allow 255 bytes


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and no spaces, so that equal records give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(*parts: bytes | str) -> str:
    """Return the SHA-256 over the parts, each preceded by its length, as hexadecimal text."""
    h = hashlib.sha256()
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        h.update(len(raw).to_bytes(8, "little"))
        h.update(raw)
    return h.hexdigest()


def slug(text: str) -> str:
    """Return a file name for a text, with ``_`` for other characters and at most 60 characters.

    Of an absolute path, only the last part is used.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(text).name if Path(text).is_absolute() else text).strip("_") or "x"
    return name if len(name) <= _LONGEST_SLUG else f"{name[: _LONGEST_SLUG - 9]}-{digest(text)[:8]}"


def shell_line(*words: object) -> str:
    """Return a command line to copy into a shell: words with spaces or other characters of the shell are quoted.

    >>> shell_line("fidelab", "compare", "--resume", "my runs/1")
    "fidelab compare --resume 'my runs/1'"
    """
    return shlex.join(map(str, words))


def resume_line(folder: object, command: str = "fidelab compare") -> str:
    """Return the command line that resumes what was stopped in a folder."""
    return shell_line(*command.split(), "--resume", folder)


def cache_dir() -> Path:
    """Return ``$FIDELAB_CACHE``, else ``fidelab`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``; it may not exist."""
    folder = os.environ.get("FIDELAB_CACHE")
    if folder:
        return expand(folder)
    return expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "fidelab"


def state_dir() -> Path:
    """Return the folder of this user's state: ``fidelab`` in ``$XDG_STATE_HOME``, else in ``~/.local/state``.

    Unlike this folder, the cache may be shared by several users.
    """
    return expand(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "fidelab"


def finite(value: Any) -> Any:
    """Return plain data for strict JSON: NaN and infinities become ``None``, tuples become lists."""
    match value:
        case Mapping():
            return {key: finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value


def read_file(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file.  Pipes and devices, which may never end, are not opened.

    Raises:
        OSError: If the file cannot be read, is not a regular file, or has more than ``most`` bytes.
    """
    try:
        kind = path.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # opening a folder raises the right error
            raise OSError(errno.EINVAL, "a pipe or a device, where a regular file is expected", str(path))
        with path.open("rb") as file:
            raw = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
            while len(raw) <= most and (more := file.read(1 << 16)):  # /proc and the like tell no size
                raw += more
    except ValueError as error:  # a zero byte in the path
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    if len(raw) > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes, the most that is read", str(path))
    return raw


def write_atomically(path: str | Path, text: str) -> Path:
    """Write a text file that appears, or replaces another, when it is complete.

    A process that is killed leaves nothing that lasts where the system has files without a name (Linux, most file
    systems); elsewhere at worst a hidden file, which the next write of the same file removes.

    Raises:
        OutputError: If the folder or the file cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        form = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]+\.tmp")
        with os.scandir(path.parent) as entries:
            remains = [path.with_name(entry.name) for entry in entries if form.fullmatch(entry.name)]
        for unfinished in remains:
            if unfinished.is_symlink() or not unfinished.is_file():
                continue
            with suppress(OSError), unfinished.open("rb") as left:
                lock(left, wait=False)
                unfinished.unlink()
        try:
            if not _write_unnamed(path, text):
                with temporary.open("w", encoding="utf-8", newline="\n") as file:
                    _write_locked(file, text)
                    temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{path}: cannot write: {error.strerror}") from error
    return path


_WITHOUT_UNNAMED = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}


def _write_unnamed(path: Path, text: str) -> bool:
    """Write to a file that gets its name at the end; whether the system can do that."""
    if not hasattr(os, "O_TMPFILE") or not Path("/proc/self/fd").is_dir():
        return False
    try:
        unnamed = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in _WITHOUT_UNNAMED:
            return False
        raise
    with os.fdopen(unnamed, "w", encoding="utf-8", newline="\n") as file:
        _write_locked(file, text)
        try:
            try:
                _name(unnamed, path)
            except (
                FileExistsError
            ):  # only a rename replaces a file; killed before it, this leaves a folder with an owner
                from fidelab.core.scratch import scratch

                with scratch("file", beside=path) as room:
                    _name(unnamed, room / "file")
                    (room / "file").replace(path)
        except (OutputError, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            return False  # no links here
    return True


def _name(descriptor: int, path: Path) -> None:
    """Give an open file without a name its name."""
    # Python follows the link in /proc only if a folder is named, which an absolute path makes unused
    os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor)


def _write_locked(file: IO[str], text: str) -> None:
    """Write a file that :func:`_remove_unfinished` leaves alone until it is closed."""
    with suppress(OSError):  # a file system without locks
        lock(file, wait=False)
    file.write(text)
    file.flush()
    os.fsync(file.fileno())


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, computed now."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_MOST_LEVELS, _MOST_CONTAINERS = 64, 1_000_000  # limits of JSON: deeper or larger than any file that is written
_CONTAINERS = frozenset({dict, list})
_LONG_NUMBER, _SURROGATE = re.compile(r"\d{19}"), re.compile(r"\\u[dD][89a-fA-F]")


def strict_json(
    raw: bytes | str,
    not_finite: Callable[[str], Any] | None = None,
    *,
    half_pairs: bool = False,
    most_values: int | None = None,
) -> Any:
    """Return the value of a JSON text that may come from anybody.

    Args:
        not_finite: maps NaN and the infinities to their replacement; they are refused by default.
        half_pairs: whether texts may hold half of a surrogate pair, which UTF-8 cannot encode.
        most_values: limit of the number of values, since many short values need too much memory.

    Raises:
        ValueError: If the text is not UTF-8 or not JSON, or has a number that is not finite, a whole number beyond 64
            bits, half a surrogate pair, more than 64 levels, more than a million lists and objects, or more than
            ``most_values`` values.
    """

    def refuse(text: str) -> Any:
        raise ValueError(f"{text[:20]} is not JSON")

    def number(text: str) -> Any:
        value = float(text)
        return value if math.isfinite(value) else (not_finite or refuse)(text)

    def whole(text: str) -> int:
        if len(text) > 20 or not -(1 << 63) <= int(text) < 1 << 64:
            raise ValueError(f"{text[:20]}… is not a number of 64 bits")
        return int(text)

    text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
    if text.count("[") + text.count("{") > _MOST_CONTAINERS:
        raise ValueError(f"more than {_MOST_CONTAINERS:,} lists and objects")
    if most_values is not None and text.count(",") > most_values:
        raise ValueError(f"more than {most_values:,} values")
    parse_int = whole if _LONG_NUMBER.search(text) else None  # asked for every number, it would be slow
    value = _bounded_json(text, parse_constant=not_finite or refuse, parse_float=number, parse_int=parse_int)
    if not half_pairs and _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def plain_json(raw: bytes | str) -> Any:
    """Return the value of a JSON text of another program, with all numbers that Python reads, such as ``Infinity``.

    Raises:
        ValueError: If it is not JSON, or has more than 64 levels.
    """
    return _bounded_json(raw)


def _bounded_json(raw: bytes | str, **options: Any) -> Any:
    try:
        value = json.loads(raw, **options)
    except RecursionError:
        raise ValueError(f"nested deeper than {_MOST_LEVELS} levels") from None
    level: list[Any] = [[value]]  # what holds lists or objects
    for _ in range(_MOST_LEVELS):
        held = (item for items in level for item in items if type(item) in _CONTAINERS)
        inner = (item.values() if type(item) is dict else item for item in held)
        level = [items for items in inner if not _CONTAINERS.isdisjoint(map(type, items))]
    if level:
        raise ValueError(f"nested deeper than {_MOST_LEVELS} levels")
    return value


def format_bytes(*sizes: float, digits: int = 2) -> list[str]:
    """Return sizes in one unit, the largest in which each but 0 is at least 0.1: ``0.52 KiB``, ``1.20 GiB``."""
    smallest = min((size for size in sizes if size > 0), default=0.0)
    units = ("bytes", "KiB", "MiB", "GiB")
    power = max((n for n in range(len(units)) if smallest >= 0.1 * 1024**n), default=0)
    return [f"{size / 1024**power:,.{digits if power else 0}f} {units[power]}" for size in sizes]


def cache_parameter(model: Any) -> str:
    """Return the name by which a Transformers model's ``forward`` takes its cache.

    Transformers 5.24 renamed ``past_key_values`` and ``cache_params`` to ``cache``. Where ``forward`` ends in
    ``**kwargs``, a name that it does not list is dropped without a warning, and the model runs without a cache.

    Raises:
        NotSupportedError: If ``forward`` lists none of these names.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in _CACHE_PARAMETERS:
        if name in parameters:
            return name
    raise NotSupportedError(
        f"{type(model).__name__}.forward takes no cache: none of {', '.join(_CACHE_PARAMETERS)} is a parameter"
    )


_most_cores: list[int] = []  # the limits of using_cores, the inner ones last


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # only Linux has it
    return min(len(affinity(0)) if affinity else os.cpu_count() or 1, *_most_cores[-1:], 1 << 20)


@contextmanager
def using_cores(most: int) -> Iterator[None]:
    """Let this process use at most so many cores, by the word of :func:`usable_cores`: others were promised the rest.

    It concerns threads that fidelab starts, not those of libraries, and one job of a process at a time.
    """
    _most_cores.append(max(1, most))
    try:
        yield
    finally:
        _most_cores.pop()


def interrupted() -> int:
    """Return the exit code of a program that Ctrl-C stopped, and make sure that Python ends with it.

    An interrupt that passes through ``exec`` of a text, such as a dataclass in the middle of an import, stays marked as
    unhandled even if it is caught.  ``python -m`` then ends by SIGINT instead of its exit code.  The next text that
    runs clears the mark.
    """
    exec("")
    return 130


def waiting_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that let waiting threads of OpenMP and OpenBLAS sleep soon, without those that are already set.

    Threads that spin fall to a tenth of their speed as soon as another process needs a core.  Threads that sleep at
    once lose as much between the many small operations of a decoded token (llama.cpp on two idle cores: 35 ms instead
    of 12).  GNU's library may therefore check 1,000 times, for some ten microseconds, before it lets a thread sleep.
    Threads of OpenBLAS spin for 2²⁶ cycles by default, and take a core from the comparison of rows that follows a
    product.
    """
    libraries = ({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}, {"OPENBLAS_THREAD_TIMEOUT": "20"})
    return {name: of[name] for of in libraries if not of.keys() & environment.keys() for name in of}


# ---------------------------------------------------------------------------------------------- KV spec

_FORMAT = re.compile(r"^(?P<name>[A-Za-z0-9_.\-]+)(?:\[(?P<options>[^\[\]]*)\])?$")
_LAYERS = re.compile(r"^(?P<first>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9}))?$")
_MAX_LAYERS = 100_000  # keeps a mistyped range from exhausting memory
SLIDING_WINDOW = "sliding_window"
LAYER_KINDS = (SLIDING_WINDOW,)
"""Words for layers of a kind, as vLLM's ``--kv-cache-dtype-skip-layers`` has them."""


@dataclass(frozen=True)
class FormatSpec(AsText):
    """One number format by name, with its options as sorted ``(key, value)`` text pairs."""

    name: str
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str, whole: str = "") -> FormatSpec:
        """Read ``name`` or ``name[key=value,…]``; a value may itself be a list: ``skip=0,29``.

        ``whole``: the text that errors quote, if ``text`` is only a part of it.

        Raises:
            UsageError: If the text does not have that form.
        """
        match = _FORMAT.match(text.strip())
        if match is None:
            parts = [part.strip() for part in text.split(",")]
            if len(parts) > 1 and all(re.fullmatch(r"[A-Za-z0-9_]+", part) for part in parts):
                repeated = " ".join(f"--kv {part}" for part in parts)
                raise UsageError(f"KV format {whole or text!r}: write one format; repeat --kv: {repeated}")
            raise UsageError(
                f"KV format {whole or text!r}: write a name, K/V, or options in brackets, as in 'int4[group=32]' or "
                "'f16/q8_0'"
            )
        options: dict[str, list[str]] = {}
        key = ""
        for item in filter(None, (piece.strip() for piece in (match["options"] or "").split(","))):
            head, eq, value = item.partition("=")
            if eq:
                key = head.strip().replace("_", "-")
                options.setdefault(key, []).append(value.strip())
            elif key:  # "skip-layers=0,29": a piece without "=" continues the list before it
                options[key].append(item)
            else:
                raise UsageError(f"KV format {whole or text!r}: option {item!r} has no value; write key=value")
        return cls(match["name"], tuple(sorted((key, ",".join(values)) for key, values in options.items())))

    def without(self, *keys: str) -> FormatSpec:
        """Return the same format without these options."""
        return FormatSpec(self.name, tuple(pair for pair in self.options if pair[0] not in keys))

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}[{','.join(f'{k}={v}' for k, v in self.options)}]"


@dataclass(frozen=True)
class KVSpec:
    """K format and V format, and the layers that keep the compute type.

    ``label`` is the user's text (``k16v8``); ``k`` and ``v`` are its meaning.  ``skip_kinds``: layers by their kind, in
    :data:`LAYER_KINDS`, besides those with numbers.
    """

    label: str
    k: FormatSpec
    v: FormatSpec
    skip_layers: tuple[int, ...] = ()
    skip_kinds: tuple[str, ...] = field(default=(), metadata=OMIT)

    @classmethod
    def parse(cls, text: str) -> KVSpec:
        """Read ``name``, ``K/V`` and options in brackets: ``int4[group=32,skip-layers=0,4-29]``.

        Layers to skip are numbers, ranges, and words of :data:`LAYER_KINDS`: ``skip-layers=sliding_window,29``.

        Names are not checked here, because only the engine knows its formats.

        Raises:
            UsageError: If the text does not have that form.
        """
        label = text.strip()
        sides = label.split("/")
        if len(sides) > 2:
            raise UsageError(f"KV format {text!r}: expected one name or K/V, found {len(sides)} parts")
        parsed: list[FormatSpec] = []
        layers, kinds = set[int](), set[str]()
        for side in sides:
            spec = FormatSpec.parse(side, label)
            skipped = dict(spec.options).get("skip-layers")
            for item in () if skipped is None else skipped.split(","):
                if item in LAYER_KINDS:
                    kinds.add(item)
                else:
                    layers.update(_layers(item, label))
            parsed.append(spec.without("skip-layers"))
        return cls(label, parsed[0], parsed[-1], tuple(sorted(layers)), tuple(sorted(kinds)))

    @property
    def same(self) -> bool:
        """Whether K and V have the same format."""
        return self.k == self.v

    @property
    def text(self) -> str:
        """The formats in words: ``bf16/int4[group=32], not in layers 0, 29``."""
        skipped = f", not in layers {', '.join(map(str, self.skipped))}" if self.skipped else ""
        return (str(self.k) if self.same else f"{self.k}/{self.v}") + skipped

    @property
    def skipped(self) -> tuple[int | str, ...]:
        """Numbers, then kinds, of the layers that keep the compute type."""
        return (*self.skip_layers, *self.skip_kinds)

    def skips(self, number: int | None, windowed: bool = False) -> bool:
        """Return whether a layer keeps the compute type; ``windowed``: it holds a window of the last tokens alone."""
        return number in self.skip_layers or (windowed and SLIDING_WINDOW in self.skip_kinds)

    def content(self) -> dict[str, Any]:
        """The spec without its label, as fingerprints see it."""
        kinds = {"skip_kinds": list(self.skip_kinds)} if self.skip_kinds else {}
        return {"k": str(self.k), "v": str(self.v), "skip_layers": list(self.skip_layers), **kinds}


def _layers(item: str, whole: str) -> range:
    """Parse ``7``, or ``0-6`` with both ends."""
    match = _LAYERS.match(item)
    first, last = (int(match["first"]), int(match["last"] or match["first"])) if match else (1, 0)
    if not first <= last < _MAX_LAYERS:
        raise UsageError(
            f"KV format {whole!r}: skip-layers takes layer numbers from 0, ranges as 0-6 and the word "
            f"{' or '.join(LAYER_KINDS)}, not {item!r}"
        )
    return range(first, last + 1)


# -------------------------------------------------------------------------------------------------- arm


@dataclass(frozen=True)
class Arm:
    """One configuration to run: engine, model, KV spec and engine options.

    ``weights`` is the hash of the checkpoint's content, ``model`` its name for the user, and ``path`` its location on
    this machine; the fingerprint sees only the hash.  ``env``: environment variables of its own process. ``draft``:
    path of its draft model, which the options name.
    """

    name: str
    engine: str
    model: str
    path: str
    weights: str
    kv: KVSpec
    dtype: str
    device: str
    threads: int
    options: tuple[tuple[str, str], ...] = ()
    env: tuple[tuple[str, str], ...] = field(default=(), metadata=OMIT)
    draft: str = field(default="", metadata=OMIT)

    def fingerprint(self) -> str:
        """SHA-256 of everything that affects the arm's output; neither its name nor the location of its files
        counts.
        """
        return digest(
            canonical_json(
                {
                    "engine": self.engine,
                    "weights": self.weights,
                    "kv": self.kv.content(),
                    "dtype": self.dtype,
                    "device": self.device,
                    "threads": self.threads,
                    "options": dict(self.options),
                    **({"env": dict(self.env)} if self.env else {}),
                }
            )
        )


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding of an arm: the engine's name of the ``method``, and at most ``tokens`` in one draft.

    ``lookup``: lengths of the shortest and the longest n-gram that is looked up in the text so far, without a model;
    ``draft``: the name of the model that drafts; ``options``: the names of the arm's options for this.
    """

    method: str
    tokens: int | None = None
    lookup: tuple[int, int] | None = None
    draft: str = ""
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Vocabulary:
    """Size and hash of a vocabulary; the list of strings is stored next to the captures."""

    size: int
    sha256: str
