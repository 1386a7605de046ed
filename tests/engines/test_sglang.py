"""Engine sglang where SGLang is not: settings, verdicts, what is made of a description, and the hooks of the plug-in.

The hooks are given batches as SGLang's scheduler makes them; ``tests/real/test_sglang.py`` runs the real one.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fidelab.core import Arm, KVSpec, Speculation
from fidelab.core.errors import NotSupportedError, UsageError
from fidelab.engines.sglang import capture as sglang_capture
from fidelab.engines.sglang import launch as sglang_launch
from fidelab.engines.sglang.adapter import SGLangEngine
from fidelab.engines.sglang.capture import _Capture, _end
from fidelab.engines.sglang.launch import arguments
from fidelab.engines.sglang.read_back import _scales, _stored_format
from fidelab.engines.sglang.session import SGLangRequest, SGLangSession, _counted
from fidelab.engines.speculation import Drafts
from fidelab.engines.written import watched

WIDTH, VOCAB = 4, 6


def arm(kv: str = "auto", device: str = "cpu", dtype: str = "bfloat16", **options: str) -> Arm:
    named = tuple((key.replace("_", "-"), value) for key, value in options.items())
    return Arm(kv, "sglang", "m", "/models/m", "0" * 8, KVSpec.parse(kv), dtype, device, 1, named)


@pytest.mark.parametrize(
    "options", [{"tp": "0"}, {"mem_fraction_static": "2"}, {"cuda_graph": "perhaps"}, {"chunked_prefill_size": "-2"}]
)
def test_a_value_that_cannot_be_is_refused(options: dict[str, str]) -> None:
    [value] = options.values()
    with pytest.raises(UsageError, match=f"'{value}' is not"):
        SGLangEngine.supports(arm(**options))


def test_an_option_replaces_what_we_would_pass() -> None:
    ours, theirs = arguments(arm()), arguments(arm(max_total_tokens="99", attention_backend="triton"))
    assert (ours["attention_backend"], theirs["attention_backend"]) == ("torch_native", "triton")
    assert theirs["max_total_tokens"] == 99
    assert {key for key in ours if ours[key] != theirs[key]} == {"attention_backend", "max_total_tokens"}


def test_on_a_gpu_the_engine_chooses_its_backends_and_its_cache() -> None:
    passed = arguments(arm(device="cuda:1", kv="fp8_e4m3"))
    assert (passed["device"], passed["base_gpu_id"], passed["kv_cache_dtype"]) == ("cuda", 1, "fp8_e4m3")
    assert not {"attention_backend", "sampling_backend", "max_total_tokens"} & passed.keys()


@pytest.mark.parametrize("kv", ["auto", "bf16", "bfloat16"])
def test_a_cpu_keeps_the_types_of_the_model(kv: str) -> None:
    assert SGLangEngine.supports(arm(kv)).ok


@pytest.mark.parametrize(
    ("flags", "operators", "ok"), [({"avx512f"}, True, False), ({"amx_tile"}, False, False), ({"amx_tile"}, True, True)]
)
def test_fp8_on_a_cpu_wants_amx_and_operators_for_it(
    flags: set[str], operators: bool, ok: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").touch()
    if operators:
        (tmp_path / "sgl_kernel" / "common_ops.abi3.so").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sglang_launch, "_cpu_flags", lambda: frozenset(flags))
    verdict = SGLangEngine.supports(arm("fp8_e4m3"))
    assert (verdict.ok, "AMX" in verdict.reason) == (ok, not ok)


@pytest.mark.parametrize("kv", ["fp8_e5m2", "nvfp4", "mxfp8"])
def test_other_formats_are_refused_on_a_cpu_and_passed_on_to_a_gpu(kv: str) -> None:
    verdict = SGLangEngine.supports(arm(kv))
    assert (verdict.ok, kv in verdict.reason) == (False, True)
    assert SGLangEngine.supports(arm(kv, device="cuda")).ok


@pytest.mark.parametrize("kv", ["fp8_e4m3[scale=2]", "auto[skip-layers=0]"])
def test_formats_take_no_options(kv: str) -> None:
    with pytest.raises(UsageError, match="take no options"):
        SGLangEngine.check_kv(KVSpec.parse(kv))


def described(dtype: str = "bfloat16", **changes: Any) -> dict[str, Any]:
    cache: dict[str, Any] = {
        "dtype": dtype,
        "pool": ["MHATokenToKVPool"],
        "method": "unquantized",
        "values_per_scale": None,
    }
    cache |= {"matches": 1.0, "layer_scales": [[1.0, 1.0]], **changes}
    return {"compute_dtype": "bfloat16", "scale_parameters": changes.get("scale_parameters", 0), "cache": cache}


@pytest.mark.parametrize(
    ("asked", "about", "found"),
    [
        ("auto", described(), "auto"),
        ("auto", described("float8_e4m3fn"), "float8_e4m3fn"),  # a checkpoint may choose for itself
        ("bf16", described(), "bf16"),
        ("fp8_e4m3", described("float8_e4m3fn"), "fp8_e4m3"),
        ("fp8_e4m3", described("float8_e4m3fnuz"), "fp8_e4m3"),
        ("fp8_e4m3", described(), "bfloat16"),
        ("fp8_e5m2", described("float8_e4m3fn"), "float8_e4m3fn"),
        ("fp8_e4m3", described("float8_e4m3fn", matches=None), "fp8_e4m3"),
        ("fp8_e4m3", described("float8_e4m3fn", matches=0.5), None),
        ("mxfp8", described("float8_e4m3fn", pool=["MHATokenToKVPoolMXFP8"], values_per_scale=32.0), "mxfp8"),
        ("nvfp4", described("float4_e2m1fn_x2", method="nvfp4", values_per_scale=16.0), "nvfp4"),
        ("nvfp4", described("float4_e2m1fn_x2", method="fp4_mx_block16", values_per_scale=16.0), "fp4_mx_block16"),
    ],
)
def test_a_format_is_claimed_where_the_storage_proves_it(asked: str, about: dict[str, Any], found: str | None) -> None:
    assert _stored_format(asked, about) == found


@pytest.mark.parametrize(
    ("about", "source", "granularity"),
    [
        (described(), None, None),
        (described("float8_e4m3fn"), "1.0, the engine's default", "layer"),
        (described("float8_e4m3fn", layer_scales=[[0.5, 0.25]]), "set by the engine", "layer"),
        (described("float8_e4m3fn", scale_parameters=4), "checkpoint", "layer"),
        (described("float4_e2m1fn_x2", values_per_scale=16.0), "computed when written", "16 values"),
    ],
)
def test_the_record_says_where_scales_come_from(about: dict[str, Any], source: str, granularity: str) -> None:
    assert _scales(about) == {"scale_source": source, "scale_granularity": granularity}


class Mode:
    def __init__(self, extend: bool) -> None:
        self._extend = extend

    def is_extend(self) -> bool:
        return self._extend


def extend(parts: Sequence[tuple[str, int, int]]) -> Any:
    """A prefill of (request, tokens in the cache before, new tokens)."""
    rids, before, new = zip(*parts, strict=True)
    return SimpleNamespace(
        rids=list(rids), forward_mode=Mode(True), extend_prefix_lens_cpu=list(before), extend_seq_lens_cpu=list(new)
    )


def decode(parts: Sequence[tuple[str, int]]) -> Any:
    """A step of (request, tokens in the cache after)."""
    rids, after = zip(*parts, strict=True)
    return SimpleNamespace(rids=list(rids), forward_mode=Mode(False), seq_lens_cpu=torch.tensor(after))


def state(request: str, position: int) -> Tensor:
    """The state of a position, which names both."""
    return torch.tensor([float(request.split("-")[1]), float(position), 0, 1])


class Scheduler:
    """Runs batches through the hooks, with states that say whose they are and logits that say after how many tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.capture = _Capture(folder, logprobs=False)

    def ask(self, request: str, tokens: int, first: int, **asked: Any) -> None:
        wanted = {"tokens": tokens, "first": first, "live": 0, "force": [], "about": False, **asked}
        (self.folder / f"{request}.json").write_text(json.dumps(wanted))

    def run(self, batch: Any, draft: bool = False, broken: Sequence[int] = (), width: int | None = None) -> Tensor:
        """One forward and the tokens that follow; token 5 is sampled everywhere."""
        config = SimpleNamespace(num_hidden_layers=2)
        runner = SimpleNamespace(is_draft_worker=draft, model=nn.Linear(1, 1), model_config=config)
        if batch.forward_mode.is_extend():
            spans = zip(batch.rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
            rows = [state(rid, start + i) for rid, start, n in spans for i in range(n)]
        else:
            rows = [state(rid, int(n) - 1) for rid, n in zip(batch.rids, batch.seq_lens_cpu, strict=True)]
        logits = torch.tensor([float(_end(batch, i)) for i in range(len(batch.rids))])[:, None].repeat(1, VOCAB)
        logits[list(broken)] = float("nan")
        states = torch.stack(rows)[:width]
        output = SimpleNamespace(logits_output=SimpleNamespace(hidden_states=states, next_token_logits=logits))
        self.capture.forward(lambda *_: output, runner, batch)
        sampled = torch.full((len(batch.rids),), 5)
        self.capture.sample(sampled, runner, output.logits_output, batch)
        return sampled

    def positions(self, request: str) -> list[int]:
        """Of the rows that were kept, each of which must be the request's."""
        rows = np.fromfile(self.folder / f"{request}.rows", dtype=np.float32).reshape(-1, WIDTH)
        assert set(rows[:, 0]) == {float(request.split("-")[1])}
        return [int(position) for position in rows[:, 1]]


@pytest.fixture
def scheduler(tmp_path: Path) -> Scheduler:
    return Scheduler(tmp_path)


def test_the_plug_in_does_nothing_outside_our_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sglang_capture.FOLDER, raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)  # an import would fail
    sglang_capture.register()


