"""Long prompts by way of a workspace: what is planned, which way is taken, what a library is asked for.

That what is gathered and joined equals the definition in float64 is a gate (``gates/cases.py``, cases ``gather …``).
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from k16v8.errors import NotSupportedError
from k16v8.gates.cases import Case
from k16v8.kernels import prefill as prefills
from k16v8.kernels import reference
from k16v8.kernels.cache import PagedCache
from k16v8.kernels.dispatch import Kernels
from k16v8.kernels.prefill import Libraries, PrefillBatch, plan_pieces, prefill_route, torch_attention
from k16v8.plugins import shared

BOTH = Libraries("flash_attn_interface", "flash_attn")


def _batches() -> Iterator[tuple[list[int], list[int], int, int]]:
    draw = random.Random(0)
    for _ in range(200):
        lengths = [draw.randrange(0, 40) for _ in range(draw.randrange(1, 5))]
        counts = [draw.randrange(0, length + 1) for length in lengths]
        window = draw.choice((0, 0, 1, 3, 8))
        yield lengths, counts, window, draw.randrange(max(1, 2 * window), 60)


def test_every_query_meets_every_token_it_sees_once_and_chunks_fit_the_workspace() -> None:
    for lengths, counts, window, capacity in _batches():
        met: list[tuple[int, int, int]] = []
        for chunk in plan_pieces(lengths, counts, window, capacity):
            assert sum(piece.end - piece.begin for piece in chunk) <= capacity
            for piece in chunk:
                keys = range(piece.begin, piece.end)
                seen = [(q, k) for q in range(*piece.causal) for k in keys if k <= q and (not window or k > q - window)]
                seen += [(q, k) for q in range(*piece.full) for k in keys]
                assert piece.causal[0] == piece.causal[1] or piece.causal[1] == piece.end  # as libraries mask
                met += [(piece.row, *pair) for pair in seen]
        wanted = [
            (row, q, k)
            for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
            for q in range(length - count, length)
            for k in range(max(0, q - window + 1) if window else 0, q + 1)
        ]
        assert sorted(met) == wanted, (lengths, counts, window, capacity)


def test_a_batch_that_fits_is_one_call_over_all_queries_where_they_lie() -> None:
    batch = PrefillBatch([30, 50], [10, 50], torch.zeros(2, 4, dtype=torch.int32))
    (chunk,) = batch.chunks(16, 0, 80)
    (call,) = chunk.calls
    assert (call.rows, call.causal, call.max_queries, call.most_keys) == (slice(0, 60), True, 50, 50)
    assert (call.query_starts.tolist(), call.key_starts.tolist()) == ([0, 10, 60], [0, 30, 80])


def test_layers_of_one_step_share_its_plan() -> None:
    batch = PrefillBatch([30], [10], torch.zeros(1, 2, dtype=torch.int32))
    assert batch.chunks(16, 0, 80) is batch.chunks(16, 0, 80)
    assert batch.chunks(16, 4, 80) is not batch.chunks(16, 0, 80)


def _cache(k: str = "bf16", v: str = "fp8_e4m3", dim: int = 128, v_dim: int | None = None) -> PagedCache:
    return PagedCache.allocate(1, 16, 8, dim, batch=1, max_blocks=1, k_format=k, v_format=v, v_dim=v_dim)


@pytest.mark.parametrize(
    ("arch", "libraries", "queries", "options", "route"),
    [
        (90, BOTH, 8192, {}, "fa3"),
        (90, BOTH, 129, {}, "fa3"),
        (90, BOTH, 128, {}, "extend"),  # a short continuation reads the codes in place
        (90, BOTH, 1, {}, "extend"),
        (90, Libraries(fa2="flash_attn"), 8192, {}, "fa2"),
        (90, Libraries(), 8192, {}, "extend"),
        (80, BOTH, 8192, {}, "fa2"),  # FlashAttention 3 is for sm_90
        (89, BOTH, 8192, {}, "fa2"),
        (100, BOTH, 8192, {}, "fa2"),
        (120, BOTH, 8192, {}, "fa2"),
        (120, Libraries(fa3="x"), 8192, {}, "extend"),
        (75, BOTH, 8192, {}, "extend"),
        ("gfx942", BOTH, 8192, {}, "extend"),
        ("gfx1201", BOTH, 8192, {}, "extend"),
        (90, BOTH, 8192, {"cache": _cache("fp8_e4m3")}, "extend"),  # keys would be rounded once more
        (90, BOTH, 8192, {"cache": _cache(v="int4")}, "fa3"),
        (90, BOTH, 8192, {"cache": _cache("f16")}, "extend"),  # keys and queries are of one type
        (90, BOTH, 8192, {"cache": _cache("f16"), "dtype": torch.float16}, "fa3"),
        (90, BOTH, 8192, {"cache": _cache(dim=128, v_dim=64)}, "extend"),
        (90, BOTH, 8192, {"cache": _cache(dim=256)}, "fa3"),
        (90, BOTH, 8192, {"window": 4096}, "fa3"),
        (90, BOTH, 8192, {"window": 4096, "capacity": 8191}, "extend"),
        (90, BOTH, 8192, {"capacity": 0}, "extend"),
    ],
)
def test_the_way_of_a_batch(
    arch: int | str, libraries: Libraries, queries: int, options: dict[str, Any], route: str
) -> None:
    given: dict[str, Any] = {"cache": _cache(), "dtype": torch.bfloat16, "window": 0, "capacity": 32768} | options
    assert prefill_route(arch, libraries, max_queries=queries, **given) == route


# Signatures as documented: Dao-AILab/flash-attention (hopper/flash_attn_interface.py of 3.0, flash_attn 2.8),
# vLLM 0.32's vllm_flash_attn, sgl_kernel 0.3.  What is asked for by name must be there.
_FA3 = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=0 seqused_k=0 softmax_scale=0 causal=0 qv=0 "
    "q_descale=0 k_descale=0 v_descale=0 window_size=0 attention_chunk=0 softcap=0 num_splits=0 pack_gqa=0 "
    "deterministic=0 sm_margin=0"
)
_FA2 = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p=0 softmax_scale=0 causal=0 window_size=0 "
    "softcap=0 alibi_slopes=0 deterministic=0 return_attn_probs=0 block_table=0"
)
_VLLM = (
    "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k=0 seqused_k=0 q_v=0 dropout_p=0 softmax_scale=0 "
    "causal=0 window_size=0 softcap=0 alibi_slopes=0 deterministic=0 return_attn_probs=0 block_table=0 "
    "return_softmax_lse=0 out=0 scheduler_metadata=0 q_descale=0 k_descale=0 v_descale=0 num_splits=0 output_scale=0 "
    "fa_version=0 s_aux=0 cp_world_size=0 cp_rank=0 cp_tot_seqused_k=0"
)
_SGL = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q=0 max_seqlen_k=0 seqused_q=0 seqused_k=0 page_table=0 "
    "softmax_scale=0 causal=0 qv=0 q_descale=0 k_descale=0 v_descale=0 window_size=0 attention_chunk=0 softcap=0 "
    "num_splits=0 pack_gqa=0 sm_margin=0 return_softmax_lse=0 sinks=0 ver=0"
)


def _declared(names: str) -> Any:
    """A function of that signature."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    split = [name.partition("=") for name in names.split()]
    found = [inspect.Parameter(name, kind, default=0 if equal else inspect._empty) for name, equal, _ in split]
    function = cast(Any, lambda **given: given)
    function.__signature__ = inspect.Signature(found)
    return function


