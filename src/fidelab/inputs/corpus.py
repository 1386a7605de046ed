"""A text, and the windows of token ids that are cut from it. See docs/metrics/distributions.md#windows-and-contexts."""

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

Protocol = Literal["half", "full", "sliding"]  # of windows of one length
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


@dataclass(frozen=True)
class DepthSet:
    """Documents of different lengths, and which rows of each are scored at which depth.

    ``windows``: token ids of a document from its beginning, as many as the deepest of the contexts that it reaches.
    ``positions``: for each window the scored rows, rising; ``units``: their resampling clusters.  ``contexts``: those
    that any document reaches; ``unit`` as in :class:`WindowSet`.
    """

    windows: tuple[Tokens, ...]
    positions: tuple[Tokens, ...]
    units: tuple[Tokens, ...]
    unit: Literal["document", "block"]
    contexts: tuple[int, ...]

    def reaching(self, n_ctx: int) -> int:
        """Return the number of windows that reach a context."""
        return sum(len(window) >= n_ctx for window in self.windows)


def depths_to(longest: int) -> tuple[int, ...]:
    """Return the contexts by doubling from 1,024 tokens to the longest one, which is the last.

    Example:
        >>> depths_to(8192)
        (1024, 2048, 4096, 8192)
    """
    halves = [longest]
    while halves[-1] >= 2 * _SHALLOWEST:
        halves.append(halves[-1] // 2)
    return tuple(reversed(halves))


def depth_positions(contexts: Sequence[int], n_rows: int) -> Tokens:
    """Return the rows of a window that are scored: ``n_rows`` evenly spread over n/2 … n - 2 of each context n.

    A context with fewer rows has all of them.
    """
    found: list[int] = []
    for n_ctx in contexts:
        begin, end = n_ctx // 2, n_ctx - 1
        count = min(n_rows, end - begin)
        found += [begin + (2 * i + 1) * (end - begin) // (2 * count) for i in range(count)]
    return tuple(found)


def make_depths(tokenizer: Tokenizer, text: Text, contexts: Sequence[int], n_windows: int, n_rows: int) -> DepthSet:
    """Take documents from their beginning, so that ``n_windows`` of them reach each context, as far as the text allows.

    A document that reaches a context reaches the shorter ones, too: one prefill gives the rows of all depths.  Where
    too few are long enough, further ones are taken for the shorter contexts alone.  Kinds of text take turns.  Within
    a kind, documents are spread over the text.  Windows are in the order in which they were chosen: those of a smaller
    ``n_windows`` are among those of a larger one.

    A text without documents is cut into windows of the longest context that it holds ``n_windows`` times, or of the
    shortest one, evenly spread.  Their clusters are blocks of ∛n adjacent windows (Hall, Horowitz & Jing, Biometrika
    82, 1995).

    Args:
        contexts: rising, each at least twice the one before; see :func:`depths_to`.
        n_windows: documents per context.
        n_rows: scored rows per document and context.

    Raises:
        InputError: If no document reaches the shortest context.
        UsageError: If the contexts overlap.
    """
    if any(2 * a > b for a, b in pairwise(contexts)):
        raise UsageError(
            f"n_ctx {', '.join(map(str, contexts))}: at protocol depth each is at least twice the one before"
        )
    bos = () if tokenizer.bos_id is None else (tokenizer.bos_id,)
    if text.doc_starts:
        chosen = _choose(_Documents(tokenizer, text, len(bos)), contexts, n_windows)
        unit: Literal["document", "block"] = "document"
    else:
        chosen = _blocks(tokenizer.encode(text.content), contexts, n_windows, len(bos))
        unit = "block"
    if not chosen:
        raise InputError(
            f"text {text.name} has no document of {contexts[0]:,} tokens: take a shorter --n-ctx or a longer text"
        )
    positions = [depth_positions([n for n in contexts if n <= size], n_rows) for _, _, size in chosen]
    return DepthSet(
        windows=tuple((*bos, *ids[: size - len(bos)]) for _, ids, size in chosen),
        positions=tuple(positions),
        units=tuple((number,) * len(own) for (number, _, _), own in zip(chosen, positions, strict=True)),
        unit=unit,
        contexts=tuple(n for n in contexts if any(size >= n for _, _, size in chosen)),
    )


_Chosen = list[tuple[int, Tokens, int]]  # the number of a cluster, its first tokens, and the context that it reaches


class _Documents:
    """The documents of a text, whose tokens are computed when they are needed."""

    def __init__(self, tokenizer: Tokenizer, text: Text, n_bos: int) -> None:
        self._tokenizer, self._n_bos = tokenizer, n_bos
        ends = (*text.doc_starts[1:], len(text.content))
        self._contents = [text.content[a:b] for a, b in zip(text.doc_starts, ends, strict=True)]
        self._known: dict[int, tuple[Tokens, bool]] = {}
        kinds: dict[str, list[int]] = {}
        for number in range(1, 1 + len(self._contents)):
            kinds.setdefault(text.domain_of(number), []).append(number)
        self.kinds = {kind: [numbers[i] for i in _scattered(len(numbers))] for kind, numbers in kinds.items()}

    def tokens(self, number: int, n: int) -> Tokens | None:
        """Return the first ``n`` tokens of a document, BOS counted; ``None`` if it has fewer."""
        content, wanted = self._contents[number - 1], n - self._n_bos
        if len(content.encode()) < wanted:  # a token is a byte or more
            return None
        ids, whole = self._known.get(number, ((), False))
        if len(ids) < wanted and not whole:
            # The end of a piece may be split into other tokens than within the text: some are left out
            piece = content[: _CHARS_PER_TOKEN * (wanted + _SLACK)]
            ids, whole = tuple(self._tokenizer.encode(piece)), len(piece) == len(content)
            if not whole:
                ids = ids[:-_SLACK]
                if len(ids) < wanted:
                    ids, whole = tuple(self._tokenizer.encode(content)), True
            self._known[number] = (ids, whole)
        return ids if len(ids) >= wanted else None


_SHALLOWEST = 1024  # tokens: the first of the depths
_CHARS_PER_TOKEN = 4  # of a piece that is likely to have the tokens: a miss costs time alone
_SLACK = 16  # tokens


def _scattered(n: int) -> list[int]:
    """The numbers 0 … n - 1 in an order in which all beginnings are spread: bits reversed (van der Corput)."""
    bits = max(1, (n - 1).bit_length())
    return sorted(range(n), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))


def _choose(documents: _Documents, contexts: Sequence[int], n_windows: int) -> _Chosen:
    """Documents for each context, the deepest first; the kind with the fewest documents is next."""
    chosen: _Chosen = []
    counts = dict.fromkeys(documents.kinds, 0)
    left = {kind: list(numbers) for kind, numbers in documents.kinds.items()}
    for n_ctx in reversed(contexts):
        tried = dict.fromkeys(left, 0)  # documents of a kind that are too short are tried once
        while len(chosen) < n_windows and (open_ := [kind for kind in left if tried[kind] < len(left[kind])]):
            kind = min(open_, key=lambda name: counts[name])
            number = left[kind][tried[kind]]
            ids = documents.tokens(number, n_ctx)
            if ids is None:
                tried[kind] += 1
            else:
                left[kind].remove(number)
                counts[kind] += 1
                chosen.append((number, ids, n_ctx))
    return chosen


def _blocks(ids: Tokens, contexts: Sequence[int], n_windows: int, n_bos: int) -> _Chosen:
    """Windows of a text without documents, spread over it."""
    fitting = [n for n in contexts if n <= len(ids)]
    if not fitting:
        return []
    size = next((n for n in reversed(fitting) if n * n_windows <= len(ids)), fitting[-1])
    count = min(n_windows, len(ids) // size)
    block = max(1, round(count ** (1 / 3)))
    begins = [i * (len(ids) - size) // max(1, count - 1) for i in range(count)]
    return [(n // block, ids[begins[n] + n_bos : begins[n] + size], size) for n in _scattered(count)]


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
