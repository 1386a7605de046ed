"""K16/V8 in real, unmodified vLLM on the CPU: what it costs, what it saves, and that every kind of step is right."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fidelab.environments.environment import Environment
from fidelab.models import Model
from k16v8.kernels.prefill import Call, varlen_arguments
from k16v8.plugins.shared import COUNT_SWITCH, SWITCH
from k16v8.plugins.vllm.plugin import VLLM
from tests.engines import tiny
from tests.real import harness
from tests.real.harness import PREFILL, VOCAB, arm, asked, installed
from tests.real.k16v8 import TIE, hold_the_gate
from tests.real.servers import vllm_server

OWN = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
OWN |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

_K16V8 = Path(__file__).parents[2] / "k16v8"
PAIR = "int8/int4[skip-layers=0]"

pytestmark = [pytest.mark.usefixtures("environment"), pytest.mark.model]
Steps = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="session")
def environment() -> Environment:
    return installed("vllm")


@pytest.fixture(scope="module")
def run(environment: Environment, smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """What stock vLLM says with the switch in this position."""

    def said(switch: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("steps")
        words = (str(smollm2.path), str(folder / "said.json"))
        return harness.ran_there(environment, "vllm_k16v8_steps", folder, *words, **OWN, **{SWITCH: switch})

    return cache(said)


def test_it_costs_next_to_nothing_over_vllms_own_16_bit_cache(tmp_path: Path) -> None:
    harness.k16v8_beside_16_bits("vllm", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kv", ["bf16/int8", "fp8_e4m3/int4", "int8/fp8_e4m3", "int8/int4[skip-layers=1]"])
def test_a_pair_computes_what_transformers_does_with_it(
    environment: Environment, checkpoint: Path, kv: str, tmp_path: Path
) -> None:
    harness.agrees_with_transformers(environment, checkpoint, kv, tmp_path, kv_cache_memory="32M")


@pytest.mark.long
@pytest.mark.parametrize(("switch", "least"), [("1", 1.32), ("per-token-head", 1.31), (PAIR, 2.42)])
def test_the_same_memory_serves_more_tokens(run: Steps, switch: str, least: float) -> None:
    assert run(switch)["tokens"] / run("0")["tokens"] >= least
    assert run(switch)["dtype"] == "auto"


@pytest.mark.long
def test_prompts_in_chunks_cached_prefixes_and_decoding_share_steps(run: Steps) -> None:
    """What the next two tests are about did happen."""
    said = run("1")
    queries = [step["queries"] for step in said["steps"]]
    assert any(step[:2] == [1, 1] and max(step) > 1 for step in queries)
    assert max(map(sum, queries)) == 48  # so that the prompts of 101, 131, 161 and 133 tokens came in chunks
    assert [1] * 6 in queries
    assert [answer["cached"] for answer in said["together"]] == [0, 96, 96, 0, 0, 96]


@pytest.mark.long
def test_sequences_that_decode_beside_a_prompt_take_the_decode_kernel(run: Steps) -> None:
    for step in run("1")["steps"]:
        first_prompt = next((i for i, tokens in enumerate(step["queries"]) if tokens > 1), len(step["queries"]))
        assert step["decodes"] == first_prompt
    assert any(step["decodes"] for step in run("1")["steps"] if max(step["queries"]) > 1)


@pytest.mark.long
@pytest.mark.parametrize("switch", ["1", "per-token-head", PAIR])
def test_every_step_computes_the_definition_on_the_cache(run: Steps, switch: str) -> None:
    hold_the_gate(run(switch)["steps"])


@pytest.mark.long
@pytest.mark.parametrize("switch", ["1", "per-token-head", PAIR])
def test_a_mixed_batch_answers_as_prompts_alone_do_up_to_near_ties(run: Steps, switch: str) -> None:
    said = run(switch)
    for together, alone in zip(said["together"], said["alone"], strict=True):
        pairs = zip(together["ids"], alone["ids"], together["rows"], alone["rows"], strict=True)
        for one, other, mixed, single in pairs:
            shared = mixed.keys() & single.keys()
            assert max(abs(mixed[token] - single[token]) for token in shared) <= 2 * TIE
            if one != other:
                assert single[str(other)] - single[str(one)] <= TIE
                break


@pytest.mark.long
@pytest.mark.parametrize("kv", ["bf16/fp8_e4m3", "bf16/fp8_e4m3[skip-layers=1,2]"])
def test_windows_soft_cap_and_scale_are_the_models(environment: Environment, kv: str, tmp_path: Path) -> None:
    """A window of 24 tokens in every other layer, a soft-cap and a scale that matter: against Transformers."""
    shape = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    special = {"sliding_window": 24, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 9}
    config = transformers.Gemma2Config(**shape, **heads, **special, pad_token_id=None, eos_token_id=None)
    path = tiny.save(harness.drawn(config), tmp_path / "model")
    options = {"kv_cache_memory": "32M", "max_num_batched_tokens": "40"}
    one = arm("vllm", path, kv, "bfloat16", **options)
    said = asked(environment, one, {"prefill": PREFILL}, tmp_path)
    assert "error" not in said.plain, said.plain["error"]
    wanted = harness.states_of_transformers(replace(one, engine="hf", options=(("attention", "eager"),)), PREFILL)
    for item, theirs in enumerate(wanted):
        ours = said.arrays[f"prefill.{item}.hidden"]
        # bfloat16 noise is 0.013; a window that is one token short, 0.10; no scale, 0.05
        assert np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) <= 0.02
    assert said.plain["ran"]["v_format"] == "fp8_e4m3"


@pytest.mark.long
def test_a_server_of_the_users_own_runs_it(
    environment: Environment, smollm2: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**environment.variables(), SWITCH: "1"}.items():
        monkeypatch.setenv(name, value)
    log = tmp_path / "log"
    with vllm_server(smollm2.path, log) as url:
        body = {"model": "served", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.load(reply)["choices"][0]["text"].startswith(" Paris")
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
            metrics = reply.read().decode()
    page = 128 * 30 * 3 * 3 * 64  # tokens, layers, heads, 3D bytes
    assert f'num_gpu_blocks="{(32 << 20) // page}"' in metrics
    assert "k16v8: torch[k=bf16,v=fp8_e4m3]" in log.read_text()


def test_the_installed_vllm_was_tested_and_has_every_name(environment: Environment) -> None:
    """Outside the range the plug-in warns: then the hooks are to be tried anew and the range widened."""
    script = (
        "from k16v8.plugins.shared import _missing; from k16v8.plugins.vllm.plugin import VLLM; "
        "print(VLLM.refusal() + VLLM.warning() + _missing(VLLM.names))"
    )
    variables = {**os.environ, **environment.variables()}
    done = subprocess.run([environment.python, "-c", script], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "", VLLM.tested


_SIGNATURE = """
import ast, json
from importlib.util import find_spec
from pathlib import Path

