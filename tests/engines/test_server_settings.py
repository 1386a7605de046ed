"""What servers say about their settings, from a small real HTTP server that answers as each engine's does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace

import pytest

from fidelab.core import Arm, KVSpec
from fidelab.core.errors import EngineError
from fidelab.engines.openai.http import Client
from fidelab.engines.server_settings import Finding, findings
from tests.bench.load.sse_server import Talk, sized
from tests.bench.load.sse_server import serve as scripted

Serve = Callable[[Mapping[str, str]], Client]

VLLM_LOG = (
    "(APIServer pid=1) INFO [api.py:1] non-default args: {'model': 'm', 'max_num_seqs': 8, 'dtype': 'bfloat16'}\n"
    "(EngineCore pid=2) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m', "
    "speculative_config=SpeculativeConfig(method='ngram', model=None, num_spec_tokens=3), dtype=torch.bfloat16, "
    "max_seq_len=2048, tensor_parallel_size=1, quantization=None, enforce_eager=False, kv_cache_dtype=auto, "
    "enable_prefix_caching=True, enable_chunked_prefill=True\n"
    "(Worker pid=3) INFO [cuda.py:1] Using FLASH_ATTN attention backend out of potential backends: [...]\n"
    "(EngineCore pid=2) INFO [kv_cache_utils.py:1] GPU KV cache size: 11,648 tokens\n"
)
VLLM = {
    "/v1/models": json.dumps({"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 2048}]}),
    "/metrics": 'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",enable_prefix_caching="True",'
    'kv_cache_memory_bytes="268435456"} 1.0\nvllm:spec_decode_num_drafts_total{engine="0"} 0.0\n',
}
SGLANG = {
    "/v1/models": json.dumps({"data": [{"id": "m", "owned_by": "sglang", "max_model_len": 4096}]}),
    "/server_info": json.dumps(
        {"kv_cache_dtype": "auto", "dtype": "float16", "attention_backend": "triton", "max_total_tokens": None}
        | {"max_total_num_tokens": 8192, "speculative_algorithm": None, "tp_size": 2, "disable_radix_cache": False}
    ),
}


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Answers GET by path, each a text; other paths are 404."""
    with ExitStack() as stack:

        def start(answers: Mapping[str, str]) -> Client:
            async def script(talk: Talk) -> None:
                path = talk.head.split()[1].decode()
                talk.send(sized(answers.get(path, "not here").encode(), b"200 OK" if path in answers else b"404 No"))

            return Client(stack.enter_context(scripted(script)).url.removesuffix("/v1"), None, 10)

        yield start


def arm(engine: str, kv: str = "auto", dtype: str = "bfloat16", **options: str) -> Arm:
    named = tuple(sorted((key.replace("_", "-"), value) for key, value in options.items()))
    return Arm("x", engine, "m", "m", "", KVSpec.parse(kv), dtype, "cpu", 1, named)


def by_name(found: list[Finding]) -> dict[str, Finding]:
    return {one.what: one for one in found}


def test_vllm_tells_by_its_metrics_and_its_log_and_less_without_a_log(serve: Serve) -> None:
    declared = arm("vllm", max_model_len="2048", kv_cache_memory="256M", max_num_seqs="8", enforce_eager="no", tp="1")
    found = by_name(findings(declared, serve(VLLM), VLLM_LOG))
    assert {name for name, one in found.items() if one.differs} == {"speculation"}  # which was not declared
    assert found["KV type"].effective == "auto"
    assert found["attention backend"].effective == "FLASH_ATTN"
    assert found["speculation"].effective == "ngram, 3"
    assert (found["pool size"].effective, found["pool size"].more) == ("268435456", "11,648 tokens")
    assert found["max-num-seqs"].effective == "8"
    found = by_name(findings(arm("vllm", max_num_seqs="16", attention_backend="X"), serve({**VLLM, "/metrics": ""})))
    assert not any(one.differs for one in found.values())
    assert found["KV type"].effective is None
    assert found["max-num-seqs"].effective is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_model_len", "4096"),
        ("kv_cache_memory", "1G"),
        ("attention_backend", "FLASHINFER"),
        ("max_num_seqs", "16"),
        ("enforce_eager", "yes"),
        ("chunked_prefill", "no"),
        ("tp", "2"),
        ("block_size", "32"),
        ("speculative_config", '{"method": "ngram", "num_speculative_tokens": 4}'),
    ],
)
def test_each_setting_of_vllm_that_differs_is_found(serve: Serve, option: str, value: str) -> None:
    named = {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}', option: value}
    differing = [one for one in findings(arm("vllm", **named), serve(VLLM), VLLM_LOG) if one.differs]
    assert len(differing) == 1
    assert differing[0].declared is not None


