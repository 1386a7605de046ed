"""Engine vllm without vLLM: what it refuses, and what the capture does with what a model runner hands it."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

from fidelab.core import Arm, KVSpec
from fidelab.core.errors import EngineError, UsageError
from fidelab.core.sequence import KVLayer
from fidelab.engines.base import read_back_proof
from fidelab.engines.cache_formats import NATIVE_FORMAT
from fidelab.engines.capture_files import CaptureWriter
from fidelab.engines.vllm import capture as vllm_capture
from fidelab.engines.vllm import runners
from fidelab.engines.vllm.adapter import VLLMEngine
from fidelab.engines.vllm.capture import FOLDER, FidelabWorker, register
from fidelab.engines.vllm.launch import Backend, cpu_cache_bytes
from fidelab.engines.vllm.model import VLLMModel, is_refusal
from fidelab.engines.vllm.options import size_in_bytes
from fidelab.engines.vllm.read_back import _expected, _sequence, exact_remark, resolved, stored_as
from fidelab.physics.shapes import Geometry
from fidelab.physics.traffic import Model as Traffic
from tests.present import present

WIDTH, VOCAB = 4, 11
GOOD = Backend("cpu", "CPU_ATTN")


def asked(kv: str = "auto", path: Path = Path("m"), **options: str) -> Arm:
    named = tuple(sorted((key.replace("_", "-"), value) for key, value in options.items()))
    return Arm(kv, "vllm", path.name, str(path), "0" * 8, KVSpec.parse(kv), "bfloat16", "cpu", 1, named)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"enforce_egar": "yes"}, "no option 'enforce-egar'; did you mean enforce-eager"),
        ({"enforce_eager": "perhaps"}, "enforce-eager='perhaps' is not yes or no"),
        ({"kv_cache_memory": "4X"}, "kv-cache-memory='4X' is not a number of bytes"),
        ({"kv_cache_memory": "0"}, "kv-cache-memory='0' is not a number of bytes"),
        ({"kv_cache_memory": ""}, "kv-cache-memory='' is not a number of bytes"),
        ({"max_model_len": "-1"}, "max-model-len='-1' is not a number of tokens"),
        ({"tp": "two"}, "tp='two' is not a number of ranks"),
        ({"gpu_memory_utilization": "1.5"}, "gpu-memory-utilization='1.5' is not a share"),
        ({"estimator": "topk"}, "estimator='topk' is not hidden or logprobs"),
    ],
)
def test_an_impossible_option_is_named_with_what_there_is(option: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        VLLMEngine.supports(asked("auto", Path("m"), **option))
    assert said in str(caught.value)


@pytest.mark.parametrize("kv", ["fp8_e4m3[scale=1]", "auto[skip-layers=0]"])
def test_vllms_own_formats_take_skipped_layers_and_no_other_options(kv: str) -> None:
    VLLMEngine.check_kv(KVSpec.parse("fp8_e4m3[skip-layers=0,4-6]"))
    with pytest.raises(UsageError, match="formats of engine vllm take no options"):
        VLLMEngine.check_kv(KVSpec.parse(kv))


def test_force_passes_what_the_backend_would_refuse_but_no_asynchronous_scheduling_on_cpus() -> None:
    assert VLLMEngine.supports(asked("int8_per_token_head", force="yes")).ok
    support = VLLMEngine.supports(asked(async_scheduling="yes", force="yes"))
    assert (support.ok, support.reason) == (False, "vLLM schedules synchronously on CPUs: remove async-scheduling")


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fidelab.engines.vllm.launch.versions_of", lambda *_names: {"torch": "2.13.0"})
    with pytest.raises(EngineError, match="fidelab setup install vllm"):
        VLLMEngine.versions()


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (NotImplementedError("no ALiBi"), True),
        (ValueError("Selected backend CUSTOM is not valid for this configuration. Reason: ['head_size']"), True),
        (ValueError("No valid attention backend found for cuda with AttentionSelectorConfig(head_size=32)"), True),
        (ValueError("the checkpoint has no lm_head"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_a_refused_shape_is_told_from_a_failure(error: Exception, refused: bool) -> None:
    assert is_refusal(error) == refused


@pytest.mark.parametrize(("text", "size"), [("512", 512), ("3K", 3 << 10), ("512M", 512 << 20), ("4G", 4 << 30)])
def test_sizes_have_units(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


def test_the_cache_holds_one_longest_prompt_or_says_that_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"num_hidden_layers": 30, "num_key_value_heads": 3, "num_attention_heads": 9, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 1 << 16}))
    needed = int(1.25 * (1 << 16) * 30 * 2 * 3 * 64 * 2)

    def with_available(size: int, **options: str) -> tuple[int, bool]:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=size, free=0))
        return cpu_cache_bytes(asked(path=tmp_path, **options))

    assert with_available(2 * needed) == (needed, True)
    assert with_available(2 * needed - 2) == (needed - 1, False)
    assert with_available(4 << 30, **{"max_model_len": "64"}) == (1 << 30, True)
    assert with_available(1 << 20, **{"max_model_len": "64"}) == (1 << 28, True)


@pytest.mark.parametrize(
    ("kv", "matches", "layers", "backend", "found"),
    [
        ("fp8_e4m3", 1.0, ("fp8_e4m3",), GOOD, "fp8_e4m3"),
        ("auto", 1.0, ("fp8",), GOOD, "auto"),  # a checkpoint may bring a format of its own
        ("fp8_e4m3", 0.5, ("fp8_e4m3",), GOOD, "uint8, and not what was written"),
        ("fp8_e4m3", 1.0, ("auto", "fp8_e4m3"), GOOD, "auto and fp8_e4m3"),
        ("turboquant_4bit_nc", None, ("turboquant_4bit_nc",), GOOD, "turboquant_4bit_nc"),
        ("nvfp4", None, ("nvfp4",), Backend("cpu", "B", "it does not list it"), "uint8, which B does not list"),
        ("float16", 1.0, ("float16",), Backend("cpu", "B", "it does not list it"), "uint8, which B does not list"),
    ],
)
def test_a_format_is_claimed_where_the_cache_proves_it(
    kv: str, matches: float | None, layers: tuple[str, ...], backend: Backend, found: str
) -> None:
    described = [{"dtype": "uint8", "kv_cache_dtype": name, "number": n} for n, name in enumerate(layers)]
    assert stored_as(asked(kv), backend, {"read_back": {"matches": matches}}, described) == found


def cache_of(kv: str, exact: Collection[int], total: int = 30, dim: int = 64, windowed: Collection[int] = ()) -> Any:
    """Layers as vLLM's worker describes them: those in ``exact`` hold bfloat16, the others the format."""
    one = VLLMEngine.cache_format(KVSpec.parse(kv))
    assert one is not None
    rows = []
    for number in range(total):
        held = NATIVE_FORMAT if number in exact else one
        sides = held.head_bytes(KVLayer(3, dim, dim), 2)
        row: dict[str, Any] = {"number": number, "index": None, "heads": 3, "k_dim": dim, "v_dim": dim, "latent": False}
        row |= {"dtype": "uint8", "kv_cache_dtype": "auto" if number in exact else kv, "windowed": number in windowed}
        rows.append(row | {"bytes_per_token": 3 * sum(sides)})
    return rows


