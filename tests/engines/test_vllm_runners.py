"""Model Runners V1 and V2 in stand-ins: what the capture keeps of their steps; blocks of manager and kernel."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from fidelab.core.errors import EngineError, UsageError
from fidelab.engines.capture_files import CaptureWriter
from fidelab.engines.vllm import capture as vllm_capture
from fidelab.engines.vllm import runners
from fidelab.engines.vllm.adapter import VLLMEngine
from fidelab.engines.vllm.capture import FOLDER, FidelabWorker, quantizes_queries
from fidelab.engines.vllm.launch import RUNNER_VARIABLE, Backend, prepare, serve_command, serve_variables
from fidelab.engines.vllm.read_back import remarks
from fidelab.engines.vllm.runners import kernel_block_ids
from tests.engines.test_vllm import VOCAB, WIDTH, Model, asked, rows, states
from tests.engines.test_vllm import Worker as FirstWorker

CUDA = Backend("cuda", "FLASH_ATTN")


class Runner:
    """What the capture uses of Model Runner V2; a request's slot is its number from the end."""

    def __init__(self) -> None:
        self.model = Model()
        size = 8
        self.req_states = SimpleNamespace(
            req_id_to_index={},
            total_len=SimpleNamespace(gpu=torch.zeros(size, dtype=torch.int32)),
            prompt_len=SimpleNamespace(np=np.zeros(size, dtype=np.int32)),
            num_computed_tokens=SimpleNamespace(gpu=torch.zeros(size, dtype=torch.int32)),
        )
        self.computed: dict[str, int] = {}
        self.scheduled: dict[str, int] = {}  # the scheduler's count, which takes all drafts for accepted
        self.new: list[Any] = []
        self.accepted: dict[str, int] = {}

    def get_model(self) -> Model:
        return self.model

    def add_requests(self, scheduled: Any) -> None:
        for new in scheduled.scheduled_new_reqs:
            slot = self.req_states.req_id_to_index.setdefault(new.req_id, 7 - len(self.computed))
            self.req_states.prompt_len.np[slot] = new.prompt
            self.req_states.total_len.gpu[slot] = max(new.prompt, int(self.req_states.total_len.gpu[slot]))
            self.computed[new.req_id] = self.scheduled[new.req_id] = 0

    def request(self, name: str, prompt: int, **said: Any) -> None:
        """Hand a request over with the next step; once more for one that was preempted."""
        params = SimpleNamespace(extra_args={runners.KEY: {"key": name, **said}} if said else None)
        self.new.append(SimpleNamespace(req_id=name, sampling_params=params, prompt=prompt))

    def sample(self, hidden: Tensor, batch: Any, _grammar: Any) -> tuple[Any, Tensor, Tensor]:
        """Token 0 for each request, and for each draft that is accepted; a chunk that is not the last gets none."""
        self.model.compute_logits(hidden[: len(batch.req_ids)])
        drafted = batch.num_draft_tokens_per_req
        n_sampled = torch.tensor([1 + self.accepted.get(name, 0) for name in batch.req_ids], dtype=torch.int32)
        n_rejected = torch.from_numpy(drafted).int() + 1 - n_sampled
        for index, name in enumerate(batch.req_ids):
            slot = self.req_states.req_id_to_index[name]
            if self.computed[name] + batch.num_scheduled_tokens[index] < self.known(slot):
                n_sampled[index] = n_rejected[index] = 0
        sampled = torch.zeros((len(batch.req_ids), 1 + int(drafted.max(initial=0))), dtype=torch.int64)
        return SimpleNamespace(sampled_token_ids=sampled), n_sampled, n_rejected

    def known(self, slot: int) -> int:
        return int(self.req_states.total_len.gpu[slot])

    def step(
        self,
        given: dict[str, Tensor],
        logits: Tensor | None = None,
        drafted: dict[str, int] | None = None,
        accepted: dict[str, int] | None = None,
    ) -> list[list[int]]:
        """One step over some requests, each with the states of its next positions, the last ``drafted`` of drafts."""
        drafts, self.accepted = drafted or {}, accepted or {}
        self.add_requests(SimpleNamespace(finished_req_ids=set(), scheduled_new_reqs=self.new))
        self.new = []
        names, slots = list(given), [self.req_states.req_id_to_index[name] for name in given]
        batch = SimpleNamespace(
            req_ids=names,
            idx_mapping=torch.tensor(slots, dtype=torch.int32),
            idx_mapping_np=np.array(slots),
            num_scheduled_tokens=np.array([len(x) for x in given.values()]),
            num_draft_tokens_per_req=np.array([drafts.get(name, 0) for name in names], dtype=np.int32),
            num_computed_tokens_np=np.array([self.scheduled[name] for name in names]),
            query_start_loc_np=np.cumsum([0, *(len(x) for x in given.values())]),
            cu_num_logits_np=np.cumsum([0, *(1 + drafts.get(name, 0) for name in names)]),
        )
        for name, slot in zip(names, slots, strict=True):
            self.req_states.num_computed_tokens.gpu[slot] = self.computed[name]
        if logits is not None:
            vars(self.model)["compute_logits"] = lambda _states: logits
        hidden = torch.cat([*given.values(), torch.full((3, WIDTH), torch.nan)])  # padded by graphs
        out, n_sampled, n_rejected = self.sample(hidden, batch, None)
        vars(self.model).pop("compute_logits", None)
        kept = [out.sampled_token_ids[i, : int(n)].tolist() for i, n in enumerate(n_sampled)]
        for index, name in enumerate(names):
            self.computed[name] += len(given[name]) - int(n_rejected[index])
            self.scheduled[name] += len(given[name])
            self.req_states.total_len.gpu[slots[index]] += int(n_sampled[index])
        return kept