@pytest.mark.parametrize(
    ("names", "module", "route", "asked"),
    [
        (_FA3, "flash_attn_interface", "fa3", {}),  # always returns its log-sum-exp
        (_FA3 + " return_attn_probs=0", "flash_attn_interface", "fa3", {"return_attn_probs": True}),
        (_FA2, "flash_attn", "fa2", {"return_attn_probs": True}),
        (_VLLM, "vllm.vllm_flash_attn", "fa3", {"return_softmax_lse": True, "fa_version": 3}),
        (_VLLM, "vllm.vllm_flash_attn", "fa2", {"return_softmax_lse": True, "fa_version": 2}),
        (_SGL, "sgl_kernel.flash_attn", "fa3", {"return_softmax_lse": True}),
    ],
)
def test_what_is_asked_of_a_library_is_in_its_documented_signature(
    names: str, module: str, route: Any, asked: dict[str, Any]
) -> None:
    function = _declared(names)
    options = prefills.varlen_options(function, module, route)
    assert options == asked
    x, starts = torch.zeros(2, 1, 8), torch.tensor([0, 2], dtype=torch.int32)
    call = prefills.Call(slice(0, 2), True, starts, starts, 2, 2)
    given = prefills.varlen_arguments(x, x, x, call, 0.1, 5, 30.0)
    bound = inspect.signature(function).bind(**given, **options)
    assert bound.arguments["window_size"] == (4, 0)  # the tokens before the query's own
    assert prefills.varlen_arguments(x, x, x, replace(call, causal=False), 0.1, 5, 0.0)["window_size"] == (-1, -1)