PACKED = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "ultraquant_4bit")


@pytest.mark.parametrize("kv", PACKED)
def test_layers_that_vllm_itself_leaves_in_16_bits_are_part_of_the_plan(kv: str) -> None:
    ends = SimpleNamespace(kv_cache_dtype_skip_layers=["0", "1", "28", "29"])
    arm, layers = resolved(asked(kv), ends), cache_of(kv, (0, 1, 28, 29))
    assert stored_as(arm, GOOD, {"read_back": {"matches": None}}, layers) == kv
    assert _expected(arm, layers) == sum(layer["bytes_per_token"] for layer in layers)
    assert exact_remark(arm, layers) == ["4 of 30 layers are 16 bit (bfloat16): 0, 1, 28, 29"]
    shape = Traffic(Geometry("m", 30, (KVLayer(3, 64, 64),) * 30, 1), engine="vllm")
    assert shape.token_bytes(KVSpec.parse(kv)) == _expected(arm, layers)


def test_a_layer_that_is_left_out_against_the_plan_or_taken_in_against_it_is_named() -> None:
    ends, seen = SimpleNamespace(kv_cache_dtype_skip_layers=["0", "1", "28", "29"]), {"read_back": {"matches": None}}
    arm = resolved(asked("turboquant_4bit_nc"), ends)
    less, more = cache_of("turboquant_4bit_nc", (0, 1, 28)), cache_of("turboquant_4bit_nc", (0, 1, 2, 28, 29))
    assert stored_as(arm, GOOD, seen, less) == "turboquant_4bit_nc in layer 29"
    assert stored_as(arm, GOOD, seen, more) == "auto in layer 2"
    plain = cache_of("fp8_e4m3", (2,))
    nothing = SimpleNamespace(kv_cache_dtype_skip_layers=[])
    assert stored_as(resolved(asked("fp8_e4m3"), nothing), GOOD, seen, plain) == "auto and fp8_e4m3"