def test_rows_of_a_ragged_batch_go_to_their_requests(scheduler: Scheduler) -> None:
    scheduler.ask("fidelab-1", 3, 0)
    scheduler.ask("fidelab-2", 5, 3)
    scheduler.run(extend([("fidelab-1", 0, 3), ("fidelab-2", 0, 5), ("other-7", 0, 4)]))
    scheduler.run(decode([("other-7", 5), ("fidelab-2", 6), ("fidelab-1", 4)]))
    assert scheduler.positions("fidelab-1") == [0, 1, 2, 3]
    assert scheduler.positions("fidelab-2") == [3, 4, 5]
    assert {path.name for path in scheduler.folder.glob("*.rows")} == {"fidelab-1.rows", "fidelab-2.rows"}


def test_rows_of_a_prompt_in_chunks_are_kept_once_each(scheduler: Scheduler) -> None:
    scheduler.ask("fidelab-1", 8, 4, live=1)
    for start in (0, 3, 6):
        scheduler.run(extend([("fidelab-1", start, min(3, 8 - start))]))
    assert scheduler.positions("fidelab-1") == [4, 5, 6, 7]
    live = np.fromfile(scheduler.folder / "fidelab-1.live", dtype=np.float32)
    assert live.tolist() == [8.0] * VOCAB  # those of the last chunk alone, after which a token is sampled