path = Path(find_spec("vllm").submodule_search_locations[0]) / "vllm_flash_attn" / "flash_attn_interface.py"
found = [x for x in ast.parse(path.read_text("utf-8")).body if getattr(x, "name", "") == "flash_attn_varlen_func"]
print(json.dumps([argument.arg for argument in found[0].args.args]))
"""


def test_the_installed_vllm_takes_what_long_prompts_ask_of_its_flash_attention(environment: Environment) -> None:
    """Its CPU build has the function's text, but cannot import it."""
    done = subprocess.run([environment.python, "-c", _SIGNATURE], capture_output=True, text=True, check=True)
    x, starts = torch.zeros(1, 1, 8), torch.tensor([0, 1], dtype=torch.int32)
    call = Call(slice(0, 1), True, starts, starts, 1, 1)
    asked = {*varlen_arguments(x, x, x, call, 1.0, 0, 0.0), "return_softmax_lse", "fa_version"}
    assert asked <= {*json.loads(done.stdout)}


_BUILDER = """
import json
from types import SimpleNamespace
import torch
from host_time import HostDriver
from triton import knobs
from triton.runtime import driver
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec
from k16v8.plugins import shared
from k16v8.plugins.shared import Formats
from k16v8.plugins.vllm import backend
from pretend_cuda import pretend_cuda

driver.set_active(HostDriver())
compiled = []
knobs.runtime.jit_cache_hook = lambda **told: (compiled.append(told["fn"].name.rpartition(".")[2]), True)[1]
backend._ON_CPU = False
name, formats = "model.layers.0.self_attn.attn", Formats.parse("1")
layer = torch.nn.Module.__new__(backend.VLLMAttention)
torch.nn.Module.__init__(layer)
layer.impl = object.__new__(backend.K16V8Attention)  # its own __init__ asks for the configuration of a whole engine
shape = dict(num_heads=8, num_kv_heads=2, head_size=64, scale=0.1, sinks=None, formats=formats)
vars(layer.impl).update(shape, _of=None, _window=0, _softcap=0.0)
spec = FullAttentionSpec(
    block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, state_content_bytes=formats.content_bytes(64, 64)
)
config = SimpleNamespace(
    compilation_config=SimpleNamespace(static_forward_context={name: layer}),
    parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTS),
)
support = backend.K16V8Builder.get_cudagraph_support(config, spec).name
with pretend_cuda() as cuda:
    q = torch.empty(5, 8, 64, dtype=torch.bfloat16, device="cuda")
    layer.impl.forward(layer, q, q, q, q, None, torch.empty_like(q))  # vLLM measures its memory
    held = dict(shared._BUFFERS)
    builder = backend.K16V8Builder(spec, [name], config, torch.device("cuda:0"))
    assert held == shared._BUFFERS and list(held) == [q.device]
    pages = [backend.K16V8Backend.get_preferred_block_size(size) for size in (16, 48, 128)]
    pages += [backend.K16V8Backend.supports_block_size(size) for size in (528, 24)]
    decoding = []
    for counts in ([4, 4, 4], [4, 4, 0], [4, 4, 1], [1, 1, 4], [2, 2, 2], [4, 4, 300]):
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
        lengths = torch.tensor([30, 40, 300], dtype=torch.int32)
        tokens = 12 if counts[2] == 0 else sum(counts)  # a graph's batch is padded
        step = CommonAttentionMetadata(
            query_start_loc=starts.to("cuda"), query_start_loc_cpu=starts, seq_lens=lengths.to("cuda"), num_reqs=3,
            num_actual_tokens=tokens, max_query_len=max(counts), max_seq_len=300, causal=True,
            block_table_tensor=torch.zeros(3, 40, dtype=torch.int32, device="cuda"),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64, device="cuda"),
        )
        with cuda.recorded() as waited:
            built = builder.build(0, step)
        rest = None if built.extend_start_loc is None else built.extend_start_loc.tolist()
        decoding.append([built.decode_tokens, rest])
        assert not waited, waited
    starts, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2, 302, 402], [30, 40, 300, 500]))
    step = CommonAttentionMetadata(
        query_start_loc=starts.to("cuda"), query_start_loc_cpu=starts, seq_lens=lengths.to("cuda"), num_reqs=4,
        num_actual_tokens=402, max_query_len=300, max_seq_len=500, causal=True, seq_lens_cpu_upper_bound=lengths,
        block_table_tensor=torch.zeros(4, 40, dtype=torch.int32, device="cuda"),
        slot_mapping=torch.zeros(402, dtype=torch.int64, device="cuda"),
        is_prefilling=torch.tensor([False, False, True, True]),
    )
    with cuda.recorded() as waited:
        built = builder.build(0, step)
        built.prompts.chunks(16, 0, 300)
print(json.dumps([compiled, support, pages, decoding, built.num_decodes, waited, cuda.asynchronous]))
"""


