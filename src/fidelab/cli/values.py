"""Values of options that people write in several ways, each read by one parser: lengths, times, sizes, nats.

A parser is given to typer as ``parser=``.  :class:`fidelab.cli.commands.Commands` adds the option's name to its errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fidelab.core.amounts import parse_counts, parse_seconds, parse_tokens
from fidelab.core.errors import UsageError


def tokens(value: Any) -> Any:
    """Return a length in tokens: ``32k`` is 32,768."""
    return _read(parse_tokens, value)


def token_lengths(value: Any) -> Any:
    """Return a length in tokens, or of ``512,2k`` a list."""
    lengths = _read(parse_counts, value)
    return lengths[0] if isinstance(lengths, tuple) and len(lengths) == 1 else lengths


def seconds(value: Any) -> Any:
    """Return seconds: ``1h30m`` is 5,400."""
    return _read(parse_seconds, value)


def nats(value: Any) -> Any:
    """Return a divergence in nats, which is not a share."""
    return _read(_nats, value)


def _nats(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        share = text.strip().removesuffix("%")
        example = "0.01"
        if share != text.strip() and share.replace(".", "", 1).isdigit() and float(share) > 0:
            example = f"{float(share) / 100:g}"
        raise ValueError(f"{text!r}: KLD is in nats, not a share: write {example}") from None


def _read(parse: Callable[[str], Any], value: Any) -> Any:
    if not isinstance(value, str):  # a default
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise UsageError(str(error)) from None


def named(parser: Callable[[Any], Any], flag: str) -> Callable[[Any], Any]:
    """Return the parser with the option's name in its errors."""

    def read(value: Any) -> Any:
        try:
            return parser(value)
        except UsageError as error:
            raise UsageError(f"{flag} {error}") from None

    return read
