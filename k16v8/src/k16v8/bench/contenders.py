"""Measured kernels: k16v8's, those of torch and of installed libraries, and two naive ways to read FP8 values.

Each contender builds its inputs itself, N(0, 1) in its own layout, and gives a function that attends to them.  Pages
lie in random order, as in engines; contenders that take no pages get contiguous keys and values, their best case.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from k16v8.bench.shapes import Cell, Kind, WeightCell, formats
from k16v8.errors import NotSupportedError, one_line
from k16v8.kernels.cache import FLOAT8, PagedCache, codes_to_values, storage
from k16v8.kernels.dispatch import Kernels, choose
from k16v8.kernels.knobs import KNOBS
from k16v8.kernels.prefill import PrefillBatch
from k16v8.kernels.reference import Attention
from k16v8.plugins.shared import attend_prompts, prompt_route

Role = Literal["ours", "variant", "rival", "naive"]  # of our contenders, only what is served decides goals
_ATTENTION: tuple[Kind, ...] = ("decode", "extend")
FLASH = ("flash-attn-2", "flash-attn-3", "flash-attn-3 paged", "sdpa-flash")  # implementations of FlashAttention
# Compute capability → kind of cell → rivals of which one must be measured, or no goal is judged there: what engines run
# on it, and what torch brings along, which is the faster one in decode.
REQUIRED: dict[str, dict[Kind, tuple[str, ...]]] = {
    "9.0": {  # XQA is compiled by nvcc, which pip has not
        "decode": ("sdpa-cudnn", "flash-attn-3", "flash-attn-3 paged"),
        "extend": ("flash-attn-3", "flash-attn-3 paged"),
    },
}

_DTYPE = torch.bfloat16
_COLUMNS, _ROWS = 512, 8  # of a product that are checked, at most, at each of two places
_CHUNK = 1 << 26  # numbers drawn at a time where they are converted
_WORKSPACE = 256 << 20  # of FlashInfer, bytes
_VLLM, _SGL = "vllm.vllm_flash_attn", "sgl_kernel.flash_attn"
_FA3 = (_VLLM, _SGL, "flash_attn_interface")  # in the order in which they are taken
_NO_BACKEND = ("no viable backend", "no available kernel")  # what torch says where it has none for these inputs


class Draw:
    """Source of random tensors on one device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        """Draw N(0, 1), bfloat16."""
        return torch.empty(shape, dtype=_DTYPE, device=self.device).normal_(generator=self.generator)

    def stored(self, name: str, *shape: int) -> Tensor:
        """Draw N(0, 1) as a cache of this format holds it, without a scale. No value is near the range of e4m3."""
        if not storage(name).quantized:
            return self.normal(*shape)
        codes = torch.empty(math.prod(shape), dtype=FLOAT8[name], device=self.device)
        for first in range(0, len(codes), _CHUNK):
            part = codes[first : first + _CHUNK]
            part.copy_(self.normal(len(part)))
        return codes.view(storage(name).dtype).view(shape)

    def random_words(self, *shape: int) -> Tensor:
        """Draw random bits, int32."""
        info = torch.iinfo(torch.int32)
        return torch.randint(
            info.min, info.max + 1, shape, dtype=torch.int32, device=self.device, generator=self.generator
        )

    def permutation(self, n: int) -> Tensor:
        """Draw 0 … n - 1 in random order, int32."""
        return torch.randperm(n, generator=self.generator, device=self.device).int()


