"""An arm as the command line of its engine's own server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fidelab.core import Arm, KVSpec
from fidelab.core.errors import NotSupportedError, UnknownNameError
from fidelab.engines import ENGINES
from fidelab.engines.k16v8 import meaning
from fidelab.engines.llamacpp.serve import python_server


def arm(engine: str, kv: str = "auto", device: str = "cpu", **options: str) -> Arm:
    named = tuple(sorted((key.replace("_", "-"), value) for key, value in options.items()))
    spec = meaning(KVSpec.parse(kv), "bf16")
    return Arm("x", engine, "owner/m", "owner/m", "", spec, "bfloat16", device, 2, named)


def words(one: Arm) -> str:
    return " ".join(ENGINES.load(one.engine).serve_command(one, "127.0.0.1", 8000))


def test_an_arm_that_says_nothing_leaves_everything_to_vllm_and_options_of_fidelabs_own_reach_no_server() -> None:
    plain = "vllm serve owner/m --dtype bfloat16 --host 127.0.0.1 --port 8000"
    assert words(arm("vllm")) == words(arm("vllm", estimator="yes", force="yes")) == plain


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("tp", "2", "--tensor-parallel-size 2"),
        ("kv_cache_memory", "4G", "--kv-cache-memory-bytes 4G"),
        ("chunked_prefill", "no", "--no-enable-chunked-prefill"),
        ("enforce_eager", "yes", "--enforce-eager"),
        ("no_async_scheduling", "yes", "--no-async-scheduling"),
        ("no_async_scheduling", "no", "--async-scheduling"),
        ("speculative_config", '{"method": "ngram"}', '--speculative-config {"method": "ngram"}'),
    ],
)
def test_options_are_flags_of_vllm(option: str, value: str, expected: str) -> None:
    assert f" owner/m {expected} --dtype" in words(arm("vllm", **{option: value}))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_the_address_comes_last_whatever_an_arm_asks_for(engine: str) -> None:
    one = replace(arm(engine, host="0", port="1", cache_type_k="q4_0"), path="/models/m")
    name = "--alias" if engine == "llamacpp" else "--served-model-name"
    assert words(one).split()[-6:] == [name, "owner/m", "--host", "127.0.0.1", "--port", "8000"]


def test_a_format_is_passed_on_where_it_is_not_the_engines_own() -> None:
    assert "--kv-cache-dtype fp8_e4m3" in words(arm("vllm", "fp8_e4m3"))
    assert "--kv-cache-dtype-skip-layers 0 4 5" in words(arm("vllm", "fp8_e4m3[skip-layers=0,4-5]"))
    assert "--kv-cache-dtype fp8_e5m2" in words(arm("sglang", "fp8_e5m2"))
    assert "--kv-cache-dtype" not in words(arm("sglang"))
    assert [("--disable-cuda-graph" in words(arm("sglang", kv))) for kv in ("k16v8", "auto")] == [True, False]
    assert "--cache-type-k f16 --cache-type-v q8_0" in words(arm("llamacpp", "f16/q8_0"))


def test_k16v8_is_a_backend_and_a_switch() -> None:
    one = arm("vllm", "k16v8", device="cuda")
    assert "--attention-backend CUSTOM" in words(one)
    assert "--kv-cache-dtype" not in words(one)
    assert ENGINES.load("vllm").serve_variables(one) == {"K16V8": "1"}


def test_sglang_gets_what_it_needs_on_a_cpu_and_has_no_flags_that_switch_off() -> None:
    assert "--device cpu --attention-backend torch_native --sampling-backend pytorch" in words(arm("sglang"))
    assert words(arm("sglang", attention_backend="intel_amx")).count("--attention-backend") == 1
    assert "backend" not in words(arm("sglang", device="cuda"))
    one = words(arm("sglang", device="cuda", disable_radix_cache="yes", enable_metrics="no", cuda_graph="off", tp="2"))
    assert "--model-path owner/m --disable-radix-cache --tp-size 2 --dtype bfloat16" in one
    assert "--device cuda --disable-cuda-graph" in one


def test_llama_server_has_names_of_its_own_and_all_layers_go_to_a_gpu_unless_the_arm_says_otherwise() -> None:
    one = words(arm("llamacpp", "q8_0", n_ctx="2048", n_batch="256", use_mmap="no", flash_attn="on"))
    assert "--model owner/m --flash-attn on --batch-size 256 --ctx-size 2048 --no-mmap --threads 2" in one
    assert "--n-gpu-layers" not in words(arm("llamacpp", "f16"))
    assert "--n-gpu-layers 999 --flash-attn" in words(arm("llamacpp", "f16", device="cuda"))
    placed = {"n_cpu_moe": "20", "tensor_split": "3,1", "devices": "none", "cpu_moe": "yes", "numa": "isolate"}
    shown = words(arm("llamacpp", "f16", flash_attn="auto", no_host="no", **placed))
    assert "--cpu-moe --device none --flash-attn auto --n-cpu-moe 20 --numa isolate --tensor-split 3,1" in shown
    assert shown.count("--host") == 1  # the address
    with pytest.raises(NotSupportedError, match="V = q4_0 needs flash attention: omit flash-attn=off"):
        words(arm("llamacpp", "q8_0/q4_0", flash_attn="0"))
    assert "--n-gpu-layers 999 --split-mode none --main-gpu 1" in words(arm("llamacpp", "f16", device="cuda:1"))
    assert words(arm("llamacpp", "f16", device="cuda", n_gpu_layers="7")).count("--n-gpu-layers") == 1


@pytest.mark.parametrize(("split", "rope"), [("2", "1"), ("row", "linear")])
def test_values_that_llama_cpp_counts_are_named_for_its_server_and_counted_for_the_other(split: str, rope: str) -> None:
    one = arm("llamacpp", "f16", split_mode=split, rope_scaling_type=rope)
    assert "--model owner/m --rope-scaling linear --split-mode row --threads 2" in words(one)
    assert " ".join(python_server(one, "127.0.0.1", 8000)).endswith("--rope_scaling_type 1 --split_mode 2")
    assert "--rope-scaling" not in words(arm("llamacpp", "f16", rope_scaling_type="-1"))


def test_the_server_of_llama_cpp_python_is_told_the_same_and_what_it_lacks_is_said() -> None:
    one = " ".join(
        python_server(arm("llamacpp", "f16/q8_0", n_ctx="2048", use_mmap="no", estimator="hidden"), "127.0.0.1", 8000)
    )
    assert one.startswith("python -m llama_cpp.server --model owner/m --model_alias owner/m --host 127.0.0.1")
    assert "--type_k 1 --type_v 8 --flash_attn true" in one
    assert one.endswith("--n_ctx 2048 --use_mmap false")
    one = " ".join(
        python_server(arm("llamacpp", "f16", n_gpu_layers="all", tensor_split="3,1", flash_attn="disabled"), "h", 1)
    )
    assert "--flash_attn false" in one
    assert one.endswith("--n_gpu_layers -1 --tensor_split 3 1")
    with pytest.raises(NotSupportedError, match="has no flash-attn=auto: put llama"):
        python_server(arm("llamacpp", "f16", flash_attn="auto"), "127.0.0.1", 8000)
    with pytest.raises(NotSupportedError, match=r"has no swa-full: put llama.cpp's own llama-server on PATH"):
        python_server(arm("llamacpp", "q8_0", swa_full="yes"), "127.0.0.1", 8000)
    with pytest.raises(UnknownNameError, match="unknown KV format of engine llamacpp 'int4'"):
        python_server(arm("llamacpp", "q8_0/int4"), "127.0.0.1", 8000)


def test_a_path_is_served_under_the_models_name_and_an_engine_without_a_server_says_so() -> None:
    for engine, flag in (("vllm", "--served-model-name"), ("sglang", "--served-model-name"), ("llamacpp", "--alias")):
        one = replace(arm(engine, "q8_0" if engine == "llamacpp" else "auto"), path="/models/m")
        assert f"{flag} owner/m" in words(one)
    with pytest.raises(NotSupportedError, match="engine hf has no server of its own"):
        words(arm("hf"))


def test_variables_of_the_arm_go_before_others() -> None:
    one = replace(arm("vllm"), env=(("OMP_NUM_THREADS", "7"), ("VLLM_X", "1")))
    variables = ENGINES.load("vllm").serve_variables(one)
    assert variables == {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "7", "VLLM_X": "1"}