@pytest.mark.parametrize(
    ("names", "module", "message"),
    [
        ("q k v causal=0", "flash_attn", "does not take cu_seqlens_q"),
        (_FA3, "sgl_kernel.flash_attn", "no argument that asks for the log-sum-exp"),
    ],
)
def test_a_library_of_another_signature_is_refused_by_name(names: str, module: str, message: str) -> None:
    with pytest.raises(NotSupportedError, match=message):
        prefills.varlen_options(_declared(names), module, "fa3")


class _Library:
    """Has what FlashAttention 3 documents, by loops: a mask from the lower right, a window to the left of it."""

    def __init__(self) -> None:
        self.calls = 0

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        self.calls += 1
        out, lse = torch.zeros_like(q), torch.full((q.shape[1], len(q)), float("-inf"))
        for b in range(len(cu_seqlens_q) - 1):
            (q0, q1), (k0, k1) = cu_seqlens_q[b : b + 2].tolist(), cu_seqlens_k[b : b + 2].tolist()
            assert q1 - q0 <= max_seqlen_q
            assert k1 - k0 <= max_seqlen_k
            if q0 == q1:
                continue
            ratio = q.shape[1] // k.shape[1]
            keys, values = (x[k0:k1].double().repeat_interleave(ratio, 1) for x in (k, v))
            logits = torch.einsum("qhd,khd->hqk", q[q0:q1].double(), keys) * softmax_scale
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            i, j = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0), torch.arange(k1 - k0)
            hidden = (j > i) if causal else torch.zeros(q1 - q0, k1 - k0, dtype=torch.bool)
            if window_size[0] >= 0:
                hidden = hidden | (j < i - window_size[0])
            logits = logits.masked_fill(hidden, float("-inf"))
            lse[:, q0:q1] = torch.logsumexp(logits, -1).float()
            out[q0:q1] = torch.einsum("hqk,khd->qhd", torch.softmax(logits, -1), values).to(q.dtype)
        return out, lse


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], _Library]]:
    """A machine that has FlashAttention 3, with a workspace of so many bytes; kernels by torch."""

    def made(size: int) -> _Library:
        library = _Library()
        module = cast(Any, ModuleType("flash_attn_interface"))
        module.flash_attn_varlen_func = library.flash_attn_varlen_func
        monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
        monkeypatch.setattr(shared, "_architecture", lambda device: 90)
        monkeypatch.setattr(prefills, "WORKSPACE", size)
        monkeypatch.setattr(prefills, "_IN_PLACE_QUERIES", 16)
        monkeypatch.setattr(prefills.capacity, "__defaults__", (size,))
        return library

    shared._WORKSPACES.clear()
    prefills.installed.cache_clear()
    prefills.library_attention.cache_clear()
    yield made
    shared._WORKSPACES.clear()
    prefills.installed.cache_clear()
    prefills.library_attention.cache_clear()


