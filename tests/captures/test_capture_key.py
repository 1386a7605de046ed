"""Keys: whatever an answer depends on makes another capture; what it does not depend on does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fidelab.captures.manifest import capture_folder, capture_key
from fidelab.captures.requests import Request
from fidelab.core import Arm, KVSpec
from fidelab.engines import ENGINES
from fidelab.engines.variables import variables_of
from tests.captures import sample

A, W, P = sample.ARM, sample.WINDOWS, sample.PROMPTS
BASE: dict[str, Any] = {"arm": A, "request": W, "versions": {"fake": "1", "torch": "2"}, "replicate": 0}


def place(arm: Arm, request: Request, versions: dict[str, str], replicate: int) -> tuple[dict[str, Any], Path]:
    key = capture_key(arm, request, versions, replicate)
    return key, capture_folder(Path("store"), arm, request, key)


CHANGES: dict[str, dict[str, Any]] = {
    "option-value": {"arm": replace(A, options=(("a", "2"),))},
    "option-gone": {"arm": replace(A, options=())},
    "format": {"arm": replace(A, kv=KVSpec.parse("int4"))},
    "format-option": {"arm": replace(A, kv=KVSpec.parse("bf16[group=32]"))},
    "skipped-layers": {"arm": replace(A, kv=KVSpec.parse("bf16[skip-layers=0]"))},
    "weights": {"arm": replace(A, weights="v" * 8)},
    "device": {"arm": replace(A, device="cuda")},
    "threads": {"arm": replace(A, threads=1)},
    "dtype": {"arm": replace(A, dtype="bfloat16")},
    "engine": {"arm": replace(A, engine="hf")},
    "probe-token": {"request": replace(W, windows=((1, 2, 3, 9), *W.windows[1:]))},
    "probe-rows": {"request": replace(W, first=0)},
    "probe-settings": {"request": replace(W, settings=(("n_ctx", 5), ("protocol", "half")))},
    "engine-version": {"versions": {"fake": "2", "torch": "2"}},
    "replicate": {"replicate": 1},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_the_answer_depends_on_makes_another_capture(change: dict[str, Any]) -> None:
    key, folder = place(**BASE)
    other_key, other_folder = place(**{**BASE, **change})
    assert key != other_key
    assert folder != other_folder


@pytest.mark.parametrize(
    "change",
    [
        {"arm": replace(A, name="another name")},
        {"arm": replace(A, path="elsewhere")},
        {"versions": {"torch": "2", "fake": "1"}},
    ],
    ids=["name", "path", "order"],
)
def test_names_and_places_do_not_matter(change: dict[str, Any]) -> None:
    assert place(**BASE) == place(**{**BASE, **change})


ARMS = {name: change["arm"] for name, change in CHANGES.items() if "arm" in change}


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS)
def test_a_fingerprint_sees_all_that_an_arm_computes(arm: Arm) -> None:
    assert arm.fingerprint() != A.fingerprint()


def test_the_batch_is_part_of_the_key_and_two_spellings_of_one_format_are_one_arm() -> None:
    assert place(**{**BASE, "request": P}) != place(**{**BASE, "request": replace(P, batch=8)})
    pair, single = KVSpec.parse("bf16/bf16"), KVSpec.parse("bf16")
    assert replace(A, kv=pair).fingerprint() == replace(A, kv=single).fingerprint()


def test_a_folder_name_stays_within_what_file_systems_allow() -> None:
    layers = ",".join(str(i) for i in range(200))
    arm = replace(A, model="m" * 300, kv=KVSpec.parse(f"int4[skip-layers={layers}]"))
    folder = place(**{**BASE, "arm": arm})[1]
    assert max(len(part.encode()) for part in folder.parts) <= 255


@pytest.mark.parametrize("model", ["../../etc", "/a/b/../c", "owner/name", "a b:c*?", ".."])
def test_a_folder_lies_in_the_store_whatever_the_model_is_called(model: str) -> None:
    folder = place(**{**BASE, "arm": replace(A, model=model)})[1]
    assert ".." not in folder.parts
    assert folder.parts[0] == "store"
    assert len(folder.parts) == 3


def variables(engine: str, **environment: str) -> dict[str, str]:
    return variables_of(ENGINES.load(engine), environment)


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *(("hf", name) for name in ("OMP_SCHEDULE", "MKL_CBWR", "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG")),
        *(("hf", name) for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCHINDUCTOR_MAX_AUTOTUNE")),
        *(("hf", name) for name in ("NVIDIA_TF32_OVERRIDE", "TRANSFORMERS_SDPA_FORCE_GQA")),
        *(("llamacpp", "LLAMA_ATTN_ROT_DISABLE"), ("llamacpp", "GGML_CUDA_FORCE_MMQ"), ("vllm", "K16V8")),
        *(
            ("vllm", f"VLLM_{of}")
            for of in ("USE_FLASHINFER_SAMPLER", "DISABLE_COMPILE_CACHE", "FUSED_MOE_CHUNK_TOKENS")
        ),
        *(("sglang", "SGLANG_USE_CPU_ENGINE"), ("fake", "FAKE_MOOD")),
    ],
)
def test_a_variable_that_an_engine_reads_counts_and_set_to_nothing_is_not_unset(engine: str, name: str) -> None:
    assert variables(engine, **{name: "1"}) == {name: "1"}
    assert variables(engine, **{name: ""}) == {name: ""}


@pytest.mark.parametrize(
    "name",
    [
        *("VLLM_API_KEY", "VLLM_S3_SECRET", "LMCACHE_AUTH_TOKEN", "LMCACHE_REDIS_PASSWORD", "VLLM_ACCESS_KEY_ID"),
        *("HF_TOKEN", "VLLM_API_KEYS", "VLLM_SERVICE_CREDENTIALS"),
    ],
)
def test_a_secret_is_nowhere(name: str) -> None:
    assert variables("vllm", **{name: "hunter2"}) == {}


def test_a_login_in_an_address_is_cut_out_and_a_server_has_variables_of_its_own() -> None:
    found = variables("vllm", LMCACHE_REMOTE_URL="redis://user:hunter2@host:6379/0")
    assert found == {"LMCACHE_REMOTE_URL": "redis://host:6379/0"}
    assert variables("openai", OMP_SCHEDULE="static", OPENAI_API_KEY="hunter2") == {}


@pytest.mark.parametrize(
    "name",
    [
        *("VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "FIDELAB_CACHE"),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TRANSFORMERS_VERBOSITY", "HOME", "SGLANG_USE_CPU_ENGINE"),
    ],
)
def test_what_no_number_of_this_engine_depends_on_does_not_count(name: str) -> None:
    assert variables("vllm", **{name: "1"}) == {}