class Worker(FidelabWorker):
    """A worker of one rank."""

    def __init__(self) -> None:
        self.model_runner, self.rank = Runner(), 0
        self.fidelab_install(False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


both = pytest.mark.parametrize("worker", [FirstWorker, Worker], ids=["v1", "v2"])


@both
def test_a_prompt_in_chunks_is_joined(worker: type[FirstWorker | Worker], folder: Path) -> None:
    runner, x = worker().model_runner, states(10)
    runner.request("r1", 10, first=3, last=7)
    for start in range(0, 10, 4):
        runner.step({"r1": x[start : start + 4]})
    assert torch.equal(rows(folder, "r1.rows"), x[3:8])


@both
def test_requests_of_a_batch_keep_their_own_rows(worker: type[FirstWorker | Worker], folder: Path) -> None:
    runner, x, y = worker().model_runner, states(6), states(5, 1)
    runner.request("r1", 6, first=0, last=5)
    runner.request("r2", 5, first=4)
    runner.request("other", 5)
    runner.step({"r1": x, "other": y, "r2": y})
    runner.step({"r2": x[:1], "r1": y[:1]})  # vLLM reorders its batch
    assert torch.equal(rows(folder, "r1.rows"), x)
    assert torch.equal(rows(folder, "r2.rows"), torch.cat((y[4:], x[:1])))
    assert not (folder / "other.rows").exists()


def test_a_preempted_request_leaves_each_row_once_in_runner_v2(folder: Path) -> None:
    runner, x = Worker().model_runner, states(8)
    runner.request("r1", 6, first=2)
    runner.step({"r1": x[:6]})
    runner.step({"r1": x[6:7]})
    runner.request("r1", 6, first=2)  # its blocks were taken away: it comes again, and all is computed again
    runner.step({"r1": x})
    assert torch.equal(rows(folder, "r1.rows"), x[2:])


def test_forced_tokens_take_the_place_of_sampled_ones_in_runner_v2(folder: Path) -> None:
    runner = Worker().model_runner
    runner.request("r1", 3, first=2, force=[7, 8])
    runner.request("r2", 3, first=2)
    runner.step({"r2": states(2), "r1": states(2)})  # a chunk: nothing is sampled behind it
    assert [runner.step({"r2": states(1), "r1": states(1)}) for _ in range(2)] == [[[0], [7]], [[0], [8]]]


@both
def test_rows_of_rejected_drafts_are_not_kept(worker: type[FirstWorker | Worker], folder: Path) -> None:
    runner, x, wrong = worker().model_runner, states(12), states(3, 1)
    for name in ("r1", "r2"):
        runner.request(name, 4, first=3)
    runner.step({"r1": x[:4], "r2": x[:4]})
    both = {"r1": torch.cat((x[4:6], wrong[:2])), "r2": x[4:5]}
    runner.step(both, drafted={"r1": 3}, accepted={"r1": 1})  # two of three drafts are rejected
    runner.step({"r2": torch.cat((x[5:6], wrong)), "r1": x[6:8]}, drafted={"r2": 3, "r1": 1}, accepted={"r1": 1})
    assert torch.equal(rows(folder, "r1.rows"), x[3:8])
    assert torch.equal(rows(folder, "r2.rows"), x[3:6])


def test_forced_tokens_reject_all_drafts_in_runner_v2(folder: Path) -> None:
    runner, x = Worker().model_runner, states(9)
    runner.request("r1", 2, first=1, force=[7, 8])
    assert runner.step({"r1": x[:2]}) == [[7]]
    assert runner.step({"r1": x[2:5]}, drafted={"r1": 2}, accepted={"r1": 2}) == [[8]]
    assert runner.computed["r1"] == 3
    assert torch.equal(rows(folder, "r1.rows"), x[1:3])


@both
def test_nan_logits_of_rejected_drafts_are_nobodys(worker: type[FirstWorker | Worker], folder: Path) -> None:
    runner = worker().model_runner
    for name in ("r1", "r2"):
        runner.request(name, 1, first=0)
    logits = torch.zeros(6, VOCAB)
    logits[[2, 4]] = torch.nan  # r1: its rejected draft; r2: its accepted one
    runner.step({"r1": states(3), "r2": states(3)}, logits, drafted={"r1": 2, "r2": 2}, accepted={"r1": 1, "r2": 2})
    assert not (folder / "r1.nan").exists()
    assert (folder / "r2.nan").read_text() == "1"


def test_blocks_of_a_request_are_read_from_the_tables_of_runner_v2(folder: Path) -> None:
    worker = Worker()
    runner: Any = worker.model_runner
    runner.req_states.req_id_to_index["r1"] = 2
    table = torch.arange(12, dtype=torch.int32).view(4, 3)
    runner.block_tables = SimpleNamespace(
        block_tables=[SimpleNamespace(gpu=table)], num_blocks=SimpleNamespace(np=np.array([[0, 0, 2, 0]]))
    )
    assert worker._fidelab.wrapped.block_ids("r1", 0) == [6, 7]


@mock.patch.dict(os.environ)
@pytest.mark.parametrize(("named", "value"), [("v1", "0"), ("v2", "1")])
def test_the_option_chooses_the_runner_here_and_in_a_server(
    named: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNNER_VARIABLE, "another")
    arm = asked("auto", model_runner=named)
    prepare(arm)
    assert os.environ[RUNNER_VARIABLE] == value
    assert serve_variables(arm)[RUNNER_VARIABLE] == value
    assert not any("runner" in word for word in serve_command(arm, "h", 1))


def test_without_the_option_vllm_chooses_its_runner_and_an_unknown_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUNNER_VARIABLE, raising=False)
    prepare(asked("auto"))
    assert RUNNER_VARIABLE not in os.environ
    with pytest.raises(UsageError, match="model-runner='v3' is not v1 or v2"):
        VLLMEngine.supports(asked("auto", model_runner="v3"))