class _OnGPU(Kernels):
    """The torch path under the name of Triton's, for what the plug-ins decide."""

    def _operation(self, name: str) -> Any:
        from k16v8.kernels import torch_path

        return getattr(torch_path, name)

    def gather(self, cache: PagedCache, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        prefills.gather(cache, slots, keys, values)


@pytest.mark.parametrize(
    ("case", "calls"),
    [
        (
            Case("long", lengths=(150, 20), queries=(90, 5), heads=8, outlier=1.0),
            3,
        ),  # 96 tokens at once: two chunks, the first of which later queries see, too
        (Case("fits", lengths=(60, 20), queries=(40, 5)), 1),
        (Case("window", lengths=(150, 20), queries=(90, 5), window=20, sinks=True, v_scaling="per-token-head"), 2),
        (Case("soft-cap", lengths=(150, 20), queries=(90, 5), softcap=8.0, v_format="int8"), 3),
        (Case("short", lengths=(150, 20), queries=(16, 5)), 0),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else str(x),
)
def test_a_plug_in_gives_long_prompts_to_the_library_and_gets_what_the_definition_says(
    on_hopper: Callable[[int], _Library], case: Case, calls: int
) -> None:
    problem = case.build(0)
    cache, starts = problem.cache, cast(Tensor, problem.query_starts)
    library = on_hopper(96 * 2 * cache.kv_heads * (cache.head_dim + cache.v_dim))
    kernels = _OnGPU("x", "triton")
    kernels.write(problem.key, problem.value, cache, problem.slots)
    out = torch.full_like(problem.q, torch.nan)
    batch = PrefillBatch(cache.lengths.tolist(), starts.diff().tolist(), cache.block_table)
    shared.attend_prompts(kernels, problem.q, starts, cache, problem.attention, out, batch)
    wanted, _ = reference.extend(problem.q, starts, cache, problem.attention, dtype=torch.float64)
    assert (out.double() - wanted).norm() / wanted.norm() <= 0.0035
    assert library.calls == calls, library.calls


def test_without_lengths_on_the_host_the_cache_is_read_in_place(on_hopper: Callable[[int], _Library]) -> None:
    problem = Case("x", lengths=(60,), queries=(40,)).build(0)
    library = on_hopper(1 << 20)
    kernels = _OnGPU("x", "triton")
    kernels.write(problem.key, problem.value, problem.cache, problem.slots)
    out = torch.empty_like(problem.q)
    starts = cast(Tensor, problem.query_starts)
    shared.attend_prompts(kernels, problem.q, starts, problem.cache, problem.attention, out, None)
    assert library.calls == 0


def test_a_library_without_a_log_sum_exp_of_each_token_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=_declared(_FA2)))
    attend = prefills.library_attention.__wrapped__("fa2", Libraries(fa2="flash_attn"))
    x, starts = torch.zeros(2, 1, 8), torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(NotSupportedError, match="log-sum-exp"):
        attend(x, x, x, prefills.Call(slice(0, 2), True, starts, starts, 2, 2), 0.1, 0, 0.0)


@pytest.mark.parametrize("lengths", [(2300,), (2300, 40, 600)])  # one sequence's rows lie together
def test_a_prompt_takes_no_more_memory_than_an_engine_is_told(
    lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefills, "_JOINED", 1 << 20)
    problem = Case("x", heads=16, lengths=lengths, queries=tuple(n - n // 3 for n in lengths)).build(0)
    cache, q, random = problem.cache, problem.q, torch.Generator().manual_seed(0)
    size = 900 * 2 * cache.kv_heads * (cache.head_dim + cache.v_dim)  # several chunks
    batch, workspace = PrefillBatch(lengths, problem.query_starts.diff().tolist(), cache.block_table), torch.zeros(size)  # type: ignore[union-attr]

    def attend(q: Tensor, keys: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.randn(q.shape, dtype=q.dtype, generator=random), torch.zeros(q.shape[:2])

    def gather(*_: Any) -> None: ...

    batch.chunks(cache.page, 0, prefills.capacity(cache, size))
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    with torch.profiler.profile(profile_memory=True) as profile:
        prefills.prefill(
            q, batch, cache, None, attend, gather=gather, workspace=workspace.view(torch.uint8)[:size], out=out, lse=lse
        )
    told = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    most = max(accumulate(told))
    numbers = 4 * q.numel()
    assert numbers < most <= prefills.scratch_bytes(len(q), q.shape[1], q.shape[2], cache.v_dim)


def test_a_workspace_too_small_for_a_window_is_refused() -> None:
    problem = Case("x", lengths=(60,), queries=(40,), window=20).build(0)
    batch = PrefillBatch([60], [40], problem.cache.block_table)
    size = 39 * 2 * 2 * 128
    with pytest.raises(NotSupportedError, match="holds 39 tokens, a window of 20 takes 40"):
        prefills.prefill(
            problem.q,
            batch,
            problem.cache,
            problem.attention,
            torch_attention,
            gather=prefills.gather,
            workspace=torch.zeros(size, dtype=torch.uint8),
        )