@dataclass(frozen=True)
class Work:
    """Set of inputs for attention.

    ``call`` attends; ``tokens`` makes ``[B * Q, heads, D]`` of what it returned; ``q`` has that shape.  ``head``: keys
    and values, float64 ``[T, D]``, of a sequence and KV head.  ``kernel``: what ran, for the record; ``launch``: how
    our decode ran (:func:`launch_record`).
    """

    call: Callable[[], Tensor]
    q: Tensor
    head: Callable[[int, int], tuple[Tensor, Tensor]]
    tokens: Callable[[Tensor], Tensor]
    kernel: str
    launch: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WeightWork:
    """Set of inputs for a product.

    ``call`` multiplies and returns ``[rows, N]`` or ``[T, top, N]``; ``dense``: weights in float64 ``[K, columns]`` of
    an expert (0 for a linear layer) and some columns; ``experts`` ``[T, top]``; ``kernel``: what ran, for the record.
    """

    call: Callable[[], Tensor]
    x: Tensor
    dense: Callable[[int, slice], Tensor]
    experts: Tensor | None
    kernel: str

    def error(self, out: Tensor, outputs: int, some: Callable[[int, int], list[int]]) -> float:
        """Relative L2 of the worst row among some, over the last columns and others; NaN where any value is.

        ``some``: the last of so many numbers, and others, at most so many.
        """
        shape = self.x.shape[:1] if self.experts is None else self.experts.shape
        if out.shape != (*shape, outputs) or not bool(out.isfinite().all()):
            return math.nan
        worst = 0.0
        for block in some(-(-outputs // _COLUMNS), 2):
            columns = slice(block * _COLUMNS, min((block + 1) * _COLUMNS, outputs))
            for row in some(shape[0], _ROWS):
                chosen = [0] if self.experts is None else self.experts[row].tolist()
                for place, expert in enumerate(chosen):
                    exact = self.x[row].double() @ self.dense(expert, columns)
                    found = (out[row] if self.experts is None else out[row, place])[columns].double()
                    worst = max(worst, ((found - exact).norm() / exact.norm()).item())
        return worst


class Prepare(Protocol):
    def __call__(self, cell: Any, pair: str, draw: Draw, /, *, kernels: str) -> Work | WeightWork:
        """Build the inputs of a cell.  ``kernels``: which implementation of k16v8.

        Raises:
            NotSupportedError: If this contender cannot do it here. The message gives the reason.
        """
        ...


@dataclass(frozen=True)
class Contender:
    """``formats``: of the cache or the weights that it reads; ``kinds``: of cells that it can be measured at.

    ``scratch``: further bytes that it needs for each cache, per value of V, or for each set of weights, per weight.
    """

    name: str
    formats: str
    role: Role
    prepare: Prepare
    kinds: tuple[Kind, ...] = _ATTENTION
    scratch: int = 0

    def bytes_needed(self, cell: Cell | WeightCell) -> int:
        """Return the memory for one set of inputs: cache or weights, scratch, and ample room for the other tensors."""
        if isinstance(cell, WeightCell):
            inputs, outputs, _ = cell.shape
            stack = cell.held_bytes(self.formats) * max(1, cell.experts) // cell.active
            return stack + self.scratch * inputs * outputs + 64 * cell.batch * (inputs + cell.top * outputs)
        heads, kv_heads, dim = cell.shape
        values = cell.batch * cell.tokens * kv_heads * dim
        return cell.held_bytes(self.formats) + self.scratch * values + 64 * cell.batch * cell.queries * heads * dim


def _k16v8_work(cell: Cell, pair: str, draw: Draw, *, kernels: str, served: bool = True) -> Work:
    """``served``: pages as the plug-ins for engines have them, heads first; else tokens first."""
    held = _paged(cell, pair, draw, heads_first=served)
    attending = _attending(cell, held, draw, kernels)
    return Work(attending.call, attending.q, partial(_paged_head, held), _identity, attending.name, attending.launch)


def _unpack(cell: Cell, pair: str, draw: Draw, *, kernels: str) -> Work:
    """The values decoded to pages of 16 bits in memory, then our 16-bit kernel."""
    held = _paged(cell, pair, draw)
    wide = replace(held, v_cache=torch.empty_like(held.v_cache, dtype=_DTYPE), v_format="bf16")
    codes = held.v_cache.view(FLOAT8[held.v_format])
    attending = _attending(cell, wide, draw, kernels)

    def call() -> Tensor:
        wide.v_cache.copy_(codes)
        return attending.call()

    name = f"copy to bfloat16, {attending.name}"
    return Work(call, attending.q, partial(_paged_head, held), _identity, name, attending.launch)


@dataclass(frozen=True)
class _Attending:
    """Queries, the call that attends, the kernel's name, and how it is launched."""

    q: Tensor
    call: Callable[[], Tensor]
    name: str
    launch: dict[str, int] = field(default_factory=dict)


def _attending(cell: Cell, held: PagedCache, draw: Draw, kernels: str) -> _Attending:
    heads, kv_heads, dim = cell.shape
    chosen: Kernels = choose(
        kernels,
        k_format=held.k_format,
        v_format=held.v_format,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        page=cell.page,
        dtype=_DTYPE,
        device=draw.device,
    )
    q = draw.normal(cell.batch * cell.queries, heads, dim)
    out = torch.full_like(q, math.nan)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=draw.device)
    if cell.kind == "decode":
        plan = chosen.plan(cell.batch, heads, held, split_tokens=KNOBS.split_tokens)
        # one list serves all layers of a step: engines write it once
        work = plan.schedule(held) if hasattr(plan, "schedule") else None
        return _Attending(
            q,
            lambda: chosen.decode(q, held, out=out, lse=lse, plan=plan, work=work)[0],
            chosen.name,
            {} if work is None else launch_record(held, plan, work),
        )
    starts = torch.arange(cell.batch + 1, dtype=torch.int32, device=draw.device) * cell.queries
    prompts = PrefillBatch([cell.tokens] * cell.batch, [cell.queries] * cell.batch, held.block_table)

    def extend() -> Tensor:
        attend_prompts(chosen, q, starts, held, Attention(), out, prompts)
        return out

    return _Attending(q, extend, f"{chosen.name}, {prompt_route(chosen, q, held, Attention(), prompts)}")


def launch_record(held: PagedCache, plan: Any, work: Tensor) -> dict[str, int]:
    """How decode is launched: two settings with equal records are one setting, and vary nothing.

    ``tokens``, ``warps``, ``stages``, ``registers`` (0: as the compiler likes) of a program; ``split``: tokens of a
    split; ``programs`` that have work, and ``slots`` of the device for them; ``rounds``: of programs on the slots;
    ``merge_stages``: 0 where no sequence is split.
    """
    from k16v8.kernels.decode import merge_stages
    from k16v8.kernels.launch import target_of, tiles

    tile = tiles("decode", target_of(held.k_cache.device), held)
    items = int(work[0, 0])
    longest = -(-int(held.lengths.max()) // tile.tokens)
    split = min(int(work[1, 3]), longest) * tile.tokens  # one that is longer than a sequence is the whole sequence
    programs = items * held.kv_heads
    return {
        "tokens": tile.tokens,
        "warps": tile.warps,
        "stages": tile.stages,
        "registers": tile.registers,
        "split": split,
        "programs": programs,
        "slots": int(plan.slots),
        "rounds": -(-programs // int(plan.slots)),
        # of the loop that merges splits, which runs where a sequence has several
        "merge_stages": merge_stages() if items > held.lengths.numel() else 0,
    }


def _paged(cell: Cell, pair: str, draw: Draw, *, heads_first: bool = False) -> PagedCache:
    """A cache of random numbers.  ``heads_first``: in each page, a head's keys and then its values in one run."""
    names = formats(pair)
    pages = cell.batch * cell.tokens // cell.page
    shape = pages, cell.page, cell.shape[1], cell.shape[2]
    if heads_first:
        k_cache, v_cache = _heads_first(shape, names, draw)
    else:
        k_cache, v_cache = (draw.stored(name, *shape) for name in names)
    lengths = torch.full((cell.batch,), cell.tokens, dtype=torch.int32, device=draw.device)
    return PagedCache(k_cache, v_cache, draw.permutation(pages).view(cell.batch, -1), lengths, *names)


def _heads_first(shape: tuple[int, int, int, int], names: Sequence[str], draw: Draw) -> list[Tensor]:
    """Pages of random numbers as the plug-in for vLLM has them."""
    pages, page, heads, dim = shape
    sides = served_pages(shape, names, draw.device)
    step = max(1, _CHUNK // (page * heads * dim))
    for side, name in zip(sides, names, strict=True):
        for at in range(0, pages, step):
            some = side[at : at + step]
            some.copy_(draw.stored(name, *some.shape))
    return sides


def served_pages(shape: tuple[int, int, int, int], names: Sequence[str], device: torch.device) -> list[Tensor]:
    """Return zeros for keys and values as the plug-in for vLLM has them: in a page, a head's keys, then its values.

    Args:
        shape: Pages, tokens of a page, heads, head dimension.
        names: The formats of keys and of values.
        device: Where they lie.

    Returns:
        Two views ``[pages, tokens, heads, D]`` of one tensor.
    """
    pages, page, heads, dim = shape
    sizes = [page * dim * storage(name).dtype.itemsize for name in names]
    run = torch.zeros(pages, heads, sum(sizes), dtype=torch.uint8, device=device)
    return [
        part.view(storage(name).dtype).view(pages, heads, page, dim).transpose(1, 2)
        for name, part in zip(names, (run[..., : sizes[0]], run[..., sizes[0] :]), strict=True)
    ]


def _paged_head(held: PagedCache, sequence: int, head: int) -> tuple[Tensor, Tensor]:
    blocks = held.block_table[sequence].long()
    keys, values = (
        codes_to_values(codes[blocks, :, head], name).double().flatten(0, 1)
        for codes, name in ((held.k_cache, held.k_format), (held.v_cache, held.v_format))
    )
    return keys, values


def _identity(out: Tensor) -> Tensor:
    return out


def _lower_right(cell: Cell) -> Any:
    from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler: as long as torch itself

    return causal_lower_right(cell.queries, cell.tokens)


def _sdpa(cell: Cell, pair: str, draw: Draw, *, kernels: str, backend: SDPBackend) -> Work:
    q, k = _dense(cell, draw)
    v = draw.normal(*k.shape)
    mask: Any = None
    if cell.queries > 1:
        by_name = q.is_cuda and backend is SDPBackend.FLASH_ATTENTION  # takes no mask but this one
        mask = _lower_right(cell) if by_name else _causal_mask(cell, draw.device)

    def call() -> Tensor:
        try:
            with sdpa_kernel(backend), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # why each of the other back ends does not serve
                return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        except RuntimeError as error:
            if any(text in str(error).lower() for text in _NO_BACKEND):
                raise NotSupportedError(f"torch has no such back end for this on {draw.device.type}") from error
            raise

    return Work(call, _tokens(q), partial(_dense_head, k, v), _tokens, f"torch {torch.__version__}, {backend.name}")


def _eager(cell: Cell, pair: str, draw: Draw, *, kernels: str) -> Work:
    """Values dequantized to 16 bits by torch, then whatever attention torch chooses."""
    q, k = _dense(cell, draw)
    codes = draw.stored("fp8_e4m3", *k.shape)

    def call() -> Tensor:
        v = codes.view(FLOAT8["fp8_e4m3"]).to(_DTYPE)
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def head(sequence: int, kv_head: int) -> tuple[Tensor, Tensor]:
        return k[sequence, kv_head].double(), codes_to_values(codes[sequence, kv_head], "fp8_e4m3").double()

    return Work(call, _tokens(q), head, _tokens, f"torch {torch.__version__}, its own choice")


def _dense(cell: Cell, draw: Draw) -> tuple[Tensor, Tensor]:
    """Queries ``[B, heads, Q, D]`` and keys ``[B, kv_heads, T, D]``."""
    heads, kv_heads, dim = cell.shape
    return draw.normal(cell.batch, heads, cell.queries, dim), draw.normal(cell.batch, kv_heads, cell.tokens, dim)


def _dense_head(k: Tensor, v: Tensor, sequence: int, head: int) -> tuple[Tensor, Tensor]:
    return k[sequence, head].double(), v[sequence, head].double()


def _tokens(x: Tensor) -> Tensor:
    """``[B, heads, Q, D]`` → ``[B * Q, heads, D]``."""
    return x.transpose(1, 2).flatten(0, 1)


def _causal_mask(cell: Cell, device: torch.device) -> Tensor:
    at = torch.arange(cell.tokens, device=device)
    return at <= at[-cell.queries :, None]


def _flash_attn_2(cell: Cell, pair: str, draw: Draw, *, kernels: str) -> Work:
    library = _library("flash_attn", "FlashAttention 2", draw.device)
    q, k, v, lengths = _contiguous(cell, draw)

    def call() -> Tensor:
        returned = library.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
        out: Tensor = returned[0] if isinstance(returned, tuple) else returned  # versions differ
        return out

    head = partial(_dense_head, k.transpose(1, 2), v.transpose(1, 2))
    return Work(call, q.flatten(0, 1), head, _flat, "FlashAttention 2, contiguous")


def _contiguous(cell: Cell, draw: Draw) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries ``[B, Q, heads, D]``, keys and values ``[B, T, kv_heads, D]``, lengths int32 ``[B]``."""
    heads, kv_heads, dim = cell.shape
    q = draw.normal(cell.batch, cell.queries, heads, dim)
    k, v = (draw.normal(cell.batch, cell.tokens, kv_heads, dim) for _ in "kv")
    return q, k, v, torch.full((cell.batch,), cell.tokens, dtype=torch.int32, device=draw.device)


def flash_attention_3(device: torch.device) -> str:
    """Return the name of the module whose FlashAttention 3 is measured: that of vLLM's wheel before all others.

    Raises:
        NotSupportedError: If none is installed, or none runs on this device. The message gives the reason of each.
    """
    found, reasons = {}, []
    for name in _FA3:
        try:
            found[name] = import_module(name)
        except ModuleNotFoundError:
            continue
        except (ImportError, OSError, RuntimeError) as error:  # built for another torch or CUDA
            reasons.append(f"{name} cannot be imported: {one_line(error)}")
    if not found:
        missing = "FlashAttention 3 is not installed (vLLM's CUDA wheel and sglang-kernel have it)"
        raise NotSupportedError("; ".join(reasons) or missing)
    if device.type != "cuda":
        raise NotSupportedError("FlashAttention 3 is for GPUs")
    for name, library in found.items():
        if name == _VLLM and (reason := _vllm_refusal(library)):
            reasons.append(f"{name} has no FlashAttention 3 here: {reason}")
        elif name == _SGL and not library.is_fa3_supported(device):
            reasons.append(f"{name} has FlashAttention 3 for compute capability 9.0 alone")
        else:
            return name
    raise NotSupportedError("; ".join(reasons))


def _vllm_refusal(library: Any) -> str:
    """Reason why vLLM's FlashAttention 3 does not run here; it asks vLLM's platform, parts of which may not load."""
    try:
        return "" if library.is_fa_version_supported(3) else str(library.fa_version_unsupported_reason(3))
    except (ImportError, OSError, RuntimeError) as error:
        return one_line(error)


def _flash_attn_3(cell: Cell, pair: str, draw: Draw, *, kernels: str, paged: bool) -> Work:
    module = flash_attention_3(draw.device)
    layout = f"pages of {cell.page}" if paged else "contiguous"
    if paged:
        held = _paged(cell, pair, draw)
        q = draw.normal(cell.batch, cell.queries, cell.shape[0], cell.shape[2])
        call = flash_attention_3_call(
            module, q, held.k_cache, held.v_cache, held.lengths, cell.tokens, held.block_table
        )
        head = partial(_paged_head, held)
    else:
        q, k, v, lengths = _contiguous(cell, draw)
        call = flash_attention_3_call(module, q, k, v, lengths, cell.tokens)
        head = partial(_dense_head, k.transpose(1, 2), v.transpose(1, 2))
    return Work(call, q.flatten(0, 1), head, _flat, f"FlashAttention 3 of {module.partition('.')[0]}, {layout}")


def flash_attention_3_call(
    module: str, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, tokens: int, table: Tensor | None = None
) -> Callable[[], Tensor]:
    """Return the call of one library: causal attention of the last queries of each sequence.

    Args:
        module: Of :func:`flash_attention_3`.
        q: ``[B, Q, heads, D]``.
        k: ``[B, T, kv_heads, D]``, or pages ``[blocks, page, kv_heads, D]``.
        v: As ``k``.
        lengths: Tokens of each sequence, int32 ``[B]``.
        tokens: Of the longest sequence.
        table: Pages of each sequence, int32 ``[B, blocks of a sequence]``; ``None`` for contiguous keys and values.

    Returns:
        A function whose result is ``[B, Q, heads, D]`` or ``[B * Q, heads, D]``.
    """
    library = import_module(module)
    if module != _VLLM:
        pages = {} if table is None else {"page_table": table}

        def with_cache() -> Tensor:
            returned = library.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, **pages)
            out: Tensor = returned[0] if isinstance(returned, tuple) else returned  # versions differ
            return out

        return with_cache
    batch, queries = q.shape[:2]
    steps = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    flat = q.flatten(0, 1)
    if table is None:
        keys, values, where = k.flatten(0, 1), v.flatten(0, 1), {"cu_seqlens_k": steps * tokens}
    else:
        keys, values, where = k, v, {"block_table": table, "seqused_k": lengths}
    fixed = {"max_seqlen_q": queries, "cu_seqlens_q": steps * queries, "max_seqlen_k": tokens}

    def of_vllm() -> Tensor:
        out: Tensor = library.flash_attn_varlen_func(flat, keys, values, **fixed, **where, causal=True, fa_version=3)
        return out

    return of_vllm


def _xqa(cell: Cell, pair: str, draw: Draw, *, kernels: str) -> Work:
    """Kernel of FlashInfer's ``auto`` on Hopper for TensorRT-LLM's decode."""
    library = _library("flashinfer.decode", "FlashInfer", draw.device)
    held = _paged(cell, pair, draw)
    q = draw.normal(cell.batch, cell.shape[0], cell.shape[2])
    out = torch.full_like(q, math.nan)
    scratch = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=draw.device)  # its semaphores begin at 0
    store, scale = (held.k_cache, held.v_cache), cell.shape[2] ** -0.5

    def call() -> Tensor:
        found: Tensor = library.xqa_batch_decode_with_kv_cache(
            q, store, scratch, held.block_table, held.lengths, cell.tokens, bmm1_scale=scale, out=out
        )
        return found

    return Work(call, q, partial(_paged_head, held), _identity, f"FlashInfer XQA, pages of {cell.page}")


def _flashinfer(cell: Cell, pair: str, draw: Draw, *, kernels: str) -> Work:
    library = _library("flashinfer", "FlashInfer", draw.device)
    held = _paged(cell, pair, draw)
    q = draw.normal(cell.batch * cell.queries, cell.shape[0], cell.shape[2])
    out = torch.full_like(q, math.nan)
    pages = held.block_table.shape[1]
    steps = torch.arange(cell.batch + 1, dtype=torch.int32, device=draw.device)
    table = (steps * pages, held.block_table.flatten(), torch.full_like(held.lengths, cell.page))
    sizes = (*cell.shape, cell.page)
    store = tuple(x.view(FLOAT8[held.k_format]) if pair == "8/8" else x for x in (held.k_cache, held.v_cache))
    types = {"q_data_type": _DTYPE, "kv_data_type": store[0].dtype}
    if cell.kind == "decode":
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(_workspace(draw.device), "NHD", use_tensor_cores=True)
        wrapper.plan(*table, *sizes, **types)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(_workspace(draw.device), "NHD")
        wrapper.plan(steps * cell.queries, *table, *sizes, causal=True, **types)

    def call() -> Tensor:
        found: Tensor = wrapper.run(q, store, out=out)
        return found

    return Work(call, q, partial(_paged_head, held), _identity, f"FlashInfer, pages of {cell.page}")


def _flat(x: Tensor) -> Tensor:
    """``[B, Q, heads, D]`` or ``[B * Q, heads, D]`` → ``[B * Q, heads, D]``."""
    return x.flatten(0, -3)


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)


def _library(module: str, title: str, device: torch.device) -> Any:
    try:
        library = import_module(module)
    except ImportError as error:
        raise NotSupportedError(f"{title} is not installed") from error
    if device.type != "cuda":
        raise NotSupportedError(f"{title} is for GPUs")
    return library


CONTENDERS = (
    Contender("k16v8", "16/16", "ours", _k16v8_work),
    Contender("k16v8", "16/8", "ours", _k16v8_work),
    Contender("k16v8", "8/8", "ours", _k16v8_work),
    Contender("k16v8, tokens first", "16/16", "variant", partial(_k16v8_work, served=False), ("decode",)),
    Contender("k16v8, tokens first", "16/8", "variant", partial(_k16v8_work, served=False), ("decode",)),
    Contender("k16v8, tokens first", "8/8", "variant", partial(_k16v8_work, served=False), ("decode",)),
    Contender("sdpa-flash", "16/16", "rival", partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION)),
    Contender("sdpa-efficient", "16/16", "rival", partial(_sdpa, backend=SDPBackend.EFFICIENT_ATTENTION)),
    Contender("sdpa-cudnn", "16/16", "rival", partial(_sdpa, backend=SDPBackend.CUDNN_ATTENTION)),
    Contender("flash-attn-2", "16/16", "rival", _flash_attn_2),
    Contender("flash-attn-3", "16/16", "rival", partial(_flash_attn_3, paged=False)),
    Contender("flash-attn-3 paged", "16/16", "rival", partial(_flash_attn_3, paged=True)),
    Contender("xqa", "16/16", "rival", _xqa, ("decode",)),
    Contender("flashinfer", "16/16", "rival", _flashinfer),
    Contender("flashinfer", "8/8", "rival", _flashinfer),
    Contender("unpack, then k16v8", "16/8", "naive", _unpack, ("decode",), scratch=2),
    Contender("eager, then sdpa", "16/8", "naive", _eager, ("decode",), scratch=4),
)
