"""The user's own ``llama-perplexity``: finding it, asking what it offers, running it, reading its log.

It needs nothing but the program: no torch, no compiler.  What of a run is not in its log is not known here, and said.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from fidelab.core import Arm, KVSpec, digest, shell_line
from fidelab.core.errors import InputError, UsageError, nearest_first
from fidelab.core.paths import expand

PROGRAM = "llama-perplexity"
_BELOW = ("", "bin", "build/bin", "build/bin/Release", "build/bin/RelWithDebInfo")  # as CMake and releases lay it out
_LIBRARIES = (".so", ".dylib", ".dll")
_ASK_SECONDS = 60.0  # a first start on a network disk, or one that sets up a GPU, takes several seconds
_NEEDED = {
    "--kl-divergence-base": "writes no probabilities (--kl-divergence-base is of January 2024)",
    "--cache-type-k": "has no option --cache-type-k",
}
_TAKEN = {  # flags that the comparison sets itself, by their names in the tool's help
    **dict.fromkeys(("model", "m"), "name it as MODEL or --candidate model=FILE"),
    **dict.fromkeys(("cache-type-k", "ctk", "cache-type-v", "ctv"), "write --kv K/V"),
    **dict.fromkeys(("ctx-size", "c"), "write --n-ctx N"),
    **dict.fromkeys(("chunks",), "write --windows N"),
    **dict.fromkeys(("file", "f", "prompt", "p"), "write --text FILE"),
    **dict.fromkeys(("threads", "t"), "write --threads N"),
    **dict.fromkeys(("kl-divergence", "kl-divergence-base", "save-all-logits", "ppl-stride"), "leave it out"),
}
_SECRETS = ("hf-token",)
_LOG_INFO = re.compile(r"^\s*- 3: info", re.MULTILINE)
_CACHE = re.compile(
    r"(?:llama_kv_cache\w*|llama_new_context_with_model|init)\s*: (?:KV self )?size =\s*([\d.]+) MiB"
    r"(?: \(\s*(\d+) cells,\s*(\d+) layers(?:,\s*\d+/(\d+) seqs)?.*?\))?"
    r", K \((\S+)\):\s*([\d.]+) MiB, V \((\S+)\):\s*([\d.]+) MiB"
)
_BUFFER = re.compile(r": +(\S.*?) KV buffer size = +[\d.]+ MiB")
_STATES = re.compile(r"llama_memory_recurrent\s*: size =\s*([\d.]+) MiB")
_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers to GPU")
_DEVICE = re.compile(r"using device (\S+) \(([^)]+)\)")
_FLASH = re.compile(r"flash_attn\s*= (\S+)")
_PROMPT = re.compile(r"prompt eval time =\s*[\d.]+ ms /\s*(\d+) tokens \(.*?([\d.]+) tokens per second\)")
_ESTIMATE = re.compile(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)")
_PREFIX = re.compile(r"^\d+\.\d+\.\d+\.\d+ [A-Z] ")
_ERRORS = re.compile(
    r"error|failed|fatal|abort|GGML_ASSERT|cannot|unable|invalid|unsupported|not supported|out of mem", re.I
)
_MIB = 1 << 20


@dataclass(frozen=True)
class CacheLog:
    """One cache of a log: bytes of keys and of values, their types, cells and layers; 0: the log does not say.

    ``cells``: of all sequences together, also where each has cells of its own.
    """

    k_type: str
    v_type: str
    k_bytes: float
    v_bytes: float
    cells: int
    layers: int


@dataclass(frozen=True)
class ToolLog:
    """Facts about one run from its log.

    ``devices``: where caches lie; ``rate``: prompt tokens per second; ``perplexity``: the tool's own estimate and its
    standard error.  ``None`` and empty: the log does not say.
    """

    caches: tuple[CacheLog, ...] = ()
    devices: tuple[str, ...] = ()
    accelerator: str = ""
    offloaded: tuple[int, int] | None = None
    flash: str = ""
    rate: float | None = None
    perplexity: tuple[float, float] | None = None
    state_bytes: float = 0.0

    @classmethod
    def read(cls, text: str) -> ToolLog:
        """Read a log of any version from 2024 on."""
        whole, text = (
            text,
            text[max((match.start() for match in _FLASH.finditer(text)), default=0) :],
        )  # a trial may come before
        caches = tuple(
            CacheLog(
                k, v, _MIB * float(k_size), _MIB * float(v_size), int(cells or 0) * int(streams or 1), int(layers or 0)
            )
            for _, cells, layers, streams, k, k_size, v, v_size in _CACHE.findall(text)
        )
        offloaded, flash, rate, estimate = (p.findall(whole) for p in (_OFFLOADED, _FLASH, _PROMPT, _ESTIMATE))
        device = _DEVICE.search(whole)
        return cls(
            caches=caches,
            devices=tuple(dict.fromkeys(_BUFFER.findall(text))),
            accelerator=device[2] if device else "",
            offloaded=(int(offloaded[-1][0]), int(offloaded[-1][1])) if offloaded else None,
            flash=flash[-1] if flash else "",
            rate=float(rate[-1][1]) if rate else None,
            perplexity=(float(estimate[-1][0]), float(estimate[-1][1])) if estimate else None,
            state_bytes=_MIB * sum(map(float, _STATES.findall(text))),
        )

    def types(self) -> tuple[set[str], set[str]]:
        """Return the types of keys and of values of all caches."""
        return {cache.k_type for cache in self.caches}, {cache.v_type for cache in self.caches}


@dataclass(frozen=True)
class PerplexityTool:
    """A ``llama-perplexity`` that starts and can write probabilities.

    ``help``: what ``--help`` printed, by which flags are known; ``version``: what ``--version`` printed.
    """

    engine: ClassVar[str] = "llamacpp"  # whose programs they are
    path: Path
    help: str = field(repr=False)
    version: str

    @classmethod
    def find(cls, folder: str | Path) -> PerplexityTool:
        """Find the program in a folder of llama.cpp's programs, or in a build folder, and ask it.

        Raises:
            InputError: If there is none, it does not start, or it is too old.  The message says what to do.
        """
        place = expand(folder)
        names = (PROGRAM, f"{PROGRAM}.exe")
        own = [place] if place.is_file() else [place / below / name for below in _BELOW for name in names]
        path = next((path for path in own if path.is_file()), None)
        if path is None:
            what = "does not exist" if not place.exists() else f"holds no {PROGRAM}"
            raise InputError(
                f"--bin {folder}: the folder {what}; name the folder of llama.cpp's programs, such as build/bin"
            )
        text, said = asked_program(path, "--help"), asked_program(path, "--version")
        for flag, lacks in _NEEDED.items():
            if flag not in text:
                raise InputError(f"{path} {lacks}: it is too old; build or fetch llama.cpp of this year")
        version = re.search(r"version: (.+)", said)
        return cls(path, text, version[1].strip() if version else "unknown")

    @cached_property
    def build(self) -> str:
        """Return a digest of the program and the libraries next to it: names, sizes and times of change."""
        files = [self.path, *(file for file in sorted(self.path.parent.iterdir()) if _is_library(file))]
        return digest(*(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files))[:16]

    def has(self, flag: str) -> bool:
        """Return whether the help names a flag, such as ``--n-gpu-layers``."""
        return has_flag(self.help, flag)

    def cache_types(self) -> tuple[str, ...]:
        """Return the types that the help names for keys; empty if it names none."""
        found = re.search(r"--cache-type-k\b.*?(?:allowed values|options)?:\s*([a-z0-9_,\s]+?)\s*\(", self.help, re.S)
        return tuple(re.findall(r"[a-z][a-z0-9_]+", found[1])) if found else ()

    def check_kv(self, kv: KVSpec) -> None:
        """Refuse a type of keys or values that this build does not know.

        Raises:
            UsageError: The message lists the types, the nearest first.
        """
        known = self.cache_types()
        for side in (kv.k, kv.v):
            if side.options:
                raise UsageError(f"--kv {kv.label}: llama.cpp's types have no options; write {side.name}")
            if known and side.name not in known:
                listed = ", ".join(nearest_first(side.name, known))
                raise UsageError(
                    f"--kv {kv.label}: this llama-perplexity has no cache type {side.name!r}; it has {listed}"
                )

    def flags(self, options: Mapping[str, str]) -> list[str]:
        """Return engine options as flags of the program: ``n-gpu-layers=9`` → ``--n-gpu-layers 9``, ``yes`` → a switch.

        Raises:
            UsageError: If the program has no such flag, or it is one that the comparison sets.
        """
        words: list[str] = []
        for name, value in options.items():
            if name in _TAKEN:
                raise UsageError(f"--engine-arg {name}: the comparison sets it; {_TAKEN[name]}")
            if name in _SECRETS:
                raise UsageError(f"--engine-arg {name}: a secret, which no report may hold; set it in the environment")
            flag = next((flag for flag in (f"--{name}", f"-{name}") if self.has(flag)), None)
            if value == "no" and self.has(f"--no-{name}"):
                words.append(f"--no-{name}")
            elif flag is None:
                near = nearest_first(name, sorted(set(re.findall(r"--([a-z][\w-]+)", self.help))))[:3]
                raise UsageError(
                    f"--engine-arg {name}: {self.path.name} has no flag --{name}; nearest: {', '.join(near)}"
                )
            elif value == "yes" and not re.search(rf"{re.escape(flag)}\b[^\n]*?\[on", self.help):
                words.append(flag)
            else:
                words += [flag, on_off_values(value)]
        return words

    def command(
        self,
        model: str | Path,
        text: Path,
        base: Path,
        kv: KVSpec,
        *,
        n_ctx: int,
        windows: int,
        threads: int | None = None,
        options: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Return the command that reads ``windows`` windows of ``n_ctx`` tokens and writes their rows to ``base``.

        >>> tool.command("m.gguf", Path("t.txt"), Path("b.kld"), KVSpec.parse("q8_0"), n_ctx=512, windows=8)
        ['llama-perplexity', '-m', 'm.gguf', '-f', 't.txt', '-c', '512', …]
        """
        own = self.flags(options or {})
        words = [str(self.path), "-m", str(model), "-f", str(text), "-c", str(n_ctx), "--chunks", str(windows)]
        words += ["-ctk", kv.k.name, "-ctv", kv.v.name]
        if not {"-fa", "--flash-attn"} & {*own}:  # values can be quantized with it alone, so all arms have it
            words += ["-fa", "on"] if re.search(r"--flash-attn\s+[\[{<]?(?:on|FA\b)", self.help) else ["-fa"]
        if self.has("--no-escape"):  # else a text's \n becomes a line break in older versions
            words.append("--no-escape")
        if _LOG_INFO.search(self.help):  # newer versions print what the library says from the level below on
            words += ["-lv", "4"]
        words += [] if threads is None else ["-t", str(threads)]
        return [*words, *own, "--kl-divergence-base", str(base)]


