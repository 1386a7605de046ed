# mypy: disable-error-code="no-untyped-def, no-untyped-call"
# ruff: noqa: ANN001, ANN201
# Parameters of Triton functions are neither Python values nor tensors: they have no types to write.
"""The work list of a decode step, written on the device: which split of which sequence each program takes.

The host knows no lengths, and a CUDA graph is replayed for other ones, so the grid of decode has a fixed size and
lengths decide on the device what its programs do.  All splits of a step have one length: the one with which the
device's rounds of programs, each as long as one split, end first.

The list is int32 ``[1 + items, 4]``.  Its first row begins with the number of items.  Every other row is one item:
sequence, split, splits of that sequence, and tokens of a split in tiles.  A sequence's items lie together.  A sequence
without tokens has one item, for its output must be zeros.
"""

import triton
import triton.language as tl
from torch import Tensor

from k16v8.kernels.cache import PagedCache
from k16v8.kernels.launch import Target, Tiles, launch, target_of, tiles

ROUNDS = 2  # of programs on the device that a list may have besides one item of each sequence; unmeasured
_MIN_SPLIT_TOKENS = 256  # tokens of a split at least; at most 512, or lengths exceed 32 bits; unmeasured
SCHEDULE_TILE = Tiles(1, 1, 4, 1)


@triton.jit(
    do_not_specialize=["batch", "kv_heads", "slots", "items", "given", "window", "queries"],
    do_not_specialize_on_alignment=["lengths", "work"],
)
def schedule_kernel(
    lengths,
    work,
    batch,
    kv_heads,
    slots,
    items,
    given,
    window,
    queries,
    TOKENS: tl.constexpr,
    SHORTEST: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """One program for each sequence, which all choose the same length of a split: they need not wait for each other."""
    row = tl.program_id(0)
    c = tl.arange(0, 64)
    # 1 to 32 times the shortest; then powers of two, the last of which no sequence exceeds
    each = SHORTEST * tl.where(c < 32, c + 1, 32 << tl.minimum(tl.maximum(c - 31, 0), 16))
    each = tl.where(given > 0, given, each)
    b = tl.arange(0, SEQUENCES)
    total = tl.zeros((64,), tl.int32)
    before = tl.zeros((64,), tl.int32)  # items of the sequences before this one
    longest = tl.full((), 0, tl.int32)
    for at in range(0, batch, SEQUENCES):
        length = tl.load(lengths + at + b, mask=at + b < batch, other=0)
        first = tl.where(window > 0, tl.maximum(length - queries + 1 - window, 0), 0)
        span = length - first // TOKENS * TOKENS
        splits = tl.maximum(tl.cdiv(span[None, :], each[:, None]), 1)
        total += tl.sum(tl.where((at + b < batch)[None, :], splits, 0), 1)
        before += tl.sum(tl.where((at + b < row)[None, :], splits, 0), 1)
        longest = tl.maximum(longest, tl.max(span, 0))
    # A split costs, besides its tokens, a result that is written and read once more: as many bytes as 64 tokens have.
    # Programs do not end together, for multiprocessors share the memory unevenly: the device waits for the last one for
    # a part of a split, which is less where splits are shorter and rounds more.  With a sixteenth, unmeasured, a second
    # round pays where one would have splits of more than 2,048 tokens, and a third where it would have more than 6,144.
    rounds = tl.cdiv(total * kv_heads, slots)
    tokens = tl.minimum(each, longest).to(tl.float32)
    cost = rounds.to(tl.float32) * (tokens + 64) + tokens / 16
    best = tl.argmin(tl.where(total <= items, cost, float("inf")), 0)
    each = tl.sum(tl.where(c == best, each, 0), 0)
    total = tl.sum(tl.where(c == best, total, 0), 0)
    before = tl.sum(tl.where(c == best, before, 0), 0)
    length = tl.load(lengths + row)
    first = tl.where(window > 0, tl.maximum(length - queries + 1 - window, 0), 0)
    splits = tl.maximum(tl.cdiv(length - first // TOKENS * TOKENS, each), 1)
    for at in range(0, splits, SEQUENCES):
        s = at + b
        entry = work + 4 * (1 + before + s)
        tl.store(entry, row + s * 0, mask=s < splits)
        tl.store(entry + 1, s, mask=s < splits)
        tl.store(entry + 2, splits + s * 0, mask=s < splits)
        tl.store(entry + 3, each // TOKENS + s * 0, mask=s < splits)
    if row == 0:
        tl.store(work, total)


def schedule(
    cache: PagedCache, work: Tensor, *, slots: int, split_tokens: int = 0, window: int = 0, queries: int = 1
) -> Tensor:
    """Write the work list of ``cache``'s sequences into ``work``, int32 ``[1 + items, 4]``, and return it.

    ``slots``: programs that the device holds at once.  ``split_tokens``: of a split, a multiple of a tile's tokens with
    which the items suffice; 0: chosen for the lengths.  ``window``: tokens that a query sees, 0 for all.
    ``queries``: of a sequence, at most.  The host does not wait.
    """
    target = target_of(cache.lengths.device)
    launch(
        schedule_kernel,
        (len(cache.lengths),),
        schedule_arguments(cache, work, slots, split_tokens, window, queries),
        schedule_constants(cache, target),
        SCHEDULE_TILE,
        cache.lengths.device,
    )
    return work


def schedule_arguments(
    cache: PagedCache, work: Tensor, slots: int, split_tokens: int, window: int, queries: int
) -> tuple[object, ...]:
    """The arguments of the kernel, in their order."""
    sizes = len(cache.lengths), cache.kv_heads, slots, len(work) - 1
    return cache.lengths, work, *sizes, split_tokens, window, queries


def schedule_constants(cache: PagedCache, target: Target) -> dict[str, object]:
    """The constexprs of the kernel."""
    tokens = tiles("decode", target, cache).tokens
    shortest = tokens if target.backend == "interpreter" else round_tokens(_MIN_SPLIT_TOKENS, tokens)
    return {"TOKENS": tokens, "SHORTEST": shortest, "SEQUENCES": 32}


def round_tokens(tokens: int, tile: int) -> int:
    """``tokens``, rounded up to whole tiles."""
    return -(-tokens // tile) * tile
