"""Turn the knobs of decode in the goal cells: which setting of which is fastest, and which change nothing.

One process measures all settings, each in all cells, on pages as engines serve them.  A setting that is launched as
an earlier one was (``launch`` of its result) varies nothing: it is named after that one, and its own time is not used.

::

    python -m k16v8.bench.sweep --output sweep.json        # on a GPU; the file is written after every result
    TRITON_INTERPRET=1 python -m k16v8.bench.sweep --device cpu --geometry tiny --lengths 128 --output sweep.json
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch

from k16v8.bench.contenders import CONTENDERS, Contender
from k16v8.bench.machine import describe, versions
from k16v8.bench.run import Settings, check_device, run_one
from k16v8.bench.session import save
from k16v8.bench.shapes import GOAL_TOKENS, Cell, geometry
from k16v8.errors import K16V8Error, UsageError
from k16v8.kernels.dispatch import load_triton
from k16v8.kernels.knobs import turned

SCHEMA = "k16v8.sweep/0"
# Buffers ahead, programs on a multiprocessor, tiles, and rounds by shorter splits.
KNOBS_TRIED: dict[str, tuple[int, ...]] = {
    "stages": (0, 7),
    "registers": (0, 168),
    "tokens": (0, 32),
    "split_tokens": (0, 2048, 4096, 8192),
}
_GEOMETRIES, _BATCHES, _PAGE = ("qwen2.5-7b", "llama-3.1-8b"), (32, 1), 64


def settings_tried(tried: dict[str, tuple[int, ...]] | None = None) -> Iterator[dict[str, int]]:
    """All combinations of the knobs, the one that turns none first."""
    tried = KNOBS_TRIED if tried is None else tried
    for values in product(*tried.values()):
        yield dict(zip(tried, values, strict=True))


def tried_of(words: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Read what is tried from words such as ``stages=0,7``; :data:`KNOBS_TRIED` of no words.

    Raises:
        UsageError: If a knob does not exist, a value is none of it, or 0, which turns nothing, is not among them.
    """
    tried: dict[str, tuple[int, ...]] = {}
    for word in words:
        name, _, values = word.partition("=")
        if not all(value.isdecimal() for value in values.split(",")):
            raise UsageError(f"--try {word}: write NAME=NUMBER,NUMBER")
        tried[name] = tuple(dict.fromkeys(map(int, values.split(","))))
        if 0 not in tried[name]:
            raise UsageError(f"--try {word}: 0, which turns nothing, is what the others are compared with; add it")
        for value in tried[name]:
            with turned(**{name: value}):
                pass
    return tried or KNOBS_TRIED


def sweep(
    settings: Settings,
    cells: Sequence[Cell],
    pair: str,
    record: dict[str, Any],
    keep: Callable[[], None],
    tried: dict[str, tuple[int, ...]] | None = None,
) -> None:
    """Measure every setting in every cell; ``keep`` is called after each.  Results go to ``record["results"]``.

    ``tried``: knob → values, by default :data:`KNOBS_TRIED`.

    Raises:
        EngineError: If a failure left the device unusable.
    """
    contender = next(one for one in CONTENDERS if (one.name, one.formats) == ("k16v8", pair))
    launched: dict[tuple[str, tuple[tuple[str, int], ...]], int] = {}
    for knobs in settings_tried(tried):
        for cell in cells:
            if time.monotonic() > settings.until:
                record["left_out"] += 1
                continue
            with turned(**knobs):
                found = _one(contender, cell, settings, launched, len(record["results"]))
            record["results"].append({"cell": cell.key, "knobs": knobs, **found})
            record["best"] = best(record["results"])
            keep()
            if found.get("status") in ("failed", "no_memory"):
                check_device(settings.device, f"{knobs} at {cell.key}: {found['reason']}")


def _one(
    contender: Contender,
    cell: Cell,
    settings: Settings,
    launched: dict[tuple[str, tuple[tuple[str, int], ...]], int],
    number: int,
) -> dict[str, Any]:
    result = asdict(run_one(contender, cell, settings))
    key = cell.key, tuple(sorted(result["launch"].items()))
    if result["launch"] and key in launched:
        return {"status": "same", "as": launched[key], "launch": result["launch"]}
    launched[key] = number
    return result