@pytest.mark.parametrize(
    ("drafts", "support", "decoding"),
    [
        # tokens for the decode kernel, and where the queries of the other sequences begin
        (3, "UNIFORM_BATCH", [[12, None], [12, None], [9, None], [6, None], [6, None], [8, [0, 300]]]),
        # 4 query heads of a KV head times 5 queries: more rows than a tile has
        (
            4,
            "UNIFORM_SINGLE_TOKEN_DECODE",
            [*([0, [0, 4, 8, last]] for last in (12, 8, 9)), [2, [0, 4]], [0, [0, 2, 4, 6]], [0, [0, 4, 8, 308]]],
        ),
    ],
)
def test_on_a_device_vllms_builder_compiles_before_it_serves_and_waits_for_nothing(
    drafts: int, support: str, decoding: list[Any], environment: Environment
) -> None:
    folders = [_K16V8 / "benchmarks", _K16V8 / "tests"]  # of the driver, and of the pretend device
    variables = {**os.environ, **environment.variables(), SWITCH: "1"}
    variables["PYTHONPATH"] = os.pathsep.join([*map(str, folders), variables.get("PYTHONPATH", "")])
    command = [environment.python, "-c", _BUILDER.replace("DRAFTS", str(drafts))]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = ["write_kernel", "schedule_kernel", "decode_kernel", "extend_kernel", "gather_kernel"]
    kernels += ["decode_kernel"] * (support == "UNIFORM_BATCH")  # of one query, and of all drafts
    expected = [kernels, support, [64, 64, 128, True, False], decoding, 2, [], 1]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


_COUNTED = """
import json
import torch
from k16v8.plugins.shared import Formats
from k16v8.plugins.vllm import backend

layer = torch.nn.Module()
layer.layer_name, formats = "model.layers.3.self_attn.attn", Formats.parse("1")
made = object.__new__(backend.K16V8Attention)
vars(made).update(
    num_heads=4, head_size=64, scale=0.1, sinks=None, formats=formats, _of=None, _window=0, _softcap=0.0, _cache=None
)
cache = torch.zeros(3, 2, 16, formats.content_bytes(64, 64) // 2, dtype=torch.bfloat16)
key, value = torch.ones(2, 5, 2, 64, dtype=torch.bfloat16)
value[1, 0, :3] = 500.0
for _ in range(2):
    made.do_kv_cache_update(layer, key, value, cache, torch.arange(16, 21))
print(json.dumps(made.read_back([1], key.flatten(1), value.flatten(1)).get("counted")))
"""


@pytest.mark.parametrize(("text", "counted"), [("0", None), ("1", [0, 6])])
def test_vllms_layer_counts_what_saturates_where_it_is_asked_for(
    text: str, counted: list[int] | None, environment: Environment
) -> None:
    variables = {**os.environ, **environment.variables(), SWITCH: "1", COUNT_SWITCH: text}
    done = subprocess.run([environment.python, "-c", _COUNTED], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == counted
