"""A text, and the windows of token ids that are cut from it. See docs/metrics.md#windows-and-contexts."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from fidelab.captures.requests import Tokens
from fidelab.core.errors import InputError, UsageError
from fidelab.inputs.texts import Text
from fidelab.inputs.tokens import Tokenizer

_MIN_CONTEXT = 8  # tokens that a shorter window is worth

Protocol = Literal["half", "full", "sliding"]
Place = Literal["spread", "start"]


@dataclass(frozen=True)
class WindowSet:
    """Windows of one length, and which rows of them are scored.

    ``windows``: token ids, each n_ctx long, the first id replaced by BOS where ``bos``.  Rows ``first`` …
    ``last`` (inclusive) are scored; the row of position i predicts the token at i + 1.  ``units``: for each
    window the resampling cluster of each scored row: the number of the document that the predicted token is in
    (``unit`` is ``document``), or of a block of adjacent windows (``block``).
    """

    windows: tuple[Tokens, ...]
    first: int
    last: int
    units: tuple[Tokens, ...]
    unit: Literal["document", "block"]
    protocol: Protocol
    place: Place
    n_ctx: int
    stride: int
    bos: bool
    text: str


def make_windows(
    tokenizer: Tokenizer,
    text: Text,
    n_ctx: int,
    n_windows: int,
    protocol: Protocol = "half",
    stride: int | None = None,
    place: Place | None = None,
) -> WindowSet:
    """Tokenise the whole text once and cut windows from it.

    ``half``: rows n_ctx/2 … n_ctx − 2 are scored; ``full``: rows 1 … n_ctx − 2; ``sliding``: windows begin every
    ``stride`` (default n_ctx/4) tokens and every row 0 … n_ctx − 1 is scored.  The last of these predicts a token
    outside its window, which a divergence does not need; users of the actual next token must leave that row out.

    ``place``, of windows that do not overlap: ``start``: window i is tokens i·n_ctx … (i+1)·n_ctx − 1, as llama.cpp's
    perplexity tool does; ``spread`` (the default): over the whole text.  Windows then begin where documents do, one to
    a document, evenly spread over those that reach into the scored rows; then there are second windows of long
    documents, then windows over short ones.  If the text has fewer of these places than windows, or no documents,
    windows are evenly spaced.

    Blocks of windows are ∛n_windows long (Hall, Horowitz & Jing, Biometrika 82, 1995), and no shorter than the number
    of windows that share a token.

    Raises:
        InputError: If the text is too short (the message says how many tokens are needed).
        UsageError: If a size is impossible, or beyond the model's limit.
    """
    step, place = _step(protocol, n_ctx, stride), _place(protocol, place)
    _check_sizes(tokenizer, n_ctx, n_windows, step)
    by_document = bool(text.doc_starts) and tokenizer.offsets
    ids, starts = tokenizer.encode_with_offsets(text.content) if by_document else (tokenizer.encode(text.content), ())
    needed = (n_windows - 1) * step + n_ctx
    if len(ids) < needed:
        raise InputError(
            f"text {text.name} has {len(ids)} tokens, but {n_windows} windows of n_ctx {n_ctx} need {needed}: "
            f"{_remedy(len(ids), n_ctx, needed)}"
        )
    first, last = _rows(protocol, n_ctx)
    begins: Sequence[int] = range(0, n_windows * step, step)
    if place == "spread":
        documents = [bisect.bisect_left(starts, start) for start in text.doc_starts] if by_document else []
        begins = _spread(_slots(documents, len(ids), n_ctx, first + 1), len(ids), n_ctx, n_windows)
    bos = () if tokenizer.bos_id is None else (tokenizer.bos_id,)
    if by_document:
        # the document of each predicted token; beyond the text its last document
        ends = (range(begin + first + 1, begin + last + 2) for begin in begins)
        predicted = ((starts[min(row, len(starts) - 1)] for row in rows) for rows in ends)
        units = tuple(tuple(bisect.bisect_right(text.doc_starts, start) for start in window) for window in predicted)
    else:
        block = max(1, round(n_windows ** (1 / 3)), n_ctx // step)
        units = tuple((i // block,) * (last - first + 1) for i in range(n_windows))
    return WindowSet(
        windows=tuple((*bos, *ids[begin + len(bos) : begin + n_ctx]) for begin in begins),
        first=first,
        last=last,
        units=units,
        unit="document" if by_document else "block",
        protocol=protocol,
        place=place,
        n_ctx=n_ctx,
        stride=step,
        bos=bool(bos),
        text=text.name,
    )


def _remedy(have: int, n_ctx: int, needed: int) -> str:
    """Return advice for a text of ``have`` tokens: fewer windows, but only if one of them fits."""
    if have >= n_ctx:
        return "use fewer --windows or a longer text"
    times = f"about {math.ceil(needed / have)} times more text" if have else "a text that is not empty"
    fits = 1 << max(have // 2, 1).bit_length() - 1  # two windows
    return f"use {times}, or --n-ctx {fits}" if fits >= _MIN_CONTEXT else f"use {times}"


def _step(protocol: Protocol, n_ctx: int, stride: int | None) -> int:
    if protocol not in get_args(Protocol):
        raise UsageError(f"unknown protocol {protocol!r}: write {', '.join(get_args(Protocol))}")
    if protocol == "sliding":
        return n_ctx // 4 if stride is None else stride
    if stride not in (None, n_ctx):
        raise UsageError(f"protocol {protocol} has windows that do not overlap: --stride is for protocol sliding")
    return n_ctx


def _place(protocol: Protocol, place: Place | None) -> Place:
    if place not in (None, *get_args(Place)):
        raise UsageError(f"unknown place {place!r}: write {' or '.join(get_args(Place))}")
    if protocol != "sliding":
        return place or "spread"
    if place == "spread":
        raise UsageError("protocol sliding has windows that overlap, from the start of the text: leave out place")
    return "start"


def _slots(documents: Sequence[int], n_tokens: int, n_ctx: int, scored: int) -> dict[int, int]:
    """Places for windows that do not overlap: first token → rank, the lowest first.

    ``documents``: the first token of each; ``scored``: how far into a window the first predicted token is.  Rank: which
    window of its document it is; those of documents that end before that token come after all others.
    """
    ranks: dict[int, int] = {}
    free = 0
    for begin, end in pairwise([*documents, n_tokens]):
        at = max(begin, free)
        if end - at <= scored or (at > begin and end - at < n_ctx):
            continue  # too short, or cut short by a window that reaches into it
        for number in range(max(1, (end - at) // n_ctx)):
            if at + n_ctx <= n_tokens:
                ranks[at] = number
                at = free = at + n_ctx
    last = max(ranks.values(), default=0) + 1
    for taken, until in pairwise([-n_ctx, *ranks, n_tokens]):
        free = taken + n_ctx
        for begin in documents[bisect.bisect_left(documents, free) : bisect.bisect_right(documents, until - n_ctx)]:
            if begin >= free:
                ranks[begin] = last
                free = begin + n_ctx
    return ranks


def _spread(ranks: Mapping[int, int], n_tokens: int, n_ctx: int, n: int) -> list[int]:
    """The first tokens of ``n`` windows: the lowest ranks whole, of the last one as many as are lacking."""
    if len(ranks) < n:
        return [i * (n_tokens - n_ctx) // max(1, n - 1) for i in range(n)]
    chosen: list[int] = []
    by_rank: dict[int, list[int]] = {}
    for at, rank in sorted(ranks.items()):
        by_rank.setdefault(rank, []).append(at)
    for _, places in sorted(by_rank.items()):
        count = min(len(places), n - len(chosen))
        chosen += [places[(2 * i + 1) * len(places) // (2 * count)] for i in range(count)]
    return sorted(chosen)


def _check_sizes(tokenizer: Tokenizer, n_ctx: int, n_windows: int, step: int) -> None:
    if n_ctx < 4:
        raise UsageError(f"n_ctx {n_ctx} leaves nothing to score: at least 4")
    if n_windows < 1:
        raise UsageError(f"{n_windows} windows: at least 1")
    if not 1 <= step <= n_ctx:
        raise UsageError(f"stride {step} with n_ctx {n_ctx}: from 1 to n_ctx, or tokens are left out")
    limit = tokenizer.model.max_positions
    if limit is not None and n_ctx > limit:
        raise UsageError(f"n_ctx {n_ctx} is beyond the limit of {tokenizer.model.name}: at most {limit} positions")


def _rows(protocol: Protocol, n_ctx: int) -> tuple[int, int]:
    match protocol:
        case "half":
            return n_ctx // 2, n_ctx - 2
        case "full":
            return 1, n_ctx - 2
        case "sliding":
            return 0, n_ctx - 1