def test_a_type_under_another_name_is_the_same_and_auto_is_the_one_that_a_server_computes_in(serve: Serve) -> None:
    answers = {**VLLM, "/metrics": VLLM["/metrics"].replace('cache_dtype="auto"', 'cache_dtype="fp8"')}
    assert not findings(arm("vllm", "fp8_e4m3"), serve(answers))[0].differs
    assert findings(arm("vllm", "fp8_e5m2"), serve(answers))[0].differs
    assert findings(arm("vllm"), serve(answers), VLLM_LOG)[0].differs
    assert not findings(arm("vllm", "bfloat16"), serve(VLLM), VLLM_LOG)[0].differs
    assert findings(arm("vllm", "float16"), serve(VLLM), VLLM_LOG)[0].differs


def test_sglang_tells_by_its_server_info_and_its_log_the_type_that_was_allocated(serve: Serve) -> None:
    declared = arm("sglang", dtype="float16", context_length="4096", max_total_tokens="8192", tp="2")
    found = by_name(findings(declared, serve(SGLANG)))
    assert not any(one.differs for one in found.values())
    assert found["attention backend"].effective == "triton"
    assert found["speculation"].effective == "none"
    assert found["tp"].effective == "2"
    log = "[x] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 8192, K size: 0.04 GB, V size: 0.04 GB"
    assert not findings(arm("sglang", "fp8_e4m3", "float16"), serve(SGLANG), log)[0].differs
    assert findings(arm("sglang", "auto", "float16"), serve(SGLANG), log)[0].differs


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_pair_that_the_packages_backend_reads_is_compared_with_the_declared_one(serve: Serve, engine: str) -> None:
    about = {**json.loads(SGLANG["/server_info"]), "attention_backend": "k16v8"}
    answers = VLLM if engine == "vllm" else {**SGLANG, "/server_info": json.dumps(about)}
    lines = ("k=bf16,v=bf16", "k=int8/per-token-head,v=int4/per-token-head")  # of a layer that is skipped, of others
    log = "".join(f"(Worker pid=3) INFO [backend.py:227] k16v8: torch[{line}], pages of 16 tokens\n" for line in lines)
    assert not findings(arm(engine, "int8/int4"), serve(answers), log)[0].differs
    assert findings(arm(engine, "bf16/fp8_e4m3"), serve(answers), log)[0].differs


def test_what_an_engine_rounds_is_not_a_difference(serve: Serve) -> None:
    props = json.dumps({"default_generation_settings": {"n_ctx": 2048}})
    llama = {"/v1/models": json.dumps({"data": [{"id": "m", "owned_by": "llamacpp"}]}), "/props": props}
    for declared, differs in (("2000", False), ("1792", True), ("2049", True)):
        told = by_name(findings(arm("llamacpp", "f16", n_ctx=declared), serve(llama)))
        assert told["context"].differs is differs
        assert (told["KV type"].effective, told["KV type"].differs) == (None, False)
    paged = {**SGLANG, "/server_info": json.dumps({**json.loads(SGLANG["/server_info"]), "page_size": 64})}
    for declared, differs in (("8200", False), ("8256", True), ("8191", True)):
        found = findings(arm("sglang", dtype="float16", max_total_tokens=declared), serve(paged))
        assert by_name(found)["pool size"].differs is differs


def test_values_of_vllm_that_are_lists_or_json_are_compared_as_such(serve: Serve) -> None:
    log = (
        "non-default args: {'served_model_name': ['m'], 'hf_overrides': {'a': 1}, 'reasoning_parser': 'qwen3'}\n"
        "Initializing a V1 LLM engine (v0) with config: dtype=torch.bfloat16, "
        "structured=StructuredOutputsConfig(backend='auto', nested=X(reasoning_parser='')), seed=0\n"
    )
    named = {"served_model_name": "m", "hf_overrides": '{"a":1}', "reasoning_parser": "qwen3", "seed": "0"}
    found = by_name(findings(arm("vllm", **named), serve(VLLM), log))
    assert all(found[name.replace("_", "-")].effective is not None for name in named)
    assert not any(one.differs for name, one in found.items() if name != "speculation")
    other = findings(arm("vllm", hf_overrides='{"a":2}'), serve(VLLM), log)
    assert by_name(other)["hf-overrides"].differs


def test_a_server_of_another_engine_and_an_engine_without_one_are_refused(serve: Serve) -> None:
    with pytest.raises(EngineError, match="is not a server of engine sglang: look what listens there"):
        findings(arm("sglang"), serve(VLLM))
    with pytest.raises(EngineError, match="engine hf has no server"):
        findings(replace(arm("hf")), serve(VLLM))


@pytest.mark.parametrize("answer", ["[]", "{}", '{"data": 3}', '{"data": [3]}', "<html>", '{"data": [{}]}'])
def test_odd_answers_are_no_server_of_this_engine(serve: Serve, answer: str) -> None:
    with pytest.raises(EngineError):
        findings(arm("vllm"), serve({"/v1/models": answer}))
