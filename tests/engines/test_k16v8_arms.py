"""Arms of vLLM and SGLang on K16/V8: what they take, how they are launched, when the pair is claimed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fidelab.core import Arm, KVSpec
from fidelab.engines.k16v8 import K16V8, SWITCH, content_bytes
from fidelab.engines.sglang import launch as sglang_launch
from fidelab.engines.sglang import read_back as sglang_ran
from fidelab.engines.sglang.adapter import SGLangEngine
from fidelab.engines.sglang.launch import arguments, prepare
from fidelab.engines.vllm import launch as vllm_backend
from fidelab.engines.vllm import read_back as vllm_ran
from fidelab.engines.vllm.adapter import VLLMEngine
from fidelab.engines.vllm.launch import Backend
from fidelab.errors import UsageError

shared = pytest.importorskip("k16v8.plugins.shared")

SEEN = {"matches": 1.0, "disjoint": True}


def _arm(engine: str, kv: str, dtype: str, device: str, options: dict[str, str]) -> Arm:
    named = tuple(sorted((key.replace("_", "-"), value) for key, value in options.items()))
    return Arm(kv, engine, "m", "m", "0" * 8, KVSpec.parse(kv), dtype, device, 1, named)


def vllm(kv: str = "bf16/fp8_e4m3", dtype: str = "bfloat16", **options: str) -> Arm:
    return _arm("vllm", kv, dtype, "cpu", options)


def sglang(kv: str = "bf16/fp8_e4m3", dtype: str = "bfloat16", device: str = "cpu", **options: str) -> Arm:
    return _arm("sglang", kv, dtype, device, options)


def test_names_and_bytes_are_those_of_the_package() -> None:
    from k16v8.plugins.sglang.plugin import BACKEND

    assert (K16V8, SWITCH, K16V8) == (shared.LABEL, shared.SWITCH, BACKEND)
    for scaling in ("none", "per-token-head"):
        assert content_bytes(192, 128, scaling) == shared.content_bytes(192, 128, scaling)


# ------------------------------------------------------------------------------------------------------ vLLM


LAYER = {"dtype": "bfloat16", "label": f"{K16V8} (torch)"}


@pytest.mark.parametrize(
    ("seen", "layer", "claimed"),
    [
        (SEEN, LAYER, True),
        (SEEN | {"matches": 0.9999}, LAYER, False),
        (SEEN | {"disjoint": False}, LAYER, False),
        ({}, LAYER, False),
        (SEEN, LAYER | {"label": None}, False),
    ],
)
def test_vllm_claims_the_pair_on_full_proof_alone(
    seen: dict[str, object], layer: dict[str, object], claimed: bool
) -> None:
    backend = Backend("cpu", K16V8, (K16V8,), True)
    found = vllm_ran._pair_as(vllm(), backend, {"read_back": seen}, [LAYER, layer])
    assert (found == ("bf16", "fp8_e4m3")) is claimed


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3", "bf16/fp8_e4m3", "bfloat16/fp8_e4m3[scale=per-token-head]"])
def test_an_arm_of_vllm_sets_the_switch_whatever_it_was(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*vllm_backend._QUIET, *vllm_backend._OURS, "OMP_NUM_THREADS", "VLLM_PLUGINS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv(SWITCH, "1" if "/" not in kv else "0")
    threads = torch.get_num_threads()
    vllm_backend.prepare(vllm(kv))
    torch.set_num_threads(threads)
    assert os.environ[SWITCH] == {"bf16/fp8_e4m3": "1", "auto": "0", "fp8_e4m3": "0"}.get(kv, "per-token-head")
    assert os.environ["VLLM_PLUGINS"].split(",")[-2:] == ["fidelab_capture", "k16v8"]


@pytest.mark.parametrize("kv", ["bf16/fp8_e4m3", "float16/fp8_e4m3", "bf16/fp8_e4m3[scale=per-token-head]"])
def test_vllm_takes_the_one_pair(kv: str) -> None:
    VLLMEngine.check_kv(KVSpec.parse(kv))


@pytest.mark.parametrize(
    "kv", ["auto/fp8_e4m3", "fp8_e4m3/bf16", "bf16/fp8_e5m2", "bf16/fp8_e4m3[scale=per-channel]", "bf16/bfloat16"]
)
def test_vllm_refuses_other_pairs_with_the_one_that_there_is(kv: str) -> None:
    with pytest.raises(UsageError, match="the one pair is k16v8"):
        VLLMEngine.check_kv(KVSpec.parse(kv))


@pytest.mark.parametrize(
    ("asked", "config", "reason"),
    [
        (vllm(dtype="float32"), "{}", "keeps keys as bfloat16, the model computes in float32"),
        (vllm(attention_backend="CPU_ATTN"), "{}", "is an attention backend of its own"),
        (vllm(), '{"kv_lora_rank": 4}', "this model keeps latents"),
    ],
)
def test_what_the_backend_lacks_is_said_before_anything_loads(
    asked: Arm, config: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(config)
    assert reason in vllm_backend._k16v8_cannot(asked, vllm_backend._shape(str(tmp_path)))


# ---------------------------------------------------------------------------------------------------- SGLang


@pytest.mark.parametrize("kv", ["bf16/fp8_e4m3", "float16/fp8_e4m3", "bf16/fp8_e4m3[scale=per-token-head]", "auto"])
def test_sglang_takes_the_one_pair(kv: str) -> None:
    SGLangEngine.check_kv(KVSpec.parse(kv))


@pytest.mark.parametrize(
    "kv", ["auto/fp8_e4m3", "fp8_e4m3/bf16", "bf16/fp8_e5m2", "bf16/fp8_e4m3[scale=per-channel]", "bf16/bfloat16"]
)
def test_sglang_refuses_other_pairs_with_the_one_that_there_is(kv: str) -> None:
    with pytest.raises(UsageError, match="the one pair is k16v8"):
        SGLangEngine.check_kv(KVSpec.parse(kv))


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (sglang(dtype="float32"), "keeps keys as bfloat16, the model computes in float32"),
        (sglang(attention_backend="triton"), "is an attention backend of its own"),
        (sglang(cuda_graph="on"), "runs without graphs"),
        (sglang(device="cuda", page_size="1"), "reads pages of 16, 32, 64, 128 tokens on GPUs, not 1"),
    ],
)
def test_what_the_plug_in_of_sglang_lacks_is_said_before_anything_loads(
    asked: Arm, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "version", lambda _name: "0.5.23")
    assert SGLangEngine.supports(sglang(page_size="1")).ok
    assert SGLangEngine.supports(sglang(device="cuda")).ok
    verdict = SGLangEngine.supports(asked)
    assert (verdict.ok, what in verdict.reason) == (False, True)


def test_a_pair_is_launched_with_our_backend_and_sglangs_own_cache_type() -> None:
    passed = arguments(sglang())
    assert (passed["attention_backend"], passed["kv_cache_dtype"]) == (K16V8, "auto")
    assert "page_size" not in passed
    assert arguments(sglang(device="cuda"))["page_size"] == 16
    assert arguments(sglang(device="cuda", page_size="64"))["page_size"] == 64


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3", "bf16/fp8_e4m3", "bfloat16/fp8_e4m3[scale=per-token-head]"])
def test_an_arm_of_sglang_sets_the_switch_whatever_it_was(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (sglang_launch._LONGER, sglang_launch._CPU_ENGINE, sglang_launch._CPU_CORES, "HF_HUB_OFFLINE")
    for name in (*names, "OMP_NUM_THREADS", sglang_launch._PLUGINS):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv(SWITCH, "1" if "/" not in kv else "0")
    prepare(sglang(kv), 1)
    assert os.environ[SWITCH] == {"bf16/fp8_e4m3": "1", "auto": "0", "fp8_e4m3": "0"}.get(kv, "per-token-head")
    assert os.environ["SGLANG_PLUGINS"] == "1,fidelab_capture,k16v8"


@pytest.mark.parametrize(
    ("attention", "seen", "claimed"),
    [
        (f"{K16V8} (torch)", SEEN, True),
        (f"{K16V8} (torch)", SEEN | {"matches": 0.9999}, False),
        (f"{K16V8} (torch)", SEEN | {"disjoint": False}, False),
        (f"{K16V8} (torch)", {}, False),
        ("TorchNativeAttnBackend", SEEN, False),
    ],
)
def test_sglang_claims_the_pair_on_full_proof_alone(attention: str, seen: dict[str, object], claimed: bool) -> None:
    about = {"attention": attention, "cache": {"dtype": "uint8", "read_back": seen}}
    assert (sglang_ran._pair_as(sglang(), about) == ("bf16", "fp8_e4m3")) is claimed


def test_expected_bytes_are_those_of_keys_values_and_scales() -> None:
    about = {"compute_dtype": "bfloat16", "cache": {"values_per_token": 2 * 3 * 128, "heads": [[3, 64, 64]] * 2}}
    assert sglang_ran._expected(sglang("auto"), about) == 2 * 2 * 3 * 128
    assert sglang_ran._expected(sglang(), about) == 2 * 3 * 192
    assert sglang_ran._expected(sglang("bf16/fp8_e4m3[scale=per-token-head]"), about) == 2 * 3 * 194
