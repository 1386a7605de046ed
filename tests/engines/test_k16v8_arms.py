"""Arms of vLLM and SGLang on pairs of k16v8: what they take, how they are launched, when a pair is claimed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fidelab.core import Arm, KVSpec
from fidelab.core.errors import UsageError
from fidelab.core.sequence import KVLayer
from fidelab.engines import k16v8
from fidelab.engines.cache_formats import NATIVE_FORMAT
from fidelab.engines.checkpoint import shape_of
from fidelab.engines.k16v8 import K16V8, SWITCH, check_pair, is_pair, pair_format, read_back_layers
from fidelab.engines.sglang import launch as sglang_launch
from fidelab.engines.sglang import read_back as sglang_ran
from fidelab.engines.sglang.adapter import SGLangEngine
from fidelab.engines.sglang.launch import arguments, prepare
from fidelab.engines.vllm import launch as vllm_backend
from fidelab.engines.vllm import read_back as vllm_ran
from fidelab.engines.vllm.adapter import VLLMEngine
from fidelab.engines.vllm.launch import Backend

shared = pytest.importorskip("k16v8.plugins.shared")

PAGES = {"matches": 1.0, "disjoint": True, "saturated": 0, "k_format": "bf16", "v_format": "fp8_e4m3"}
SEEN = PAGES | {"skip_layers": []}
PAIRS = (
    *("bf16/fp8_e4m3", "bfloat16/int8", "int8/int4", "fp8_e4m3/int4", "int8/fp8_e4m3[scale=per-token-head]", "int4"),
    *("int8", "fp8_e4m3[scale=per-token-head]", "int8/int4[skip-layers=0,4-6]", "fp8_e4m3/bf16", "int8[group=64]/int4"),
    "bf16[kernels=k16v8]",
)
SWITCHED = {
    "auto": "0",
    "fp8_e4m3": "0",
    "bf16/fp8_e4m3": "1",
    "bfloat16/fp8_e4m3[scale=per-token-head]": "per-token-head",
    "bfloat16/int8": "bf16/int8",
    "int8[group=64]/fp8_e4m3[scale=per-token-head]": "int8/fp8_e4m3[scale=per-token-head]",
    "int4": "int4/int4",
    "bf16/fp8_e4m3[skip-layers=0,2]": "bf16/fp8_e4m3[skip-layers=0,2]",
}
OWN = ("auto", "fp8_e4m3", "nvfp4")


def _arm(engine: str, kv: str, dtype: str, device: str, options: dict[str, str]) -> Arm:
    named = tuple(sorted((key.replace("_", "-"), value) for key, value in options.items()))
    return Arm(kv, engine, "m", "m", "0" * 8, KVSpec.parse(kv), dtype, device, 1, named)


def vllm(kv: str = "bf16/fp8_e4m3", dtype: str = "bfloat16", **options: str) -> Arm:
    return _arm("vllm", kv, dtype, "cpu", options)


def sglang(kv: str = "bf16/fp8_e4m3", dtype: str = "bfloat16", device: str = "cpu", **options: str) -> Arm:
    return _arm("sglang", kv, dtype, device, options)


def test_names_and_bytes_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from k16v8.plugins.sglang.plugin import BACKEND

    assert (K16V8, SWITCH, K16V8) == (shared.LABEL, shared.SWITCH, BACKEND)
    for text in PAIRS:
        kv = KVSpec.parse(text)
        monkeypatch.setenv(SWITCH, "0")
        k16v8.set_switch(kv)
        formats = shared.switched()
        assert formats.skip_layers == kv.skip_layers
        named = tuple(x.kernel_name("torch.bfloat16") for x in (formats.k, formats.v))
        assert named == k16v8.kernel_names(kv)
        for layer in (0, 1):
            held = NATIVE_FORMAT if kv.skips(layer) else pair_format(kv)
            expected = formats.in_layer(layer).content_bytes(192, 128)
            assert sum(held.head_bytes(KVLayer(1, 192, 128), 2)) == expected


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_pair_is_the_packages_and_what_an_engine_has_stays_its_own(engine: str) -> None:
    assert all(check_pair(KVSpec.parse(text), engine) for text in PAIRS)
    assert not any(check_pair(KVSpec.parse(text), engine) for text in OWN)


@pytest.mark.parametrize("engine", [VLLMEngine, SGLangEngine])
@pytest.mark.parametrize(
    ("kv", "said"),
    [
        ("auto/fp8_e4m3", "is made of bf16, f16, fp8_e4m3, fp8_e4m3fnuz, int8, int4, by the plug-in of package k16v8"),
        ("bf16/fp8_e5m2", "not of fp8_e5m2"),
        ("bf16/fp8_e4m3[scale=per-channel]", "scale=per-channel is neither none nor per-token-head"),
        ("int8[scale=per-token-head]/int4", "int8 takes no scale on engine"),
        ("bf16[group=32]/int8", "bf16 takes no group on engine"),
        ("int8[group=x]/int4", "group=x is not a number of values"),
        ("bf16/bfloat16", "both sides are of 16 bits; write auto"),
        (
            "bf16[kernels=triton]",
            "take no options; pairs do, as in bf16/int8[skip-layers=0,4-29] or bf16[kernels=k16v8]",
        ),
        ("bf16[kernels=triton]/int8", "kernels=triton is not k16v8"),
        ("int8[kernels=k16v8]/int4", "int8 takes no kernels on engine"),
        ("f16", "it is a side of a pair, as in f16/int8; for both write auto"),
        ("fp8_e4m3[scale=1]", "take no options; pairs do, as in bf16/int8[skip-layers=0,4-29]"),
    ],
)
def test_what_paged_kernels_lack_is_refused_in_one_line(
    engine: type[VLLMEngine | SGLangEngine], kv: str, said: str
) -> None:
    with pytest.raises(UsageError) as caught:
        engine.check_kv(KVSpec.parse(kv))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kv", "dtype", "said"),
    [
        (
            "bf16/int8",
            "float16",
            "bf16/int8 keeps keys as bfloat16, the model computes in float16: pass --dtype bfloat16",
        ),
        (
            "int8/f16",
            "bfloat16",
            "int8/f16 keeps values as float16, the model computes in bfloat16: pass --dtype float16",
        ),
        ("int8/int4", "float32", "int8/int4 is for 16 bits, the model computes in float32: pass --dtype bfloat16"),
        ("int8[group=32]/int4", "bfloat16", "the paged kernels have one scale for each token and head: write int8"),
        ("int8/int4[skip-layers=30]", "bfloat16", "skip-layers=30: the model has layers 0–29"),
        ("int8/int4[skip-layers=0-29]", "bfloat16", "skip-layers leaves no layer to encode"),
        ("int8/int4[skip-layers=0,29]", "bfloat16", ""),
        ("int8[group=64]/int4", "bfloat16", ""),
    ],
)
def test_what_a_model_cannot_have_is_said_before_it_is_loaded(kv: str, dtype: str, said: str) -> None:
    found = k16v8.pair_refusal(vllm(kv, dtype), 64, 30)
    assert found.endswith(said)
    assert bool(found) == bool(said)


def test_int4_needs_an_even_head_dimension_and_a_trials_model_has_one_that_gpu_kernels_take() -> None:
    assert "a head dimension of 33 is not a multiple" in k16v8.pair_refusal(vllm("int8/int4"), 33, 30)
    from fidelab.environments import trial

    arm = _arm("vllm", "bf16/fp8_e4m3", "bfloat16", "cuda", {})
    assert k16v8.pair_refusal(arm, trial._HEAD_DIM, 2) == ""


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_head_dimension_that_the_gpu_kernels_lack_is_refused_on_gpus_alone(engine: str) -> None:
    on_gpu, on_cpu = (_arm(engine, "bf16/fp8_e4m3", "bfloat16", device, {}) for device in ("cuda", "cpu"))
    said = k16v8.pair_refusal(on_gpu, 32, 2)
    assert said == "bf16/fp8_e4m3: the GPU kernels take head dimensions of 64, 80, 96, 128, 256; this model's is 32"
    assert k16v8.pair_refusal(on_cpu, 32, 2) == ""


def test_the_worst_layer_counts_and_skipped_layers_are_told_by_what_they_hold() -> None:
    wide = PAGES | {"v_format": "bf16"}
    found = read_back_layers({0: wide, 1: PAGES | {"matches": 0.5, "saturated": 3}, 2: PAGES}, [0])
    assert (found["matches"], found["saturated"], found["layers"]) == (0.5, 3, 3)
    assert (found["v_format"], found["skip_layers"]) == ("fp8_e4m3", [0])
    kv = KVSpec.parse("bf16/fp8_e4m3[skip-layers=0]")
    assert "counted" not in found
    counted = [PAGES | {"counted": [1, 2]}, PAGES | {"counted": [0, 3]}]
    assert read_back_layers(dict(enumerate(counted)), [])["counted"] == [1, 5]
    assert k16v8.holds_pair(kv, read_back_layers({0: wide, 1: PAGES}, [0]))
    assert not k16v8.holds_pair(kv, read_back_layers({0: PAGES, 1: PAGES}, [0]))  # it was not skipped
    assert not k16v8.holds_pair(KVSpec.parse("bf16/int8"), SEEN)


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
    backend = Backend("cpu", K16V8)
    found = vllm_ran._pair_as(vllm(), backend, {"read_back": seen}, [LAYER, layer])
    assert (found == ("bf16", "fp8_e4m3")) is claimed


@pytest.mark.parametrize("kv", SWITCHED)
def test_an_arm_of_vllm_sets_the_switch_whatever_it_was(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*vllm_backend._QUIET, *vllm_backend._REQUIRED_ENVIRONMENT, "OMP_NUM_THREADS", "VLLM_PLUGINS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv(SWITCH, "1" if not is_pair(KVSpec.parse(kv)) else "0")
    threads = torch.get_num_threads()
    vllm_backend.prepare(vllm(kv))
    torch.set_num_threads(threads)
    assert os.environ[SWITCH] == SWITCHED[kv]
    assert os.environ["VLLM_PLUGINS"].split(",")[-2:] == ["fidelab_capture", "k16v8"]


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
    assert reason in vllm_backend._k16v8_cannot(asked, shape_of(str(tmp_path)))


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


@pytest.mark.parametrize("kv", SWITCHED)
def test_an_arm_of_sglang_sets_the_switch_whatever_it_was(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (sglang_launch._LONGER, sglang_launch._CPU_ENGINE, sglang_launch._CPU_CORES, "HF_HUB_OFFLINE")
    for name in (*names, "OMP_NUM_THREADS", sglang_launch._PLUGINS):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv(SWITCH, "1" if not is_pair(KVSpec.parse(kv)) else "0")
    prepare(sglang(kv), 1)
    assert os.environ[SWITCH] == SWITCHED[kv]
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
    assert sglang_ran._expected(sglang("int8/int4[skip-layers=1]"), about) == 3 * (100 + 256)
    assert sglang_ran._expected(sglang("auto"), about) == 2 * 2 * 3 * 128
    assert sglang_ran._expected(sglang(), about) == 2 * 3 * 192
    assert sglang_ran._expected(sglang("bf16/fp8_e4m3[scale=per-token-head]"), about) == 2 * 3 * 194