@pytest.mark.parametrize(
    ("of_manager", "of_kernel", "expected"),
    [
        (528, 16, [*range(66, 99), *range(0, 33)]),
        (256, 16, [*range(32, 48), *range(0, 16)]),
        (48, 16, [6, 7, 8, 0, 1, 2]),
        (16, 16, [2, 0]),
    ],
)
def test_a_managers_block_is_so_many_consecutive_kernel_blocks(
    of_manager: int, of_kernel: int, expected: list[int]
) -> None:
    assert kernel_block_ids([2, 0], of_manager, of_kernel) == expected


@pytest.mark.parametrize(("of_manager", "of_kernel"), [(528, 64), (16, 32)])
def test_a_managers_block_that_is_not_a_multiple_is_one_clear_error(of_manager: int, of_kernel: int) -> None:
    said = (
        f"vLLM's cache has blocks of {of_manager} tokens, which are not a multiple of the attention kernel's "
        f"{of_kernel}: pass --engine-arg block-size={of_kernel}"
    )
    with pytest.raises(EngineError) as caught:
        kernel_block_ids([0], of_manager, of_kernel)
    assert str(caught.value) == said


@pytest.mark.parametrize("sizes_of", ["_kernel_block_sizes", "kernel_block_sizes"])
def test_a_hybrids_cache_is_read_back_from_the_kernels_blocks(
    sizes_of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = SimpleNamespace(current_platform=SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platform)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=platform))
    cache = torch.zeros(4 * 3, 1, 16, 2 * 8)  # four blocks of 48 tokens, as the kernel sees them
    layer = SimpleNamespace(
        impl=SimpleNamespace(), kv_cache=cache, kv_cache_dtype="auto", _k_scale_float=1.0, _v_scale_float=1.0
    )
    runner = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": layer}),
        kv_cache_config=SimpleNamespace(
            num_blocks=4,
            kv_cache_groups=[SimpleNamespace(layer_names=["a"], kv_cache_spec=SimpleNamespace(block_size=48))],
        ),
        requests={"r1": SimpleNamespace(block_ids=[[2]])},
        sample_tokens=None,
        _sample=None,
        **{sizes_of: [16]},
    )
    hook = vllm_capture._Hook(runner, CaptureWriter(tmp_path, lambda: True, logprobs=False))
    key, value = torch.randn(20, 1, 8), torch.randn(20, 1, 8)
    written = torch.cat((key, value), dim=-1)[:, 0]
    cache[6, 0], cache[7, 0, :4] = written[:16], written[16:]
    hook._given, hook._handles = {"a": (key, value)}, []
    hook._compare("r1")
    assert hook.read_back["matches"] == 1.0