def test_layers_that_cannot_be_read_are_refused_and_end_no_scheduler(scheduler: Scheduler) -> None:
    scheduler.ask("fidelab-1", 3, 0, layers=True)
    scheduler.run(extend([("fidelab-1", 0, 3), ("other-7", 0, 4)]))
    assert scheduler.positions("fidelab-1") == [0, 1, 2]
    session = SGLangSession.__new__(SGLangSession)
    session._folder, session._dtype, session._width, session._vocabulary = scheduler.folder, "float32", WIDTH, VOCAB
    with pytest.raises(NotSupportedError, match="SGLang's layers cannot be read: Linear has no list of its 2 decoder"):
        session._response(SGLangRequest((1, 2, 3), first=0, layers=True), "fidelab-1", [5])


def test_a_request_that_is_computed_again_is_not_kept_twice(scheduler: Scheduler) -> None:
    scheduler.ask("fidelab-1", 3, 2)
    scheduler.run(extend([("fidelab-1", 0, 3)]))
    scheduler.run(decode([("fidelab-1", 4)]))
    scheduler.run(extend([("fidelab-1", 0, 5)]))
    assert scheduler.positions("fidelab-1") == [2, 3, 4]


def test_draft_workers_enter_no_capture_and_are_not_forced(scheduler: Scheduler) -> None:
    scheduler.ask("fidelab-1", 3, 0, force=[1, 2])
    assert scheduler.run(extend([("fidelab-1", 0, 3)]), draft=True).tolist() == [5]
    assert not list(scheduler.folder.glob("*.rows"))