def best(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the setting with the largest mean speed-up over no knob turned, among those right in all their cells.

    ``speedup``: geometric mean over the cells; ``cells``: cell → speed-up.  A launch that equals an earlier one takes
    its time.
    """
    seconds: dict[tuple[str, tuple[tuple[str, int], ...]], float | None] = {}
    for one in results:
        measured = results[one["as"]] if one["status"] == "same" else one
        right = measured["status"] == "measured"
        seconds[one["cell"], tuple(sorted(one["knobs"].items()))] = measured["seconds"] if right else None
    plain = {cell: value for (cell, knobs), value in seconds.items() if not any(v for _, v in knobs)}
    found: dict[str, Any] = {"knobs": {}, "speedup": 1.0, "cells": {}}
    for setting in dict.fromkeys(knobs for _, knobs in seconds):
        ratios = {}
        for cell, base in plain.items():
            mine = seconds.get((cell, setting))
            if base and mine:
                ratios[cell] = base / mine
        if len(ratios) < len(plain) or not ratios:
            continue
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        if mean > found["speedup"]:
            found = {"knobs": {name: value for name, value in setting if value}, "speedup": mean, "cells": ratios}
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 where a setting gave wrong numbers, 2 where nothing can be asked here."""
    parser = argparse.ArgumentParser(prog="python -m k16v8.bench.sweep", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with Triton's interpreter. [default: cuda]")
    parser.add_argument("--geometry", default=",".join(_GEOMETRIES), help="[default: qwen2.5-7b,llama-3.1-8b]")
    parser.add_argument("--formats", default="16/8", help="K/V bits. [default: 16/8]")
    parser.add_argument("--batch", default=",".join(map(str, _BATCHES)), help="Sequences. [default: 32,1]")
    parser.add_argument("--lengths", default=str(GOAL_TOKENS), help=f"Tokens of each. [default: {GOAL_TOKENS}]")
    parser.add_argument("--page", type=int, default=_PAGE, help=f"Tokens of a page. [default: {_PAGE}]")
    parser.add_argument(
        "--try",
        action="append",
        default=[],
        dest="tried",
        metavar="NAME=VALUES",
        help=f"A knob and its values, for example merge_stages=0,1. Repeat it. [default: {_shown_knobs()}]",
    )
    parser.add_argument("--seconds", type=float, default=0.02, help="Of each timing. [default: 0.02]")
    parser.add_argument("--minutes", type=float, help="After which nothing more is begun.")
    parser.add_argument("--output", type=Path, required=True, help="The record.")
    options = parser.parse_args(argv)
    began = time.monotonic()
    try:
        if options.device not in ("cuda", "cpu"):
            raise UsageError(f"--device {options.device!r}: there are cpu and cuda")
        tried = tried_of(options.tried)
        if options.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: torch sees no GPU here")
        load_triton(interpret=options.device == "cpu")
        try:
            batches, lengths = ([int(word) for word in text.split(",")] for text in (options.batch, options.lengths))
        except ValueError:
            raise UsageError("--batch and --lengths: write whole numbers, separated by commas") from None
        if wrong := [length for length in lengths if length < 1 or length % options.page]:
            raise UsageError(f"--lengths {wrong[0]}: not a multiple of the page, {options.page} tokens")
        shapes = dict.fromkeys(geometry(name).shape for name in options.geometry.split(","))
        cells = [Cell("decode", shape, batch, tokens, 1, options.page) for batch, tokens, shape in
                 product(batches, lengths, shapes)]  # fmt: skip
        if (("k16v8", options.formats)) not in [(one.name, one.formats) for one in CONTENDERS]:
            raise UsageError(f"--formats {options.formats}: there are 16/16, 16/8 and 8/8")
        device = torch.device(options.device)
        until = math.inf if options.minutes is None else began + 60 * options.minutes
        kernels = "triton" if options.device == "cuda" else "interpreter"
        settings = Settings(device, kernels, tuple(cells), seconds=options.seconds, until=until)
        record: dict[str, Any] = {
            "schema": SCHEMA,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": describe(device),
            "versions": versions(),
            "formats": options.formats,
            "page": options.page,
            "tried": tried,
            "left_out": 0,
            "best": {},
            "results": [],
        }
        sweep(settings, cells, options.formats, record, lambda: save(options.output, record), tried)
    except K16V8Error as error:
        print(f"k16v8: {error}", file=sys.stderr)
        return 2
    print(_shown(record))
    return 1 if any(one["status"] == "wrong" for one in record["results"]) else 0


def _shown_knobs() -> str:
    return " ".join(f"{name}={','.join(map(str, values))}" for name, values in KNOBS_TRIED.items())


def _shown(record: dict[str, Any]) -> str:
    counts: dict[str, int] = {}
    for one in record["results"]:
        counts[one["status"]] = counts.get(one["status"], 0) + 1
    told = ", ".join(f"{n} {status}" for status, n in counts.items())
    knobs = ", ".join(f"{name} {value}" for name, value in record["best"].get("knobs", {}).items()) or "none turned"
    left = f"; {record['left_out']} left out: time was over" if record["left_out"] else ""
    return f"{told}{left}; best: {knobs}, {record['best'].get('speedup', 1):.3f}×"


if __name__ == "__main__":
    raise SystemExit(main())