@pytest.mark.parametrize(
    ("query_quant", "supported", "expected"), [(object(), True, True), (object(), False, False), (None, True, False)]
)
def test_queries_are_quantized_where_layer_and_implementation_agree(
    query_quant: object, supported: bool, expected: bool
) -> None:
    layer = SimpleNamespace(query_quant=query_quant, impl=SimpleNamespace(supports_quant_query_input=supported))
    assert quantizes_queries(layer) == expected


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        (torch.float8_e4m3fn, torch.bfloat16, True),
        (torch.bfloat16, torch.float8_e4m3fn, True),
        (torch.bfloat16, torch.bfloat16, False),
    ],
)
def test_queries_that_flashinfer_quantizes_itself_count(
    prefill: torch.dtype, decode: torch.dtype, expected: bool
) -> None:
    layer = SimpleNamespace(query_quant=None, impl=SimpleNamespace(supports_quant_query_input=False))
    builder = SimpleNamespace(q_data_type_prefill=prefill, q_data_type_decode=decode)
    assert quantizes_queries(layer, builder) == expected


@pytest.mark.parametrize(
    ("kv", "device", "options", "offered"),
    [
        ("fp8", "cuda", {}, True),
        ("fp8_e4m3", "cuda:1", {"max_model_len": "64"}, True),
        ("auto", "cuda", {}, False),
        ("bf16/fp8_e4m3", "cuda", {}, False),
        ("fp8", "cpu", {}, False),
        ("fp8", "cuda", {"attention_backend": "TRITON_ATTN"}, False),
    ],
)
def test_a_kernel_without_quantized_queries_is_offered_for_vllms_own_fp8_on_gpus(
    kv: str, device: str, options: dict[str, str], offered: bool
) -> None:
    arm = replace(asked(kv, Path("m"), **options), device=device)
    found = VLLMEngine.native_query_options(arm)
    config = {"backend": "FLASHINFER", "disable_flashinfer_q_quantization": True}
    assert {name: json.loads(text) for name, text in found.items()} == ({"attention-config": config} if offered else {})


def test_a_layer_of_vllm_on_cpus_quantizes_no_queries() -> None:
    assert not quantizes_queries(SimpleNamespace(impl=SimpleNamespace()))


@pytest.mark.parametrize(
    ("backend", "version", "said"),
    [
        ("FLASH_ATTN", 3, "FlashAttention 3 also quantized queries to FP8"),
        ("FLASHINFER", None, "FlashInfer also quantized queries to FP8"),
        ("TRITON_ATTN", None, "vLLM's Triton attention also quantized queries to FP8"),
    ],
)
def test_the_record_remarks_that_queries_were_quantized(backend: str, version: int | None, said: str) -> None:
    layer = {"quantizes_queries": True, "backend": backend, "flash_attention": version}
    assert remarks(CUDA, [{**layer, "quantizes_queries": False}], []) == []
    assert remarks(CUDA, [{**layer, "quantizes_queries": False}, layer], []) == [said]


@pytest.mark.parametrize(("platform", "n"), [("cuda", 1), ("cpu", 0)])
def test_the_record_remarks_what_is_not_vllms_default_on_cuda(platform: str, n: int) -> None:
    found = remarks(Backend(platform, "X"), [], ["Model Runner V1", "eager execution"])
    defaults = "vLLM's defaults on CUDA are Model Runner V2, graphs and asynchronous scheduling"
    assert found == [f"measured with Model Runner V1, eager execution; {defaults}"] * n
