"""Sizes, lengths and times as people write them: ``24GiB``, ``32k``, ``1h30m``.  Shares are in :mod:`core.share`."""

from __future__ import annotations

import math
import re

from fidelab.core.errors import UsageError

_SIZE = re.compile(
    r"(?P<number>[0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*(?:(?P<unit>[kmgt])(?P<binary>i?))?b?", re.IGNORECASE
)
_TOKENS = re.compile(r"(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?)\s*(?P<unit>[km]?)", re.IGNORECASE)
_TIME_PART = r"([0-9]*\.?[0-9]+)\s*(us|ms|seconds?|secs?|s|minutes?|mins?|m|hours?|hrs?|h|days?|d)?\s*"
_SECONDS = {"u": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_bytes(text: str) -> float:
    """Parse a size in bytes: ``80G`` or ``80GB`` (10^9), ``80GiB`` (2^30), ``24e9``.

    Raises:
        UsageError: If the text is not a size above 0.
    """
    match = _SIZE.fullmatch(text.strip())
    size = 0.0
    if match is not None:
        power = " kmgt".index((match["unit"] or " ").lower())
        size = float(match["number"]) * float((1024 if match["binary"] else 1000) ** power)
    if not 0 < size < math.inf:
        raise UsageError(f"{text!r} is not a size; write 80G (10^9), 80GiB (2^30) or a number of bytes")
    return size


def parse_tokens(text: str, least: int = 1) -> int:
    """Parse a length in tokens: ``32768``, ``32,768`` or ``32k``, where k is 1,024 and m 1,048,576.

    Raises:
        ValueError: If the text is not a whole number of tokens from ``least`` on.
    """
    match = _TOKENS.fullmatch(text.strip())
    tokens = (
        float(match["number"].replace(",", "")) * 1024 ** " km".index(match["unit"].lower() or " ") if match else -1.0
    )
    if tokens < least or tokens % 1:
        raise ValueError(f"{text!r} is not a length; write tokens such as 32768 or 32k")
    return int(tokens)


def parse_counts(text: str, least: int = 1) -> tuple[int, ...]:
    """Parse a list of numbers: ``128,1k`` becomes (128, 1024).

    Raises:
        ValueError: If a part is not a whole number from ``least`` on.
    """
    try:
        return tuple(parse_tokens(part, least) for part in text.split(","))
    except ValueError:
        above = " above 0" if least else ""
        raise ValueError(f"{text!r}: write numbers{above}, separated by commas, as in 128,1k") from None


def parse_seconds(text: str) -> float:
    """Parse a time: ``90`` (seconds), ``90s``, ``10m``, ``1h30m``, ``10ms``.

    Raises:
        ValueError: If the text is not a time above 0.
    """
    plain = text.strip().lower()
    total = 0.0
    if re.fullmatch(f"(?:{_TIME_PART})+", plain):
        parts = re.findall(_TIME_PART, plain)
        if len(parts) == 1 or all(unit for _, unit in parts):
            total = sum(float(number) * _seconds_of(unit) for number, unit in parts)
    if not 0 < total < math.inf:
        raise ValueError(f"{text!r} is not a time; write seconds, or a time such as 90s, 10m or 1h30m")
    return total


def _seconds_of(unit: str) -> float:
    return _SECONDS["ms" if unit == "ms" else unit[:1] or "s"]
