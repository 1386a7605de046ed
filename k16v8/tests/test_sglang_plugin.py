"""K16/V8 inside SGLang without SGLang: the switch, capacity, what is refused, and pool and backend on stand-ins.

The stand-ins have of SGLang's classes what pool and backend use of them; ``RECORDED`` is how SGLang 0.5.23 declares
what is hooked or overridden, held against the real one by ``tests/real/test_sglang_k16v8.py``.  What needs a GPU never
ran: of it only what the backend asks of the kernels is tested here.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from k16v8.errors import NotSupportedError, UsageError
from k16v8.kernels import dispatch, reference
from k16v8.kernels.cache import PagedCache
from k16v8.plugins import shared
from k16v8.plugins.sglang import plugin as sglang_k16v8
from k16v8.plugins.sglang.plugin import BACKEND, cell_bytes, lacking, pool_class, register
from k16v8.plugins.shared import COUNT_SWITCH, SWITCH
from pretend_cuda import pretend_cuda

RECORDED = {
    "sglang.srt.layers.attention.attention_registry.register_attention_backend": ["name"],
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward_decode": [
        *("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs"),
    ],
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward_extend": [
        *("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs"),
    ],
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata": ["self", "forward_batch"],
    "sglang.srt.mem_cache.allocation.get_last_loc": [
        *("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
    ],
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class": [
        "self",
        "kind",
        "default",
    ],
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers": ["self"],
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_data_ptrs_and_strides": ["self"],
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.get_kv_size_bytes": ["self"],
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.get_value_buffer": ["self", "layer_id"],
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer": [
        *("self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale", "layer_id_override", "dcp_kv_mask"),
    ],
    "sglang.srt.mem_cache.memory_pool.unwrap_write_loc": ["loc_info"],
    "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size": [
        *("self", "kvc", "num_layers"),
    ],
}
LAYERS, HEADS, KV_HEADS, DIM, SIZE = 2, 4, 2, 8, 192
SWITCHES = ("1", "per-token-head", "bf16/int8", "int8/int4[skip-layers=1]", "int8/int4[skip-layers=0]", "int4/fp8_e4m3")
switches = pytest.mark.parametrize("switch", SWITCHES)
pages = pytest.mark.parametrize("page", [1, 16])


class Pool:
    def __init__(self, page: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> None:
        self.size, self.page_size, self.dtype, self.device = SIZE, page, dtype, device
        self.head_num, self.head_dim, self.v_head_dim = KV_HEADS, DIM, DIM
        self.layer_num, self.start_layer = LAYERS, 0
        self.memory_saver_adapter = SimpleNamespace(region=lambda _kind: nullcontext())
        self._create_buffers()

    def _create_buffers(self) -> None:
        raise NotImplementedError

    def _init_data_ptrs_and_strides(self) -> None:
        pass


class Radix(nn.Module):
    def __init__(self, layer_id: int = 0, **changes: Any) -> None:
        super().__init__()
        self.layer_id, self.tp_q_head_num, self.qk_head_dim, self.v_head_dim = layer_id, HEADS, DIM, DIM
        self.scaling, self.sliding_window_size, self.logit_cap, self.logit_capping_method = 0.3, -1, 0.0, "tanh"
        self.is_cross_attention, self.attn_type, self.use_irope = False, Kind.DECODER, False
        self.xai_temperature_len, self.pos_encoding_mode = -1, "NONE"
        for name, value in changes.items():
            setattr(self, name, value)


class Kind(Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class Mode(Enum):
    EXTEND = 1
    DECODE = 2
    IDLE = 3
    DLLM_EXTEND = 4

    def is_idle(self) -> bool:
        return self is Mode.IDLE

    def is_decode(self) -> bool:
        return self is Mode.DECODE

    def is_extend_or_draft_extend_or_mixed(self) -> bool:
        return self is Mode.EXTEND


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The backend's module, on stand-ins."""
    contents: dict[str, dict[str, Any]] = {
        "constants": {"GPU_MEMORY_TYPE_KV_CACHE": "kv"},
        "layers.attention.base_attn_backend": {"AttentionBackend": type("AttentionBackend", (), {})},
        "layers.radix_attention": {"AttentionType": Kind, "RadixAttention": Radix},
        "mem_cache.memory_pool": {"MHATokenToKVPool": Pool, "unwrap_write_loc": lambda loc: (loc, None, None)},
    }
    for name in ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention", "sglang.srt.mem_cache"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, items in contents.items():
        module = ModuleType(f"sglang.srt.{name}")
        vars(module).update(items)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.delitem(sys.modules, "k16v8.plugins.sglang.backend", raising=False)
    yield importlib.import_module("k16v8.plugins.sglang.backend")
    sys.modules.pop("k16v8.plugins.sglang.backend")