@contextmanager
def running(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None, out: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command whose output goes to a log after the command itself; end it where the block ends early.

    ``out``: a file for its standard output alone.

    Raises:
        InputError: If it cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as told, (log if out is None else out).open("ab" if out is None else "wb") as printed:
        told.write(f"$ {shell_line(*command)}\n".encode())
        told.flush()
        try:
            process = subprocess.Popen(
                [*command],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=told,
                env=None if env is None else {**env},
            )
        except OSError as error:
            raise InputError(f"{command[0]} cannot be started: {error.strerror or error}") from error
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def own_server(arm: Arm, folder: Path, n_ctx: int | None = None) -> list[str]:
    """Return the command of the ``llama-server`` next to the program, with a configuration's types and options.

    ``n_ctx``: tokens of its context; ``None``: the program's own default.
    """
    program = next((path for path in sorted(folder.glob("llama-server*")) if path.is_file()), folder / "llama-server")
    words = [str(program), "-m", arm.path, "-ctk", arm.kv.k.name, "-ctv", arm.kv.v.name]
    words += [] if n_ctx is None else ["-c", str(n_ctx)]
    options = dict(arm.options)
    words += [] if {"flash-attn", "fa"} & {*options} else ["-fa", "on"]
    for name, value in options.items():
        dashes = "--" if len(name) > 3 else "-"
        words += (
            [f"{dashes}{name}"] if value == "yes" else [f"--no-{name}"] if value == "no" else [f"{dashes}{name}", value]
        )
    return words


def reason_of(log: str, code: int, program: str = PROGRAM) -> str:
    """Return in one line why a program ended, from the last lines of its log that name an error."""
    lines = [_PREFIX.sub("", line).strip() for line in log.splitlines()]
    lines = [line for line in lines if line and not line.startswith("$ ")]
    told = [line for line in lines if _ERRORS.search(line)]
    last = (told or lines)[-2:] if told or lines else []
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"{program} {ended}" + (f": {'; '.join(line[:160] for line in last)}" if last else "")


def has_flag(text: str, flag: str) -> bool:
    """Return whether a program's help names a flag, such as ``--n-gpu-layers``."""
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text) is not None


def on_off_values(value: str) -> str:
    """Return ``on`` for ``yes`` and ``off`` for ``no``; other values stay."""
    return {"yes": "on", "no": "off"}.get(value, value)


def asked_program(path: Path, flag: str) -> str:
    """Return what a program prints for ``--help`` or ``--version``.

    Raises:
        InputError: If it does not start.
    """
    try:
        found = subprocess.run(
            [str(path), flag], stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"{path} {flag} did not end within {_ASK_SECONDS:g} s") from None
    except OSError as error:
        raise InputError(f"{path} cannot be started: {error.strerror or error}") from None
    text = (found.stdout + found.stderr).decode("utf-8", "replace")
    if flag == "--help" and "--" not in text:
        last = [line for line in text.splitlines() if line.strip()][-1:]
        why = last[0].strip()[:200] if last else f"exit code {found.returncode}"
        raise InputError(f"{path} does not start: {why}")
    return text


def _is_library(file: Path) -> bool:
    return file.is_file() and any(suffix in _LIBRARIES for suffix in file.suffixes)