def test_layers_with_a_sliding_window_are_left_out_by_their_kind_and_a_model_without_any_is_not_engaged() -> None:
    kv, seen = "fp8_e4m3[skip-layers=sliding_window,29]", {"read_back": {"matches": 1.0}}
    windowed = range(0, 30, 2)
    there = SimpleNamespace(kv_cache_dtype_skip_layers=["sliding_window", "29"])
    layers = cache_of("fp8_e4m3", (*windowed, 29), windowed=windowed)
    arm = resolved(asked(kv), there)
    assert stored_as(arm, GOOD, seen, layers) == "fp8_e4m3"
    assert _expected(arm, layers) == sum(layer["bytes_per_token"] for layer in layers)
    none = cache_of("fp8_e4m3", (29,))
    assert stored_as(arm, GOOD, seen, none) == "uint8 in all layers, of which none has a sliding window"


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_a_cache_that_holds_another_type_than_its_name_says_is_named_by_what_it_holds(stored: str) -> None:
    described = [{"dtype": stored, "kv_cache_dtype": "float16", "number": 0}]
    seen = {"read_back": {"matches": 1.0, "stored": stored}}
    assert stored_as(asked("float16"), GOOD, seen, described) == stored


@pytest.mark.parametrize(
    ("matches", "stored", "named"),
    [
        (1.0, "shown", "shown"),
        (0.5, "refuted: 50.0% of the keys and values written are in the cache", "open: by its name alone"),
        (None, "open: blocks in this format cannot be read back", "open: by its name alone"),
    ],
)
def test_what_is_read_back_answers_what_is_stored_and_leaves_open_what_attention_got(
    matches: float | None, stored: str, named: str
) -> None:
    proof = read_back_proof(matches, 0.999, "its kernels read the cache themselves")
    assert proof == {"received": "open: its kernels read the cache themselves", "stored": stored, "named": named}


