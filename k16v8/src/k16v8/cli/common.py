"""Helpers of all commands: flags, lists of numbers, the device, versions, tables."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from k16v8.errors import UnknownNameError, UsageError

Number = TypeVar("Number", int, float)


def add_json(parser: argparse.ArgumentParser) -> None:
    """The flag ``--json``."""
    parser.add_argument("--json", dest="as_json", action="store_true", help="One JSON object on standard output.")


KERNELS = {"attention": "", "weights": "products with 4-bit weights"}
"""Operations of kernels → what they are."""


def add_operations(parser: argparse.ArgumentParser, default: str, known: Mapping[str, str] = KERNELS) -> None:
    """The flag ``--operations``."""
    words = ", ".join(f"{name} ({what})" if what else name for name, what in known.items())
    parser.add_argument("--operations", default=default, help=f"{words}; several with commas. [default: {default}]")


def operations(text: str, known: Mapping[str, str] = KERNELS) -> tuple[str, ...]:
    """``attention,weights`` → its parts.

    Raises:
        UnknownNameError: If there is no such operation.
    """
    for name in text.split(","):
        if name not in known:
            raise UnknownNameError("operation", name, tuple(known))
    return tuple(text.split(","))


def number_type(least: Number, kind: Callable[[str], Number], most: float = math.inf) -> Callable[[str], Number]:
    """The type of a flag that takes a number from ``least`` to ``most``."""

    def number(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text} is not {least} or more" if most == math.inf else f"{text} is not within {least} and {most:g}"
            )
        return value

    return number


def check_device(device: str) -> None:
    """Whether that device is here.

    Raises:
        UsageError: If it is not, or no device has this name.
    """
    import torch

    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device!r}: there are cpu and cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here")


def device_name(device: str) -> str:
    """Name of the device, as results show it."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def parse_numbers(text: str, flag: str) -> tuple[int, ...]:
    """Numbers separated by commas.

    Raises:
        UsageError: If they are not numbers. The message names the flag.
    """
    if not all(part.isdecimal() for part in text.split(",")):
        raise UsageError(f"{flag} {text!r}: write numbers, separated by commas")
    return tuple(map(int, text.split(",")))


def counts(flag: str, text: str) -> tuple[int, ...]:
    """``128,1k`` → (128, 1024).

    Raises:
        UsageError: If a part is not a number above 0. The message names the flag.
    """
    found = []
    for part in text.lower().split(","):
        digits, thousand = part.strip().removesuffix("k"), part.strip().endswith("k")
        if not (digits.isascii() and digits.isdigit() and int(digits) >= 1):
            raise UsageError(f"{flag} {text!r}: write numbers above 0, separated by commas, as in 128,1k")
        found.append(int(digits) * (1024 if thousand else 1))
    return tuple(found)


def versions() -> dict[str, str | None]:
    """Versions of the packages that make kernels; None where one is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    import k16v8

    def of(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {"k16v8": k16v8.__version__, "torch": of("torch"), "triton": of("triton")}


def finite(figures: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity, which broken kernels give: null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}


def note(text: str) -> None:
    """A line for the person, never for a pipe."""
    print(f"k16v8: {text}", file=sys.stderr)


def show_json(record: Any, indent: int = 2) -> None:
    """One object on standard output."""
    sys.stdout.write(json.dumps(record, indent=indent, allow_nan=False) + "\n")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> str:
    """Columns as wide as their widest cell, a rule under the headings; ``title`` stands above."""
    lines = [list(headings), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head, *body = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join(["", *([title] if title else []), head, rule, *body, ""])