def test_forced_tokens_replace_the_sampled_ones_in_order(scheduler: Scheduler) -> None:
    scheduler.ask("fidelab-1", 4, 3, force=[1, 2])
    taken = [scheduler.run(extend([("fidelab-1", start, 2), ("other-2", 0, 1)])) for start in (0, 2)]
    taken += [scheduler.run(decode([("other-2", 2 + n), ("fidelab-1", 5 + n)])) for n in range(2)]
    assert [step.tolist() for step in taken] == [[5, 5], [1, 5], [5, 2], [5, 5]]


def test_the_first_step_with_nan_logits_is_noted(scheduler: Scheduler) -> None:
    scheduler.ask("fidelab-1", 2, 1)
    scheduler.ask("fidelab-2", 2, 1)
    scheduler.run(extend([("fidelab-1", 0, 2), ("fidelab-2", 0, 2)]))
    for length in (3, 4):
        scheduler.run(decode([("fidelab-1", length), ("fidelab-2", length)]), broken=[1])
    assert (scheduler.folder / "fidelab-2.nan").read_text() == "1"
    assert not (scheduler.folder / "fidelab-1.nan").exists()


def test_states_that_are_missing_are_an_error_with_its_cause_written_down(scheduler: Scheduler) -> None:
    scheduler.ask("fidelab-1", 3, 0)
    with pytest.raises(RuntimeError, match="2 hidden states for 3 tokens"):
        scheduler.run(extend([("fidelab-1", 0, 3)]), width=2)
    assert "2 hidden states for 3 tokens" in (scheduler.folder / "failure.txt").read_text()


def _sliced(parameter: Tensor) -> None:
    parameter.data[1:].copy_(torch.ones(1, 2))


def _narrowed(parameter: Tensor) -> None:
    parameter.data.narrow(0, 0, 1).fill_(2)


def _replaced(parameter: nn.Parameter) -> None:
    parameter.data = torch.ones(2, 2)


def _in_a_thread(parameter: Tensor) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(parameter.data.copy_, torch.ones(2, 2)).result()


@pytest.mark.parametrize("write", [_sliced, _narrowed, _replaced, _in_a_thread])
def test_whatever_way_a_parameter_is_written_is_seen(write: Callable[[Any], None]) -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(2, 2)) for name in ("a", "b")})
    with watched(model) as ledger:
        write(model["a"])
        _ = model["b"] @ model["b"]
    assert ledger.untouched() == ["b"]
    assert ThreadPoolExecutor.submit.__qualname__ == "ThreadPoolExecutor.submit"


def test_drafts_are_read_from_sglangs_own_options_and_counted_from_the_meta_info() -> None:
    options = {"speculative-algorithm": "ngram", "speculative-num-draft-tokens": "4"}
    assert SGLangEngine.speculation(options) == Speculation("NGRAM", 3, None, "", tuple(options))
    assert SGLangEngine.speculation({"page-size": "1"}) is None
    meta = {"spec_verify_ct": 5, "spec_num_proposed_drafts": 15, "spec_num_correct_drafts": 9, "completion_tokens": 14}
    assert _counted(meta) == Drafts(5, 15, 9)
    assert _counted({"completion_tokens": 14}) == Drafts()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speculative-algorithm": "NGRAN"}, "speculative-algorithm 'NGRAN' is unknown; there are: NGRAM, "),
        ({"speculative-algorithm": "EAGLE3"}, "EAGLE3 needs speculative-draft-model-path=MODEL"),
        ({"speculative-num-steps": "3"}, "speculative-num-steps: nothing drafts here; give speculative-algorithm"),
    ],
)
def test_a_speculation_that_lacks_something_is_one_line(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        SGLangEngine.speculation(options)
