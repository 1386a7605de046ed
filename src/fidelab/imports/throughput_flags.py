"""Flags with figures on recorded throughput, by the checks of ``metrics.consistency``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fidelab.metrics.consistency import (
    DEPTH,
    GREW,
    MANY_TOKENS,
    TOLERANCE,
    agree,
    closed_loop_rate,
    flat_stretch,
    is_counter,
    token_rate,
)
from fidelab.results.measurement import Flag

__all__ = [
    "INVALID",
    "check_closed_loop",
    "check_counter",
    "check_depth",
    "check_flat",
    "check_server",
    "check_tokens",
    "check_tpot",
    "check_twice",
]

INVALID: Final = frozenset({"depth", "inconsistent", "stream-events", "underfilled"})
"""Kinds of flags with which a cell's figures must not be used."""

Flags = tuple[Flag, ...]


def check_depth(context: int | None, counted: float | None, *, requested: bool = False) -> Flags:
    """``depth`` where prompts were more than 5% longer or shorter than the context they stand for.

    ``requested``: the shorter length is what a client asked for, not what a server counted.
    """
    if not context or counted is None or agree(counted, context, DEPTH):
        return ()
    how = "requested, and nothing counted them" if requested else "counted"
    return (
        Flag(
            kind="depth",
            text=f"stands for a context of {context:,} tokens, but prompts of {counted:,.0f} were {how} "
            f"({counted / context:.2f}× the depth)",
        ),
    )


def check_closed_loop(
    rate: float | None, concurrency: int, tpot: float | None, ttft: float | None, n: int | None
) -> Flags:
    """``inconsistent`` where a rate is not what so many streams with these latencies make."""
    if rate is None or tpot is None:
        return ()
    derived = closed_loop_rate(concurrency, tpot, ttft, n)
    if agree(rate, derived):
        return ()
    streams = "1 stream" if concurrency == 1 else f"{concurrency} streams"
    known = ttft is not None and n is not None
    of = f" of {n} tokens with TTFT {ttft:.4g} ms and" if known else " with"
    makes = "make" if concurrency > 1 else "makes"
    bound = "" if known else " at most" if rate > derived else ", if no time goes into first tokens"
    return (
        _inconsistent(
            f"{rate:.1f} tok/s at C = {concurrency}, but {streams}{of} TPOT {tpot:.4g} ms {makes} {derived:.1f}{bound}"
        ),
    )


def check_tpot(rate: float | None, tpot: float | None) -> Flags:
    """``inconsistent`` where a decode rate is not 1000 / TPOT."""
    if rate is None or tpot is None or agree(rate, 1000 / tpot):
        return ()
    return (_inconsistent(f"{rate:.1f} tok/s, but TPOT {tpot:.4g} ms is {1000 / tpot:.1f}"),)


def check_tokens(rate: float | None, tokens: float | None, seconds: float | None, what: str = "tokens") -> Flags:
    """``inconsistent`` where a rate is not tokens over seconds."""
    if rate is None or tokens is None or seconds is None or agree(rate, token_rate(tokens, seconds)):
        return ()
    derived = token_rate(tokens, seconds)
    return (_inconsistent(f"{tokens:,.0f} {what} in {seconds:.4g} s are {derived:.1f} tok/s, not {rate:.1f}"),)


def check_server(client: float | None, server: float | None, *, speculation: bool) -> Flags:
    """``server-mismatch`` where the client's rate is not 0.9–1.1 of the server's; ``stream-events`` where it lies so
    far below, with speculation on, that the client must have counted events."""
    if client is None or server is None or agree(client, server):
        return ()
    figures = f"{client:.1f} tok/s by the client's count is {client / server:.2f} of the server's {server:.1f}"
    if speculation and client < MANY_TOKENS * server:
        text = f"{figures}: speculation was on, and stream events, which hold several tokens each, were counted"
        return (Flag(kind="stream-events", text=text),)
    return (Flag(kind="server-mismatch", text=figures),)


def check_counter(values: Sequence[float], name: str) -> Flags:
    """``inconsistent`` where a field that should hold a share holds a running count."""
    if not is_counter(values):
        return ()
    ends = (
        f"{values[0]:,.6g}"
        if len(values) == 1
        else f"{values[0]:,.6g} in the first row and {values[-1]:,.6g} in the last"
    )
    return (_inconsistent(f"{name} holds {ends}: a running count, not a share of drafts"),)


def check_flat(lengths: Sequence[float], rates: Sequence[float], *, verified: bool, recorded: bool = True) -> Flags:
    """``inconsistent`` where decode is flat over 16× the length and no server counted the lengths (``verified``);
    ``depth`` where no length was even ``recorded`` beside the context."""
    stretch = None if verified else flat_stretch(lengths, rates)
    if stretch is None:
        return ()
    low, high = stretch
    text = (
        f"decode is flat (within {TOLERANCE:.0%}) from {low:,.0f} to {high:,.0f} tokens, {high / low:.0f}× the length "
        f"(suspicious from {GREW:.0f}× on), and no server counted the prompts"
    )
    return (_inconsistent(text) if recorded else Flag(kind="depth", text=text),)


def check_twice(rate: float, other: float, where: str, source: str) -> Flags:
    """``inconsistent`` where another source gives another figure for the same thing."""
    if agree(rate, other) or agree(other, rate):
        return ()
    return (_inconsistent(f"{rate:.1f} tok/s {where}, but {source} says {other:.1f} for the same model and machine"),)


def _inconsistent(text: str) -> Flag:
    return Flag(kind="inconsistent", text=text)
