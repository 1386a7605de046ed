"""Long prompts: the context is gathered into 16-bit memory, piece by piece, and attended to by a library.

One program of the Triton extend kernel reads codes again for every block of queries; a prompt of thousands of tokens
reads them hundreds of times.  Here keys and dequantized values of a batch lie once in a workspace of bounded size, as
FlashAttention takes them.  Where the context does not fit, it goes through the workspace in chunks, and the parts of a
query's output are joined by their log-sum-exps:

    lse = log(exp(lse_a) + exp(lse_b))      out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

The route of a batch is chosen by a function without side effects, :func:`prefill_route`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache as memoized
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from k16v8.errors import NotSupportedError
from k16v8.kernels import reference
from k16v8.kernels.cache import PagedCache, codes_to_values, scaling_of, storage
from k16v8.kernels.reference import Attention
from k16v8.kernels.upload import upload

Route = Literal["extend", "fa2", "fa3"]
WORKSPACE = 128 << 20
"""Default bytes of the workspace of one device: 32K tokens of 8 KV heads of 128.  Static, unmeasured."""

_JOINED = 64 << 20  # bytes of numbers while parts are joined
_IN_PLACE_QUERIES = (
    128  # queries up to which reading the codes in place is cheaper than writing them out; static, unmeasured
)
_FLASH_DIM = 256
_MODULES = {"fa3": ("flash_attn_interface", "sgl_kernel.flash_attn"), "fa2": ("flash_attn",)}
_VLLM = "vllm.vllm_flash_attn"


# ------------------------------------------------------------------------------------------------------ the choice


@dataclass(frozen=True)
class Libraries:
    """Modules that have ``flash_attn_varlen_func`` of a version and can be imported; empty where there is none."""

    fa3: str = ""
    fa2: str = ""


def prefill_route(
    arch: int | str, libraries: Libraries, *, max_queries: int, cache: PagedCache, dtype: torch.dtype, window: int,
    capacity: int,
) -> Route:  # fmt: skip
    """Plan of attention to the prompts of one batch.

    Args:
        arch: As Triton names it, 90 for sm_90; a string for AMD and CPUs.
        libraries: What is installed.
        max_queries: The longest chunk of a prompt in the batch.
        cache: For its formats and widths.
        dtype: Of queries.
        window: Tokens that a query sees, 0 for all.
        capacity: Tokens that the workspace holds.

    Returns:
        ``extend``, the Triton kernel, for short continuations, for keys in codes (they would be rounded once more),
        where the workspace is too small for a window, and where no library runs; otherwise the library.
    """
    if isinstance(arch, str) or arch < 80 or max_queries <= _IN_PLACE_QUERIES:
        return "extend"
    if storage(cache.k_format).quantized or cache.k_cache.dtype != dtype:
        return "extend"
    if cache.head_dim != cache.v_dim or cache.head_dim > _FLASH_DIM or cache.head_dim % 8:
        return "extend"
    if 2 * window > capacity or not capacity:
        return "extend"
    if libraries.fa3 and arch == 90:
        return "fa3"
    return "fa2" if libraries.fa2 else "extend"


@memoized
def installed() -> Libraries:
    """The libraries that can be imported here; looked for once."""
    found = {}
    for version, modules in _MODULES.items():
        held = _vllm_version(int(version[2]))
        found[version] = held or next((name for name in modules if _importable(name)), "")
    return Libraries(**found)


def _vllm_version(version: int) -> str:
    if find_spec("vllm") is None or not _importable(_VLLM):
        return ""
    try:
        return _VLLM if import_module(_VLLM).is_fa_version_supported(version) else ""
    except (ImportError, OSError, RuntimeError):  # it asks vLLM's platform, another part of which may not load
        return ""


def _importable(name: str) -> bool:
    try:
        return hasattr(import_module(name), "flash_attn_varlen_func")
    except (ImportError, OSError, RuntimeError):  # missing, or built for another torch or CUDA
        return False


# ------------------------------------------------------------------------------------------------------ the plan


@dataclass(frozen=True)
class Piece:
    """Tokens ``begin`` to ``end`` of one sequence's context, and which of its queries see them; all are positions.

    ``causal``: queries whose last one is the token ``end - 1``; ``full``: later queries, which see all of the piece.
    """

    row: int
    begin: int
    end: int
    causal: tuple[int, int]
    full: tuple[int, int]


def capacity(cache: PagedCache, size: int = WORKSPACE) -> int:
    """Return the number of tokens that a workspace of ``size`` bytes holds."""
    return size // (2 * cache.kv_heads * (cache.head_dim + cache.v_dim))


def plan_pieces(lengths: Sequence[int], counts: Sequence[int], window: int, capacity: int) -> list[list[Piece]]:
    """Chunks of at most ``capacity`` tokens, in which every query meets every token that it sees exactly once.

    ``lengths``: tokens of each sequence, ``counts``: of them, the last ones, queries.  With a window a piece has the
    keys of some queries and none are split; without, a query's keys may lie in several chunks.
    """
    chunks: list[list[Piece]] = [[]]
    room = capacity
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        first = length - count
        done = first if window else 0  # of the queries; without a window, of the keys
        while count and done < length:
            begin = max(0, done - window + 1) if window else done
            if length - begin > room and room < capacity:
                chunks.append([])
                room = capacity
            end = min(length, begin + room)
            if window:
                causal, full = (done, end), (end, end)
            else:
                causal, full = (max(begin, min(first, end)), end), (max(end, first), length)
            chunks[-1].append(Piece(row, begin, end, causal, full))
            room -= end - begin
            done = end
    return [chunk for chunk in chunks if chunk]


@dataclass(frozen=True)
class Call:
    """One call of a library over the workspace.  ``rows``: of the queries, a slice where they lie together."""

    rows: slice | Tensor
    causal: bool
    query_starts: Tensor  # int32 [pieces + 1]
    key_starts: Tensor
    max_queries: int
    most_keys: int


@dataclass(frozen=True)
class _Chunk:
    slots: Tensor  # int64, of each token in the workspace
    calls: list[Call]


@dataclass
class PrefillBatch:
    """The sequences of one step, known on the host.  Plans are made once and serve all layers of the step.

    The host waits for nothing: what the device must know of a plan goes there in one copy from pinned memory.
    """

    lengths: Sequence[int]
    counts: Sequence[int]
    table: Tensor  # int32 [B, max_blocks]
    _plans: dict[tuple[int, ...], list[_Chunk]] = field(default_factory=dict)

    @property
    def max_queries(self) -> int:
        """Most queries of one sequence."""
        return max(self.counts, default=0)

    def chunks(self, page: int, window: int, capacity: int) -> list[_Chunk]:
        """The chunks of a layer with such pages and such a window."""
        key = (page, window, capacity)
        if key not in self._plans:
            laid = [self._laid(chunk) for chunk in plan_pieces(self.lengths, self.counts, window, capacity)]
            tensors = iter(upload([numbers for chunk in laid for numbers in chunk.lists], self.table.device))
            self._plans[key] = [self._on_device(chunk, tensors, page) for chunk in laid]
        return self._plans[key]

    def _laid(self, pieces: list[Piece]) -> _Laid:
        starts = [0, *accumulate(self.counts)]
        sizes = [piece.end - piece.begin for piece in pieces]
        key_starts = [0, *accumulate(sizes)]
        offsets = [piece.begin - start for piece, start in zip(pieces, key_starts, strict=False)]
        calls = []
        for causal in (True, False):
            spans = [piece.causal if causal else piece.full for piece in pieces]
            counts = [end - begin for begin, end in spans]
            if not any(counts):
                continue
            places = [
                starts[piece.row] + begin - (self.lengths[piece.row] - self.counts[piece.row])
                for piece, (begin, _) in zip(pieces, spans, strict=True)
            ]
            ranges = [(place, place + count) for place, count in zip(places, counts, strict=True) if count]
            together = all(a[1] == b[0] for a, b in pairwise(ranges))
            rows = slice(ranges[0][0], ranges[-1][1]) if together else [i for span in ranges for i in range(*span)]
            calls.append(_LaidCall(rows, causal, [0, *accumulate(counts)], max(counts)))
        return _Laid(sizes, [piece.row for piece in pieces], offsets, key_starts, calls)

    def _on_device(self, laid: _Laid, tensors: Iterator[Tensor], page: int) -> _Chunk:
        """``tensors``: of ``laid.lists``, in their order."""
        many, rows, offsets, key_starts = (next(tensors) for _ in range(4))
        total = laid.key_starts[-1]
        rows, offsets = (x.long().repeat_interleave(many, output_size=total) for x in (rows, offsets))
        at = torch.arange(total, device=self.table.device) + offsets
        slots = self.table[rows, at // page].long() * page + at % page
        calls = []
        for call in laid.calls:
            query_starts = next(tensors)
            index = call.rows if isinstance(call.rows, slice) else next(tensors).long()
            calls.append(Call(index, call.causal, query_starts, key_starts, call.max_queries, max(laid.sizes)))
        return _Chunk(slots, calls)


@dataclass(frozen=True)
class _LaidCall:
    """A :class:`Call` as the host has it."""

    rows: slice | list[int]
    causal: bool
    query_starts: list[int]
    max_queries: int


@dataclass(frozen=True)
class _Laid:
    """A chunk as the host has it; of each piece: tokens, sequence, and its first token less its place."""

    sizes: list[int]
    rows: list[int]
    offsets: list[int]
    key_starts: list[int]
    calls: list[_LaidCall]

    @property
    def lists(self) -> list[list[int]]:
        """Arrays that the device needs."""
        found = [self.sizes, self.rows, self.offsets, self.key_starts]
        for call in self.calls:
            found.append(call.query_starts)
            if not isinstance(call.rows, slice):
                found.append(call.rows)
        return found


# ------------------------------------------------------------------------------------------------------ the work


Attend = Callable[[Tensor, Tensor, Tensor, Call, float, int, float], tuple[Tensor, Tensor]]
"""``(q, keys, values, call, scale, window, softcap)`` → output ``[N, heads, Dv]`` and log-sum-exp ``[N, heads]``."""

Gather = Callable[[PagedCache, Tensor, Tensor, Tensor], None]
"""``(cache, slots, keys, values)``: fills ``[n, kv_heads, D]`` and ``[n, kv_heads, Dv]``."""


def prefill(
    q: Tensor,
    batch: PrefillBatch,
    cache: PagedCache,
    attention: Attention | None,
    attend: Attend,
    *,
    gather: Gather,
    workspace: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Extend as :func:`k16v8.kernels.torch_path.extend` does, through a workspace.

    ``workspace``: uint8, whose size says how many tokens a chunk has.  Keys and values lie in it in the type of
    queries: keys as they are, values with their scales.

    Raises:
        NotSupportedError: If the workspace holds less than two windows.
    """
    attention = attention or Attention()
    tokens = capacity(cache, workspace.numel())
    if 2 * attention.window > tokens or not tokens:
        raise NotSupportedError(
            f"a workspace of {workspace.numel()} bytes holds {tokens} tokens, a window of {attention.window} takes "
            f"{max(1, 2 * attention.window)}"
        )
    chunks = batch.chunks(cache.page, attention.window, tokens)
    out = q.new_empty(*q.shape[:2], cache.v_dim) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if lse is None else lse
    parts = any(not call.causal for chunk in chunks for call in chunk.calls)
    held = out
    if parts:  # every query has one, and then some
        held = torch.zeros_like(out, dtype=torch.float32)
        lse.fill_(float("-inf"))
    typed, heads = workspace.view(q.dtype), cache.kv_heads
    for chunk in chunks:
        n = len(chunk.slots)
        keys = typed[: n * heads * cache.head_dim].view(n, heads, cache.head_dim)
        values = typed[keys.numel() :][: n * heads * cache.v_dim].view(n, heads, cache.v_dim)
        gather(cache, chunk.slots, keys, values)
        for call in chunk.calls:
            found, log = attend(
                q[call.rows], keys, values, call, attention.scale_for(q.shape[2]), attention.window, attention.softcap
            )
            if not parts:
                held[call.rows], lse[call.rows] = found.to(held.dtype), log
                continue
            step = max(1, _JOINED // (5 * 4 * held[0].numel()))
            for at in range(0, len(found), step):
                rows = _rows(call.rows, at, step)
                held[rows], lse[rows] = _joined(held[rows], lse[rows], found[at : at + step], log[at : at + step])
    if attention.sinks is not None:  # a sink joins the sum last: all else is multiplied by what it leaves over
        joined = torch.logaddexp(lse, attention.sinks)
        held.mul_(torch.exp(lse - joined).unsqueeze(-1))
        lse.copy_(joined)
    if held is not out:
        out.copy_(held)
    return out, lse


def scratch_bytes(queries: int, heads: int, head_dim: int, v_dim: int) -> int:
    """Return the bytes that :func:`prefill` has besides ``out`` and its workspace, for 16-bit queries, at most.

    Those are the float32 sum of parts, one part with its queries, log-sum-exps, and what joining takes.
    """
    numbers = 4 * v_dim + 2 * v_dim + 2 * head_dim + 4 * 4
    return queries * heads * numbers + _JOINED


def _rows(rows: slice | Tensor, at: int, many: int) -> slice | Tensor:
    if isinstance(rows, slice):
        return slice(rows.start + at, min(rows.start + at + many, rows.stop))
    return rows[at : at + many]


def _joined(out: Tensor, lse: Tensor, more: Tensor, log: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.logaddexp(lse, log)
    return out * torch.exp(lse - both).unsqueeze(-1) + more.float() * torch.exp(log - both).unsqueeze(-1), both


def gather(cache: PagedCache, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Gather tokens of a cache as numbers, in torch; as :func:`k16v8.kernels.gather.gather`."""
    block, place = slots // cache.page, slots % cache.page
    for codes, name, scale, found in (
        (cache.k_cache, cache.k_format, cache.k_scale, keys),
        (cache.v_cache, cache.v_format, cache.v_scale, values),
    ):
        numbers = codes_to_values(codes[block, place], name)
        if scale is not None:
            numbers = numbers * (
                scale if scaling_of(scale) == "per-tensor" else scale[block, place].float().unsqueeze(-1)
            )
        found.copy_(numbers)


def torch_attention(
    q: Tensor, keys: Tensor, values: Tensor, call: Call, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """Compute a library's result by the definition, in float32: for tests, and to measure a library's error."""
    out = torch.zeros(*q.shape[:2], values.shape[2], device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
    attention = Attention(scale, window if call.causal else 0, softcap)
    bounds = zip(call.query_starts.tolist(), call.key_starts.tolist(), strict=True)
    for (first, begin), (last, end) in pairwise(bounds):
        positions = torch.arange(last - first, device=q.device) + (end - begin) - (last - first)
        if not call.causal:
            positions.fill_(end - begin)
        if last > first:
            out[first:last], lse[first:last] = reference.attend(
                q[first:last], keys[begin:end].float(), values[begin:end].float(), positions, attention
            )
    return out, lse


@memoized
def library_attention(route: Route, libraries: Libraries) -> Attend:
    """FlashAttention's ``flash_attn_varlen_func`` of the route's version, from the module that was found.

    Its causal mask ends with the last query at the last key, as that of a call here; a window counts the tokens
    before the query's own.

    Raises:
        NotSupportedError: If the module is not there, or its function lacks an argument or a result that is needed.
    """
    module = getattr(libraries, route, "")
    if not module:
        raise NotSupportedError(f"no library for the route {route}")
    function = import_module(module).flash_attn_varlen_func
    fixed = varlen_options(function, module, route)

    def attend(
        q: Tensor, keys: Tensor, values: Tensor, call: Call, scale: float, window: int, softcap: float
    ) -> tuple[Tensor, Tensor]:
        found = function(**varlen_arguments(q, keys, values, call, scale, window, softcap), **fixed)
        if not isinstance(found, tuple) or len(found) < 2 or found[1].shape != (q.shape[1], q.shape[0]):
            raise NotSupportedError(f"{module}.flash_attn_varlen_func gave no log-sum-exp [heads, tokens]")
        return found[0], found[1].transpose(0, 1)

    return attend


def varlen_arguments(
    q: Tensor, keys: Tensor, values: Tensor, call: Call, scale: float, window: int, softcap: float
) -> dict[str, Any]:
    """The arguments that all versions of ``flash_attn_varlen_func`` have in common, by name."""
    return {
        "q": q,
        "k": keys,
        "v": values,
        "cu_seqlens_q": call.query_starts,
        "cu_seqlens_k": call.key_starts,
        "max_seqlen_q": call.max_queries,
        "max_seqlen_k": call.most_keys,
        "softmax_scale": scale,
        "causal": call.causal,
        "window_size": (window - 1, 0) if window and call.causal else (-1, -1),
        "softcap": softcap,
    }


def varlen_options(function: Callable[..., Any], module: str, route: Route) -> dict[str, Any]:
    """Arguments that ask one library for its log-sum-exp, and for the version if it has several.

    Raises:
        NotSupportedError: If it lacks both known names for that, or those of ``varlen_arguments``.
    """
    names = inspect.signature(function).parameters
    common = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "window_size", "softcap")
    if missing := [name for name in common if name not in names]:
        raise NotSupportedError(f"{module}.flash_attn_varlen_func does not take {', '.join(missing)}")
    options: dict[str, Any] = {}
    if "return_softmax_lse" in names:
        options["return_softmax_lse"] = True
    elif "return_attn_probs" in names:
        options["return_attn_probs"] = True
    elif module != "flash_attn_interface":  # whose first versions always return it
        raise NotSupportedError(f"{module}.flash_attn_varlen_func has no argument that asks for the log-sum-exp")
    if "fa_version" in names:
        options["fa_version"] = int(route[2])
    return options