class Sequences:
    """Three sequences of a scheduler that hands out slots in whole pages, in no order."""

    lengths = (37, 5, 48)

    def __init__(self, page: int, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        blocks = 1 + torch.randperm(SIZE // page, generator=random)  # block 0 is for padding
        self.table = torch.zeros(4, 64, dtype=torch.int32)  # SGLang's requests → slots
        self.rows, at = torch.tensor([2, 0, 3]), 0
        for row, length in zip(self.rows.tolist(), self.lengths, strict=True):
            many = -(-length // page)
            slots = blocks[at : at + many, None] * page + torch.arange(page)
            self.table[row, :length] = slots.flatten()[:length].int()
            at += many
        n = sum(self.lengths)
        self.q, self.k, self.v = (
            torch.randn(n, heads, DIM, generator=random).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.v[3, 1, 2] = 1000.0  # saturates where nothing is scaled

    def of(self, row: int, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens of one sequence: their slots, queries, keys, values."""
        start = sum(self.lengths[:row])
        part = slice(start + first, start + last)
        return self.table[self.rows[row], first:last].long(), self.q[part], self.k[part], self.v[part]

    def batch(self, mode: Mode, spans: list[tuple[int, int]]) -> tuple[Any, list[Tensor]]:
        """One forward over tokens ``first`` to ``last`` of each sequence."""
        sizes = [last - first for first, last in spans]
        parts = [self.of(row, *span) for row, span in enumerate(spans)]
        slots, q, k, v = (torch.cat(found) for found in zip(*parts, strict=True))
        lengths = torch.tensor([last for _, last in spans])
        batch = SimpleNamespace(
            forward_mode=mode,
            req_pool_indices=self.rows,
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            extend_seq_lens=torch.tensor(sizes),
            extend_seq_lens_cpu=sizes,
            out_cache_loc=slots,
        )
        return batch, [q.flatten(1), k, v]


def runner(plugin: Any, page: int, sequences: Sequences, **changes: Any) -> Any:
    model = nn.ModuleList(Radix(layer, **changes) for layer in range(LAYERS))
    return SimpleNamespace(
        token_to_kv_pool=plugin.K16V8Pool(page),
        req_to_token_pool=SimpleNamespace(req_to_token=sequences.table),
        model=model,
    )


@pages
@switches
@pytest.mark.parametrize("changes", [{}, {"sliding_window_size": 9, "logit_cap": 2.0}])
def test_prompts_in_pieces_and_decoding_attend_to_what_was_written(
    plugin: Any, page: int, switch: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    sequences = Sequences(page)
    made = runner(plugin, page, sequences, **changes)
    backend, pool = plugin.K16V8Backend(made), made.token_to_kv_pool
    attention = reference.Attention(0.3, 10 if changes else 0, 2.0 if changes else 0.0)
    layer = made.model[1]
    for mode, spans in (
        (Mode.EXTEND, [(0, 20), (0, 3), (0, 48)]),
        (Mode.EXTEND, [(20, 36), (3, 4), (47, 48)]),  # chunks, and one that decodes among them
        (Mode.DECODE, [(36, 37), (4, 5), (47, 48)]),
    ):
        batch, (q, k, v) = sequences.batch(mode, spans)
        backend.init_forward_metadata(batch)
        forward = backend.forward_decode if mode is Mode.DECODE else backend.forward_extend
        out = forward(q, k, v, layer, batch).double().view(-1, HEADS, DIM)
        starts = torch.tensor([0, *batch.extend_seq_lens_cpu]).cumsum(0)
        wanted, _ = reference.extend(
            q.view(-1, HEADS, DIM), starts, by_tokens(pool, 1, sequences, batch), attention, dtype=torch.float64
        )
        assert (out - wanted).norm() / wanted.norm() < 0.003
    seen = pool.read_back(1, batch.out_cache_loc, k, v)
    formats = shared.Formats.parse(switch).in_layer(1)
    assert (seen["k_format"], seen["v_format"]) == tuple(
        x.kernel_name("torch.bfloat16") for x in (formats.k, formats.v)
    )
    assert seen["matches"] == 1.0


def test_a_steps_metadata_on_a_device_makes_the_host_wait_for_nothing(plugin: Any) -> None:
    with pretend_cuda() as cuda:
        sequences = Sequences(16)
        batches = [
            sequences.batch(mode, spans)[0]
            for mode, spans in (
                (Mode.EXTEND, [(0, 20), (0, 3), (0, 48)]),
                (Mode.DECODE, [(36, 37), (4, 5), (47, 48)]),
            )
        ]
        backend = plugin.K16V8Backend(runner(plugin, 16, sequences))
        backend._slots = sequences.table.to("cuda")
        for batch in batches:
            for name in ("req_pool_indices", "seq_lens", "extend_seq_lens"):
                setattr(batch, name, getattr(batch, name).to("cuda"))
            with cuda.recorded() as found:
                backend.init_forward_metadata(batch)
                if backend._step.prompts is not None:
                    backend._step.prompts.chunks(16, 0, 40)
            assert found == []
            assert backend._step.table.is_cuda


def by_tokens(pool: Any, layer: int, sequences: Sequences, batch: Any) -> PagedCache:
    """The same cache with blocks of one token, straight from SGLang's table of slots."""
    held = pool._pages[layer]
    scales = (None if x is None else x.flatten(0, 1).unsqueeze(1) for x in (held.k_scales, held.v_scales))
    return PagedCache(
        pool.k_buffer[layer].unsqueeze(1),
        pool.v_buffer[layer].unsqueeze(1),
        sequences.table[sequences.rows],
        batch.seq_lens.int(),
        held.k_format,
        held.v_format,
        *scales,
    )


@switches
def test_keys_values_and_scales_take_what_a_cell_says(
    plugin: Any, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    pool = plugin.K16V8Pool(16)
    held = sum(pool.get_kv_size_bytes())
    model = SimpleNamespace(head_dim=DIM, v_head_dim=DIM)
    found = SimpleNamespace(model_config=model, layer_info=SimpleNamespace(start_layer=0))
    cell = cell_bytes(lambda *_: LAYERS * KV_HEADS * 4 * DIM, None, found, LAYERS)
    assert held == (SIZE + 16) * cell
    buffers = [*pool.k_buffer, *pool.v_buffer, *(pool.k_scale_buffer or ()), *(pool.v_scale_buffer or ())]
    assert held == sum(x.untyped_storage().nbytes() for x in buffers)
    assert len({x.untyped_storage().data_ptr() for x in buffers}) == len(buffers)
    if switch in ("1", "per-token-head"):
        assert (pool.k_buffer[0].dtype, pool.v_buffer[0].dtype) == (torch.bfloat16, torch.uint8)


@pytest.mark.parametrize("text", ["", "0", "1", "yes"])
def test_saturated_values_of_each_layer_are_counted_where_they_are_asked_for(
    text: str, plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COUNT_SWITCH, text)
    if text == "yes":
        with pytest.raises(UsageError, match="K16V8_COUNT=yes: write 1, or 0 for off"):
            plugin.K16V8Pool(16)
        return
    sequences, pool = Sequences(16), plugin.K16V8Pool(16)
    slots, _, k, v = sequences.of(0, 0, 20)
    for _ in range(2):
        pool.set_kv_buffer(Radix(1), slots, k, v)
    found = [pool.read_back(layer, slots, k, v).get("counted") for layer in range(2)]
    assert found == ([[0, 0], [0, 2]] if text == "1" else [None, None])


@pytest.mark.parametrize("side", ["k_buffer", "v_buffer"])
def test_one_wrong_bit_is_seen(plugin: Any, side: str) -> None:
    sequences, pool = Sequences(16), plugin.K16V8Pool(16)
    slots, _, k, v = sequences.of(0, 0, 20)
    pool.set_kv_buffer(Radix(1), slots, k, v)
    assert pool.read_back(1, slots, k, v)["matches"] == 1.0
    assert pool.read_back(1, slots, k, v)["saturated"] == 1
    getattr(pool, side)[1][slots[18]].view(torch.uint8)[1, 2] ^= 1
    assert pool.read_back(1, slots, k, v)["matches"] < 1


def test_overlapping_storage_is_seen(plugin: Any) -> None:
    sequences, pool = Sequences(16), plugin.K16V8Pool(16)
    slots, _, k, v = sequences.of(0, 0, 20)
    pool.set_kv_buffer(Radix(0), slots, k, v)
    assert pool.read_back(0, slots, k, v)["disjoint"]
    keys = pool._pages[1].keys
    pool._pages[1] = replace(pool._pages[1], values=keys.view(torch.uint8)[..., :DIM])
    assert not pool.read_back(0, slots, k, v)["disjoint"]


def test_nobody_else_reads_the_codes_or_takes_them_for_16_bit(plugin: Any) -> None:
    """SGLang's models write into a pool of type bfloat16 by themselves."""
    pool = plugin.K16V8Pool(1)
    assert pool.dtype == torch.uint8
    with pytest.raises(NotSupportedError, match="values are codes"):
        pool.get_value_buffer(0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attn_type": Kind.ENCODER_ONLY}, "is for decoders"),
        ({"is_cross_attention": True}, "is for decoders"),
        ({"use_irope": True}, "no chunked attention"),
        ({"xai_temperature_len": 64}, "temperature"),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, "layer 0 by sigmoid"),
        ({"tp_q_head_num": 3}, "3 query heads are no multiple of 2 KV heads"),
    ],
)
def test_layers_that_the_kernels_lack_end_the_start(plugin: Any, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotSupportedError, match=reason):
        plugin.K16V8Backend(runner(plugin, 1, Sequences(1), **changes))


def test_another_pool_and_another_kind_of_forward_are_errors(plugin: Any) -> None:
    sequences = Sequences(1)
    made = runner(plugin, 1, sequences)
    backend = plugin.K16V8Backend(made)
    with pytest.raises(NotSupportedError, match="forward mode DLLM_EXTEND"):
        backend.init_forward_metadata(SimpleNamespace(forward_mode=Mode.DLLM_EXTEND))
    batch, tensors = sequences.batch(Mode.EXTEND, [(0, 5), (0, 5), (0, 5)])
    backend.init_forward_metadata(batch)
    with pytest.raises(NotSupportedError, match="does not know k_rope"):
        backend.forward_extend(*tensors, made.model[0], batch, k_rope=tensors[1])
    made.token_to_kv_pool = SimpleNamespace()
    with pytest.raises(NotSupportedError, match="SGLang made a SimpleNamespace"):
        plugin.K16V8Backend(made)


def test_sinks_take_part_in_the_softmax(plugin: Any) -> None:
    sequences = Sequences(1)
    made = runner(plugin, 1, sequences)
    backend = plugin.K16V8Backend(made)
    batch, tensors = sequences.batch(Mode.EXTEND, [(0, 5), (0, 5), (0, 5)])
    backend.init_forward_metadata(batch)
    out = backend.forward_extend(*tensors, made.model[0], batch, sinks=torch.full((HEADS,), 50.0))
    assert out.abs().max() < 1e-6


def test_on_a_gpu_the_triton_kernels_are_asked_for_never_run_here(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, dict[str, Any]]] = []

    def choose(name: str, **shape: Any) -> dispatch.Kernels:
        given.append((name, shape))
        return dispatch.Kernels("triton[…]", "triton")

    monkeypatch.setattr(dispatch, "choose", choose)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    pool = plugin.K16V8Pool(16, device="cuda")
    pool.kernels(HEADS)
    assert [name for name, _ in given] == ["triton", "triton"]
    assert given[1][1] == {
        **{"k_format": "bf16", "v_format": "fp8_e4m3", "k_scaling": "none", "v_scaling": "none"},
        "dtype": torch.bfloat16,
        **{"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "v_dim": DIM, "page": 16, "device": "cuda"},
    }


LAUNCH = {
    "use_mla_backend": False,
    "mambaish_config": None,
    "is_hybrid_swa": False,
    "model_dtype": torch.bfloat16,
    "kv_cache_dtype": torch.bfloat16,
    "page_size": 16,
    "model_config": SimpleNamespace(head_dim=64, v_head_dim=64, num_hidden_layers=30),
}
NONE = SimpleNamespace(backend="disabled")
SETTINGS = {**sglang_k16v8._OFF, "cuda_graph_config": SimpleNamespace(decode=NONE, prefill=NONE)}


def reason(
    platform: str = "cpu",
    backends: tuple[str, str] = (BACKEND, BACKEND),
    settings: Any = None,
    switch: str = "1",
    **launch: Any,
) -> str:
    found = SimpleNamespace(**{**LAUNCH, **launch})
    formats = shared.Formats.parse(switch)
    return lacking(found, SimpleNamespace(**{**SETTINGS, **(settings or {})}), backends, platform, formats)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_plain_launch_is_served(platform: str) -> None:
    assert reason(platform) == ""
    assert reason(platform, model_dtype=torch.float16, kv_cache_dtype=torch.float16) == ""


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"backends": ("triton", "triton")}, "pass --attention-backend k16v8"),
        ({"backends": (BACKEND, "triton")}, "pass --attention-backend k16v8"),
        ({"platform": "another device"}, "CPUs and NVIDIA GPUs"),
        ({"use_mla_backend": True}, "keeps latents"),
        ({"mambaish_config": object()}, "recurrent"),
        ({"is_hybrid_swa": True}, "pass --disable-hybrid-swa-memory"),
        ({"model_dtype": torch.float32}, "pass --dtype bfloat16"),
        ({"switch": "f16/int8"}, "(f16/int8) copies f16 as it is, the model computes in bf16"),
        ({"switch": "int8[skip-layers=7,30]"}, "cannot skip layer 30: the model has layers 0-29"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "pass --kv-cache-dtype auto"),
        ({"platform": "cuda", "page_size": 1}, "pass --page-size 16, 32, 64 or 128"),
        ({"settings": {"speculative_algorithm": "EAGLE"}}, "does not work with --speculative-algorithm"),
        ({"settings": {"enable_hierarchical_cache": True}}, "does not work with --enable-hierarchical-cache"),
        ({"settings": {"disaggregation_mode": "decode"}}, "does not work with --disaggregation-mode"),
        ({"settings": {"dcp_size": 2}}, "does not work with --dcp-size"),
        (
            {"settings": {"cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(backend="full"), prefill=NONE)}},
            "pass --disable-cuda-graph",
        ),
    ],
)
def test_a_launch_that_cannot_be_served_is_refused_with_what_to_do(given: dict[str, Any], what: str) -> None:
    assert what in reason(**given)
    assert "\n" not in reason(**given)


def test_pools_of_other_kinds_stay_sglangs() -> None:
    def stock(configurator: Any, *, kind: str, default: type) -> type:
        return default

    assert pool_class(stock, None, kind="mla", default=Pool) is Pool


@pytest.mark.parametrize(
    ("found", "tested"),
    [("0.5.22", False), ("0.5.23", True), ("0.5.23.post1", True), ("0.5.24", False), ("0.6.0", False)],
)
def test_other_versions_of_sglang_without_its_names_end_the_process_in_one_line(
    found: str, tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "version", lambda _name: found)
    lacking = replace(sglang_k16v8.SGLANG, names={"k16v8.plugins.shared": ("gone",)})
    monkeypatch.setattr(sglang_k16v8, "SGLANG", lacking)
    monkeypatch.setenv(SWITCH, "1")
    assert (sglang_k16v8.refusal() == "") is tested
    assert (lacking.warning() == "") is tested
    if not tested:
        with pytest.raises(SystemExit) as caught:
            register()
        assert str(caught.value).endswith(
            f"{found} lacks: k16v8.plugins.shared.gone; tested are 0.5.23 to before 0.5.24"
        )


def test_a_word_that_means_nothing_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "yes")
    with pytest.raises(SystemExit, match="k16v8: K16V8=yes: write 1, per-token-head, 0 for off, or K/V of"):
        register()


def test_off_means_that_sglang_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    monkeypatch.setattr(shared, "version", lambda _name: "9.9")
    register()
    assert cell_bytes(lambda *_: 1024, None, None, 2) == 1024


def test_the_hooks_take_what_sglang_passes() -> None:
    """SGLang hands the original over, then its own arguments."""
    for target, hook in (
        (f"{sglang_k16v8._CONFIGURATOR}._resolve_kv_pool_class", pool_class),
        (sglang_k16v8._CELL, cell_bytes),
    ):
        assert len(inspect.signature(hook).parameters) == 1 + len(RECORDED[target])
    inspect.signature(pool_class).bind(None, None, kind="mha", default=Pool)