class Model(nn.Module):
    """A head, as vLLM's models have one."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight.data = torch.arange(WIDTH * VOCAB, dtype=torch.float32).view(VOCAB, WIDTH).sin()

    def compute_logits(self, states: Tensor) -> Tensor:
        return states @ self.lm_head.weight.T


class Runner:
    """What the capture uses of a model runner."""

    def __init__(self) -> None:
        self.model = Model()
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[])
        self.execute_model_state: Any = None
        self.accepted: dict[str, int] = {}

    def get_model(self) -> Model:
        return self.model

    def sample_tokens(self) -> list[int]:
        logits, self.execute_model_state = self.execute_model_state.logits, None
        out = self._sample(logits)
        self.out = out.sampled_token_ids
        return [int(token) for token in self.out[:, 0]]

    def _sample(self, _logits: Any) -> Any:
        """Token 0 for each request, and for each draft that is accepted; -1 where one was rejected, or not drafted."""
        most = max(self.accepted.values(), default=0)
        sampled = torch.full((len(self.input_batch.req_ids), 1 + most + 1), -1, dtype=torch.int32)
        for index, name in enumerate(self.input_batch.req_ids):
            sampled[index, : 1 + self.accepted.get(name, 0)] = 0
        return SimpleNamespace(sampled_token_ids=sampled)

    def request(self, name: str, prompt: int, **said: Any) -> None:
        params = SimpleNamespace(extra_args={runners.KEY: {"key": name, **said}} if said else None)
        self.requests[name] = SimpleNamespace(
            sampling_params=params, num_computed_tokens=0, num_tokens=prompt, output_token_ids=[]
        )

    def step(
        self,
        states: dict[str, Tensor],
        logits: Tensor | None = None,
        drafted: dict[str, int] | None = None,
        accepted: dict[str, int] | None = None,
    ) -> list[int]:
        """One step over some requests, each with the states of its next positions, the last ``drafted`` of drafts."""
        drafts, self.accepted = drafted or {}, accepted or {}
        self.input_batch.req_ids = list(states)
        starts = np.cumsum([0, *(len(x) for x in states.values())])
        self.query_start_loc = SimpleNamespace(np=starts)
        self.execute_model_state = SimpleNamespace(
            scheduler_output=SimpleNamespace(
                num_scheduled_tokens={name: len(x) for name, x in states.items()},
                scheduled_spec_decode_tokens={name: [0] * n for name, n in drafts.items()},
            ),
            hidden_states=torch.cat([*states.values(), torch.full((3, WIDTH), torch.nan)]),  # padded by graphs
            logits=torch.zeros(len(states) + sum(drafts.values()), VOCAB) if logits is None else logits,
        )
        sampled = self.sample_tokens()
        for name, token in zip(states, sampled, strict=True):
            request = self.requests[name]
            request.num_computed_tokens += len(states[name]) - drafts.get(name, 0) + self.accepted.get(name, 0)
            if request.num_computed_tokens >= request.num_tokens:
                request.output_token_ids += [token] * (1 + self.accepted.get(name, 0))
                request.num_tokens += 1 + self.accepted.get(name, 0)
        return sampled


class Worker(FidelabWorker):
    """A worker of one rank."""

    def __init__(self, rank: int = 0, logprobs: bool = False) -> None:
        self.model_runner, self.rank = Runner(), rank
        self.fidelab_install(logprobs)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def states(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed))


def rows(folder: Path, name: str, width: int = WIDTH) -> Tensor:
    return torch.frombuffer(bytearray((folder / name).read_bytes()), dtype=torch.float32).view(-1, width)


def test_a_preempted_request_leaves_each_row_once_and_positions_never_computed_leave_none(folder: Path) -> None:
    runner = Worker().model_runner
    runner.request("r1", 8, first=2)
    runner.requests["r1"].num_computed_tokens = 4  # as a cached prefix would have it
    runner.step({"r1": states(4)})
    assert not (folder / "r1.rows").exists()
    runner, x = Worker().model_runner, states(8)
    runner.request("r1", 6, first=2)
    runner.step({"r1": x[:6]})
    runner.step({"r1": x[6:7]})
    runner.requests["r1"].num_computed_tokens = 0  # its blocks were taken away: all is computed again
    runner.step({"r1": x})
    assert torch.equal(rows(folder, "r1.rows"), x[2:])


def test_other_ranks_write_nothing_and_live_logits_of_the_first_rows_are_kept(folder: Path) -> None:
    runner = Worker(rank=1).model_runner
    runner.request("r1", 4, first=0, live=2)
    runner.step({"r1": states(4)})
    assert list(folder.iterdir()) == []
    runner, x = Worker().model_runner, states(9)
    runner.request("r1", 9, first=2, last=8, live=4)
    runner.step({"r1": x[:4]})
    runner.step({"r1": x[4:]})
    assert torch.equal(rows(folder, "r1.live", VOCAB), runner.model.compute_logits(x[2:6]))


def test_log_probabilities_are_kept_where_they_were_asked_for(folder: Path) -> None:
    runner, x = Worker(logprobs=True).model_runner, states(300)
    runner.request("r1", 300, first=0)
    runner.step({"r1": x})
    kept = torch.frombuffer(bytearray((folder / "r1.rows").read_bytes()), dtype=torch.float16).view(-1, VOCAB)
    torch.testing.assert_close(kept.float(), runner.model.compute_logits(x).log_softmax(-1), rtol=1e-3, atol=1e-3)


def test_forced_tokens_take_the_place_of_sampled_ones(folder: Path) -> None:
    runner = Worker().model_runner
    runner.request("r1", 3, first=2, force=[7, 8])
    runner.request("r2", 3, first=2)
    runner.step({"r2": states(2), "r1": states(2)})  # a chunk: what is sampled behind it is thrown away
    assert [runner.step({"r2": states(1), "r1": states(1)}) for _ in range(2)] == [[0, 7], [0, 8]]


def test_nan_logits_are_noted_with_their_first_token(folder: Path) -> None:
    runner = Worker().model_runner
    runner.request("r1", 2, first=1)
    bad = torch.full((1, VOCAB), torch.nan)
    runner.step({"r1": states(1)}, bad)  # a chunk: these logits mean nothing
    for logits in (None, bad, bad):
        runner.step({"r1": states(1)}, logits)
    assert (folder / "r1.nan").read_text() == "1"


def test_forced_tokens_reject_all_drafts(folder: Path) -> None:
    runner, x = Worker().model_runner, states(9)
    runner.request("r1", 2, first=1, force=[7, 8])
    assert runner.step({"r1": x[:2]}) == [7]
    assert runner.step({"r1": x[2:5]}, drafted={"r1": 2}, accepted={"r1": 2}) == [8]
    assert runner.out[0].tolist() == [8, -1, -1, -1]
    assert torch.equal(rows(folder, "r1.rows"), x[1:3])


def test_ranks_write_their_rows_of_the_head_without_padding(folder: Path) -> None:
    weight = Worker().model_runner.model.lm_head.weight.detach()
    for rank, (start, end) in enumerate([(0, 6), (6, VOCAB)]):
        worker = Worker(rank=rank)
        head: Any = worker.model_runner.model.lm_head
        head.weight = nn.Parameter(torch.cat((weight[start:end], torch.full((8 - (end - start), WIDTH), torch.nan))))
        head.shard_indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=end)
        assert worker.fidelab_head()["rows"] == end - start
    joined = torch.cat([rows(folder, f"head-{rank}.weight") for rank in range(2)])
    assert torch.equal(joined, weight)


def test_a_packed_head_is_not_taken_for_a_plain_one(folder: Path) -> None:
    worker = Worker()
    worker.model_runner.model.lm_head.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.int32), requires_grad=False)
    found = worker.fidelab_head()
    assert "rows" not in found
    assert "without a plain weight" in found["why"]


def test_the_plug_in_does_nothing_outside_our_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)  # an import would fail
    register()


def layer(kv_cache_dtype: str, scale: float = 1.0) -> Any:
    return SimpleNamespace(kv_cache_dtype=kv_cache_dtype, _k_scale_float=scale, _v_scale_float=scale)


def blocks(stored: Tensor) -> Tensor:
    """Stored numbers in another order, among slots that nobody wrote."""
    flat = stored.reshape(-1)
    held = torch.zeros(2 * len(flat), dtype=torch.float32).to(stored.dtype)
    held[torch.randperm(len(held), generator=torch.Generator().manual_seed(1))[: len(flat)]] = flat
    return held.view(2, -1)


def compared(held: torch.Tensor, layer: Any, e4m3: torch.dtype = torch.float8_e4m3fn) -> dict[str, Any]:
    return vllm_capture._compared(held, KEYS, VALUES, layer, e4m3)


KEYS, VALUES = torch.randn(64, generator=torch.Generator().manual_seed(2)), states(16, 3).reshape(-1)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize(("name", "dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_rounded_numbers_are_recognised_in_any_order(name: str, dtype: torch.dtype, scale: float) -> None:
    stored = (torch.cat((KEYS, VALUES)) / scale).to(dtype)
    found = compared(blocks(stored).view(torch.uint8), layer(name, scale))
    assert (found["matches"], found["rounding"]) == (1.0, "nearest")


def test_fp8_is_read_as_the_platforms_own_encoding() -> None:
    held = blocks(torch.cat((KEYS, VALUES)).to(torch.float8_e4m3fnuz)).view(torch.uint8)
    assert compared(held, layer("fp8"), torch.float8_e4m3fnuz) == {
        "stored": "float8_e4m3fnuz",
        "matches": 1.0,
        "rounding": "nearest",
    }
    assert compared(held, layer("fp8"))["matches"] < 0.5


def test_numbers_cut_toward_zero_are_recognised_as_that() -> None:
    exact = torch.cat((KEYS, VALUES))
    near = exact.to(torch.float8_e4m3fn)
    cut = torch.where(near.float().abs() > exact.abs(), near.view(torch.uint8) - 1, near.view(torch.uint8))
    found = compared(blocks(cut), layer("fp8_e4m3"))
    assert (found["matches"], found["rounding"]) == (1.0, "toward zero")


def test_other_bits_and_more_numbers_are_not_what_was_written_and_what_cannot_be_decoded_is_not_judged() -> None:
    bits = torch.cat((KEYS, VALUES)).to(torch.bfloat16).view(torch.float16)
    assert compared(blocks(bits), layer("float16"))["matches"] < 0.5
    stored = torch.cat((KEYS, VALUES, VALUES)).to(torch.bfloat16)
    assert compared(blocks(stored), layer("auto"))["matches"] == 0.0
    held = torch.zeros(4, 4, dtype=torch.int8)
    assert compared(held, layer("int8_per_token_head"))["matches"] is None


class _Small(VLLMModel):
    """Sequences of 100 tokens, three at once, in a cache of four blocks of 16."""

    def __init__(self) -> None:
        model, scheduler = SimpleNamespace(max_model_len=100), SimpleNamespace(max_num_seqs=3)
        self.config = SimpleNamespace(model_config=model, scheduler_config=scheduler)

    def cache(self) -> list[dict[str, Any]]:
        return [{"blocks": 4, "layers": [{"block_size": 16}]}]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([101], "101 tokens are more than this configuration's 100: raise max-model-len"),
        ([8] * 4, "4 sequences are more than this configuration's 3 at once: raise max-num-seqs"),
        ([17, 17, 16], "3 sequences need 80 places of the cache, which has 64: raise kv-cache-memory"),
    ],
)
def test_prompts_that_cannot_be_answered_together_are_no_timed_group(sizes: list[int], said: str) -> None:
    with pytest.raises(EngineError, match=f"^{said}$"):
        _Small()._check_batch(sizes)


class _Write:
    """An attention implementation that writes apart from attention, as k16v8's and most of vLLM's do."""

    layer = 0
    formats = SimpleNamespace(skip_layers=())

    def __init__(self) -> None:
        self.written: list[torch.Tensor] = []
        self.compared: tuple[torch.Tensor, torch.Tensor] | None = None

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        self.written.append(key)

    def read_back(self, blocks: list[int], key: torch.Tensor, value: torch.Tensor) -> dict[str, Any]:
        self.compared = key, value
        formats = {"k_format": "bf16", "v_format": "fp8_e4m3"}
        return {"matches": 1.0, "disjoint": True, "saturated": 0, **formats}


def test_what_is_written_to_the_cache_is_read_back_where_no_modules_forward_runs(tmp_path: Path) -> None:
    implementation = _Write()
    backend = SimpleNamespace(forward_includes_kv_cache_update=False)
    layer = SimpleNamespace(
        impl=implementation, attn_backend=backend, kv_cache=torch.zeros(2, 2), kv_cache_dtype="auto"
    )
    group = SimpleNamespace(layer_names=["a"], kv_cache_spec=SimpleNamespace(block_size=16))
    runner = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": layer}),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        requests={"r1": SimpleNamespace(block_ids=[[7]])},
        sample_tokens=None,
        _sample=None,
    )
    hook = vllm_capture._Hook(runner, CaptureWriter(tmp_path, lambda: True, logprobs=False))
    hook.watch()
    key, value = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    slots = torch.tensor([5, 6, -1])  # three of four tokens are in the step, one of them is padding
    layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)
    hook._compare("r1")
    assert implementation.compared is not None
    assert torch.equal(implementation.compared[0], key[:2])
    assert torch.equal(implementation.compared[1], value[:2])
    assert hook.read_back["matches"] == 1.0
    assert len(implementation.written) == 1
    layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, slots)  # as before: nothing is noted any more
    assert hook._given == {}
    assert "do_kv_cache_update" not in vars(implementation)


class SlidingWindowSpec:
    """As vLLM names the specification of layers that free the tokens before their window."""

    sliding_window = 64


def test_layers_with_a_window_hold_no_more_than_it_and_others_all_tokens() -> None:
    whole = SimpleNamespace(block_size=16, sliding_window=64)  # computes with a window and keeps all tokens
    mixed = SimpleNamespace(kv_cache_specs={"a": SlidingWindowSpec(), "b": whole})
    specs = [(SlidingWindowSpec(), "a"), (whole, "a"), (mixed, "a"), (mixed, "b")]
    assert [vllm_capture._window(*each) for each in specs] == [64, None, 64, None]
    layers: list[dict[str, Any]] = [{"bytes_per_token": 10.0, "window": 64}, {"bytes_per_token": 30.0, "window": None}]
    sequence = present(_sequence(layers, 7))
    assert [sequence.bytes_of_sequence(n) for n in (10, 1000)] == [10 * 40 + 7, 64 * 10 + 1000 * 30 + 7]
    assert _sequence(layers[1:], 7) is None


def test_layers_in_one_allocation_count_each_and_a_layer_that_reads_anothers_keys_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in Gemma 2, whose layers with a window have blocks of their own among those of the others."""
    held = torch.zeros(4, 2, 16, 2 * 8, dtype=torch.bfloat16)  # blocks, heads, tokens, keys and values

    def attention(window: int | None, shares: str | None = None) -> Any:
        sizes = {"num_kv_heads": 2, "head_size": 8, "sliding_window": window, "kv_sharing_target_layer_name": shares}
        return SimpleNamespace(kv_cache=held, kv_cache_dtype="auto", impl=SimpleNamespace(), **sizes)

    names = [f"model.layers.{n}.attn" for n in range(3)]
    layers = dict(zip(names, (attention(4), attention(None), attention(None, names[1])), strict=True))
    windowed, full = (
        type("SlidingWindowSpec", (), {"block_size": 16, "sliding_window": 4})(),
        SimpleNamespace(block_size=16),
    )
    groups = [
        SimpleNamespace(layer_names=[names[0]], kv_cache_spec=windowed),
        SimpleNamespace(layer_names=names[1:], kv_cache_spec=full),
    ]
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(num_blocks=4, kv_cache_groups=groups),
        compilation_config=SimpleNamespace(static_forward_context=layers),
    )
    monkeypatch.setattr(vllm_capture, "kernel_block_size", lambda _runner, _group: 16)
    found = vllm_capture._cache_layers(runner)
    assert [(row["number"], row["window"], row["windowed"]) for row in found] == [(0, 4, True), (1, None, False)]
    assert [row["bytes_per_token"] for row in found] == [64.0, 64.0]
    assert sum(row["bytes"] for row in found) == held.numel() * 2
