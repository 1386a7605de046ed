"""The user's own ``llama-bench``: finding it beside ``llama-perplexity``, its command, and the rates that it prints."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fidelab.core import KVSpec
from fidelab.core.errors import InputError
from fidelab.core.waiting import wait_for
from fidelab.engines.llamacpp.perplexity import asked_program, has_flag, on_off_values, reason_of, running

PROGRAM = "llama-bench"
_NEEDED = ("--n-depth", "--output")


@dataclass(frozen=True)
class BenchRates:
    """Rates of one test: tokens per second of each repetition, and what ran.

    ``n_prompt``, ``n_gen``: tokens that were read, and written one by one; ``depth``: tokens in the cache before them.
    """

    rates: tuple[float, ...]
    n_prompt: int
    n_gen: int
    depth: int
    k: str
    v: str
    threads: int
    cpu: str
    gpu: str
    build: str


@dataclass(frozen=True)
class BenchTool:
    """A ``llama-bench`` that starts and measures at a depth.  ``help``: what ``--help`` printed."""

    path: Path
    help: str = field(repr=False)

    @classmethod
    def beside(cls, perplexity: Path) -> BenchTool:
        """Find the program in the folder of a ``llama-perplexity``, and ask it.

        Raises:
            InputError: If it is not there, does not start, or is too old.
        """
        path = perplexity.with_name(PROGRAM + perplexity.suffix)
        if not path.is_file():
            raise InputError(f"{perplexity.parent} holds no {path.name}, which measures tokens per second; build it")
        text = asked_program(path, "--help")
        if missing := next((flag for flag in _NEEDED if not has_flag(text, flag)), None):
            raise InputError(f"{path} has no {missing}: it is too old; build or fetch llama.cpp of this year")
        return cls(path, text)

    def flags(self, options: Mapping[str, str]) -> list[str]:
        """Return engine options of ``llama-perplexity`` as flags of this program.

        Raises:
            InputError: If it has no such flag: its rate would be that of another configuration.
        """
        words: list[str] = []
        for name, value in options.items():
            flag = next((flag for flag in (f"--{name}", f"-{name}") if has_flag(self.help, flag)), None)
            if flag is None:
                raise InputError(f"{PROGRAM} has no --{name}, so that it cannot measure this configuration's speed")
            words += [flag, self._value(flag, value)]
        return words

    def _value(self, flag: str, value: str) -> str:
        """Return a switch's value as the program writes it: 0 and 1, or on and off."""
        digits = re.search(rf"(?<![\w-]){re.escape(flag)}\b[^\n]*?<0\|1>", self.help) is not None
        numbers = {"yes": "1", "on": "1", "no": "0", "off": "0"}
        return numbers.get(value, value) if digits else on_off_values(value)

    def command(
        self,
        model: str | Path,
        *,
        kv: KVSpec | None = None,
        n_prompt: int = 0,
        n_gen: int = 0,
        depth: int = 0,
        repeats: int = 3,
        threads: int | None = None,
        cpu: bool = False,
        options: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Return the command that times ``n_prompt`` read tokens and ``n_gen`` written ones, each by itself.

        ``cpu``: without any GPU, also where the build has one.

        >>> tool.command("m.gguf", n_gen=32, depth=512)
        ['llama-bench', '-m', 'm.gguf', '-p', '0', '-n', '32', '-d', '512', '-r', '3', '-fa', 'on', '-o', 'json']

        Raises:
            InputError: As :meth:`flags`.
        """
        own = dict(options or {})
        words = [str(self.path), "-m", str(model), "-p", str(n_prompt), "-n", str(n_gen), "-d", str(depth)]
        words += ["-r", str(repeats)]
        if kv is not None:
            words += ["-ctk", kv.k.name, "-ctv", kv.v.name]
        if not {"fa", "flash-attn"} & {*own}:  # as llama-perplexity is started
            words += ["-fa", self._value("--flash-attn", "on")]
        words += [] if threads is None else ["-t", str(threads)]
        if cpu:
            words += ["-dev", "none"] if has_flag(self.help, "-dev") else ["-ngl", "0"]
        return [*words, *self.flags(own), "-o", "json"]


def timed(command: Sequence[str], log: Path, out: Path, env: Mapping[str, str] | None = None) -> list[BenchRates]:
    """Run a command of :meth:`BenchTool.command`, and return its rates; ``out`` keeps what it printed.

    Raises:
        InputError: If it cannot be started, ends with an error, or prints no rates.  The message names the log.
    """
    with running(command, log, env, out) as process:
        wait_for(process)
    if process.returncode:
        said = reason_of(log.read_text("utf-8", "replace"), process.returncode, PROGRAM)
        raise InputError(f"{said}; its log is {log}")
    return read_rates(out.read_text("utf-8", "replace"))


def read_rates(text: str) -> list[BenchRates]:
    """Read what ``llama-bench -o json`` printed.

    Raises:
        InputError: If it is not such an output, or holds no rate.
    """
    try:
        tests = json.loads(text)
        found = [_rates(test) for test in tests]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{PROGRAM} printed no rates: {type(error).__name__}") from None
    if not found:
        raise InputError(f"{PROGRAM} printed no rates")
    return found


def _rates(test: Mapping[str, Any]) -> BenchRates:
    rates = tuple(float(rate) for rate in test["samples_ts"])
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise ValueError("no rate above 0")
    build = f"{test.get('build_number', '')} ({test.get('build_commit', '')})"
    return BenchRates(
        rates=rates,
        n_prompt=int(test["n_prompt"]),
        n_gen=int(test["n_gen"]),
        depth=int(test["n_depth"]),
        k=str(test["type_k"]),
        v=str(test["type_v"]),
        threads=int(test["n_threads"]),
        cpu=str(test.get("cpu_info") or ""),
        gpu=str(test.get("gpu_info") or ""),
        build=build,
    )
