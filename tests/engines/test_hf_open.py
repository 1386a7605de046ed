"""Engine hf, opening: what it refuses, in one line, before a request is asked; and what it says ran."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from fidelab.captures.requests import Prefill
from fidelab.core import KVSpec
from fidelab.core.errors import EngineError, NotSupportedError, UsageError
from fidelab.engines.base import Support
from fidelab.engines.checkpoint import Shape, shape_of
from fidelab.engines.hf import head as head_module
from fidelab.engines.hf.adapter import HFEngine
from fidelab.formats import create
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import resolve
from tests.engines import tiny
from tests.engines.conftest import Checkpoint
from tests.engines.tiny import KINDS, Answers

_TINY: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
STRANGERS = {
    "t5": transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2),
    "bert": transformers.BertConfig(**_TINY, intermediate_size=32),
    "mamba": transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
    "openai-gpt": transformers.OpenAIGPTConfig(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2),
}
AUTO = {"t5": transformers.AutoModelForSeq2SeqLM, "bert": transformers.AutoModelForMaskedLM}


def stranger(name: str, folder: Path) -> Path:
    auto = AUTO.get(name, transformers.AutoModelForCausalLM)
    return tiny.save(tiny.randomised(auto.from_config(STRANGERS[name])), folder)


def refused(path: Path, kv: str = "int8", **options: str) -> str:
    """The message; it is one line."""
    with pytest.raises(EngineError) as caught:
        tiny.opened(path, kv, **options)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    return str(caught.value)


def copy(source: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("t5", "encoder-decoder models are not supported: this is t5, fidelab runs decoder-only models"),
        ("bert", "bert is not a decoder: a token changes the distribution of the one before it"),
        ("mamba", "MambaForCausalLM keeps no keys and values in the cache that it gets as 'cache'"),
        (
            "openai-gpt",
            "OpenAIGPTLMHeadModel.forward takes no cache: none of cache, past_key_values, cache_params is a parameter",
        ),
    ],
)
def test_a_model_that_has_nothing_to_measure_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    assert refused(stranger(name, tmp_path / name)) == reason


def test_parameters_that_no_tensor_fills_are_refused_but_a_tied_head(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = copy(checkpoint("llama"), tmp_path / "gap")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert refused(folder) == (
        "1 parameters were filled by no checkpoint tensor, first model.layers.1.self_attn.k_proj.weight"
    )
    assert "lm_head.weight" not in load_file(checkpoint("gemma2") / "model.safetensors")
    tiny.opened(checkpoint("gemma2"))


@pytest.mark.full
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_the_process_of_a_model_on_cpu_uses_the_memory_of_freed_tensors_again(checkpoint: Checkpoint) -> None:
    """Memory that went back to the kernel comes again page by page, each with a fault.

    A process of its own, since the setting holds for all that comes after it.
    """
    script = """if True:
        import resource, sys, torch
        from pathlib import Path
        from tests.engines import tiny
        def faults():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.zeros(24 << 20).fill_(1)
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        returned = min(faults() for _ in range(6))
        engine = tiny.opened(Path(sys.argv[1]))
        kept = min(faults() for _ in range(6))  # one call may miss the freed block
        print(returned, kept)
    """
    command = [sys.executable, "-c", script, str(checkpoint("llama"))]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    returned, kept = map(int, done.stdout.split())
    assert returned >= 48  # pages of 2 MiB at most
    assert kept < returned / 4


def test_code_that_comes_with_a_checkpoint_does_not_run(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = copy(checkpoint("llama"), tmp_path / "foreign")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    assert refused(folder).startswith("Transformers cannot load foreign: ")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("named", ["owner/kernel", "flash_attention_2", {"": "owner/kernel"}])
def test_a_kernel_that_a_config_names_is_not_fetched(
    key: str, named: object, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    for module in (transformers.modeling_utils, transformers.modeling_flash_attention_utils):
        for name in ("lazy_import_flash_attention", "load_and_register_attn_kernel"):
            monkeypatch.setattr(module, name, lambda *words, **_: asked.append(words), raising=False)
    folder = copy(checkpoint("llama"), tmp_path / "foreign")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: named}))
    engine = tiny.opened(folder, "int8")
    assert asked == []
    assert (
        engine.runtime_info().attention == tiny.opened(checkpoint("llama"), "int8").runtime_info().attention == "sdpa"
    )


def test_plain_attention_that_a_config_names_runs(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = copy(checkpoint("llama"), tmp_path / "eager")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attn_implementation": "eager"}))
    assert tiny.opened(folder, "int8").runtime_info().attention == "eager"


def test_code_beside_a_model_of_a_known_kind_is_neither_run_nor_asked_about(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = copy(checkpoint("llama"), tmp_path / "foreign")
    code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Own: pass\ndef generate(*_, **__): pass\n"
    (folder / "own.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    names = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM"), "own.Own")
    for file in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / file).read_text())
        content["auto_map"] = {**names, "AutoTokenizer": ["own.Own", "own.Own"]}
        (folder / file).write_text(json.dumps(content))
    tiny.opened(folder, "int8").answer(Prefill("kld", ((1, 2, 3, 4),), 1, 2, ((0,),)), Answers())
    Tokenizer.load(resolve(str(folder)))
    assert not (tmp_path / "ran").exists()


def test_another_attention_than_the_one_asked_for_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cannot load llama" in refused(checkpoint("llama"), attention="flash_attention_3")
    name = "_check_and_adjust_attn_implementation"
    monkeypatch.setattr(transformers.LlamaForCausalLM, name, lambda *_args, **_kwargs: "eager")
    assert refused(checkpoint("llama"), attention="sdpa") == "attention=sdpa was asked for, Transformers runs eager"


def test_layers_to_skip_must_exist_and_leave_some_and_groups_fit_a_head_before_the_model_is_loaded(
    checkpoint: Checkpoint,
) -> None:
    reason = "skip-layers=3: the model has layers 0–2"
    for kv, said in (("0,3", reason), ("0,1,2", "skip-layers leaves no layer to encode")):
        with pytest.raises(NotSupportedError, match=said):
            tiny.opened(checkpoint("llama"), f"int8[skip-layers={kv}]")
    assert HFEngine.supports(tiny.arm(checkpoint("llama"), "int8[skip-layers=1-3]")) == Support(False, reason)
    assert HFEngine.supports(tiny.arm(checkpoint("llama"), "int8[skip-layers=1-2]")).ok
    path = checkpoint("llama")
    head_dim = shape_of(str(path)).head_dim
    assert head_dim == transformers.AutoConfig.from_pretrained(path).head_dim
    verdict = HFEngine.supports(tiny.arm(path, "int4[group=8]", attention="k16v8"))
    assert verdict == Support(
        False, f"attention=k16v8 holds int4 with one group per head: write int4[group={head_dim}]"
    )
    assert HFEngine.supports(tiny.arm(path, f"int4[group={head_dim}]", attention="k16v8")).ok
    assert HFEngine.supports(tiny.arm(path, "int4[group=8]")).ok


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"hidden_size": 8, "num_attention_heads": 0}', '{"text_config": 3}']
)
def test_a_config_that_says_nothing_of_the_shape_refuses_nothing(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert shape_of(str(tmp_path)) == Shape()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention": "flsh"}, "attention='flsh' is not one of eager, sdpa, "),
        ({"atention": "sdpa"}, "engine hf.*atention"),
        ({"estimator": "topk"}, "engine hf.*estimator"),
        ({"jitter": "0"}, "engine hf.*jitter"),
    ],
)
def test_options_that_do_not_exist_are_refused_before_anything_loads(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        HFEngine.supports(tiny.arm(Path("nowhere"), **options))
    oks = [HFEngine.supports(tiny.arm(Path("nowhere"), dtype=dtype)).ok for dtype in ("float8", "float32")]
    assert oks == [False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_ran_reports_what_the_cache_was_seen_to_hold(kind: str, checkpoint: Checkpoint) -> None:
    engine = tiny.opened(checkpoint(kind), "f16/int4[group=8]")
    engine.answer(Prefill("kld", (tiny.tokens(20),), 9, 18, ((0,) * 10,)), Answers())
    ran, spec = engine.runtime_info(), KVSpec.parse("f16/int4[group=8]")
    k, v = create(spec.k), create(spec.v)
    due = sum(heads * (k.token_bytes(k_size) + v.token_bytes(v_size)) for heads, k_size, v_size, _ in KINDS[kind].kv)
    assert ran.cache_bytes_per_token == ran.expected_bytes_per_token == due
    assert (ran.k_format, ran.v_format) == ("f16", "int4[group=8]")
    assert (ran.k_dtype, ran.v_dtype) == ("float16", "uint8")
    assert (ran.kv_layers, ran.layers_without_kv) == (len(KINDS[kind].kv), KINDS[kind].without)


@pytest.mark.parametrize(("attention", "runs"), [("eager", "eager"), ("sdpa", "sdpa"), ("transformers", "sdpa")])
def test_the_attention_asked_for_is_the_one_that_runs(attention: str, runs: str, checkpoint: Checkpoint) -> None:
    assert tiny.opened(checkpoint("gemma4"), attention=attention).runtime_info().attention == runs


def test_the_record_names_versions_device_threads_and_skipped_layers(checkpoint: Checkpoint) -> None:
    engine = tiny.opened(checkpoint("llama"), "int8[skip-layers=0,2]")
    assert engine.tokenize("w7 w63 w5") == [7, 63, 5]
    record = engine.runtime_info().record()
    assert record["versions"]["transformers"] == transformers.__version__
    assert record["device"].startswith("cpu (")
    assert (record["threads"], record["compute_dtype"], record["skipped_layers"]) == (1, "float32", [0, 2])


def test_a_checkpoint_that_is_truncated_or_without_a_tokenizer_and_a_device_that_is_not_there_are_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = copy(checkpoint("llama"), tmp_path / "short")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert refused(folder).startswith("Transformers cannot load short: SafetensorError: ")
    folder = copy(checkpoint("llama"), tmp_path / "mute")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert refused(folder).startswith("Transformers cannot load mute: ")
    with pytest.raises(EngineError, match="Transformers cannot load llama: "):
        HFEngine().open(replace(tiny.arm(checkpoint("llama")), device="nowhere"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128},
            r"quantized \(gptq\) .* cannot load it here: .*pip install",
        ),
        ({"quant_method": "nosuch"}, r"quantized \(nosuch\) .* Unknown quantization type, got nosuch"),
        ({"bits": 4}, r"quantized \(of an unknown method\)"),
    ],
)
def test_a_quantized_checkpoint_that_transformers_cannot_load_is_not_supported_and_says_what_to_do(
    checkpoint: Checkpoint, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    path = copy(checkpoint("llama"), tmp_path / "quantized")
    found = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**found, "quantization_config": config}))
    support = HFEngine.supports(tiny.arm(path))
    assert not support.ok
    assert re.search(said, support.reason)
    assert "fidelab checkpoint convert" in support.reason
    assert "\n" not in support.reason


def test_weights_are_loaded_straight_to_a_gpu_and_to_the_cpu_as_before(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    loading = transformers.AutoModelForCausalLM.from_pretrained

    def from_pretrained(*args: Any, **options: Any) -> Any:
        told.append(options)
        return loading(*args, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    engine = tiny.opened(checkpoint("llama"), "int8")
    arm = replace(engine._arm, device="meta")  # a device that is not the CPU, and is everywhere
    with pytest.raises(EngineError):
        HFEngine().open(arm)
    assert "device_map" not in told[0]
    assert told[1]["device_map"] == {"": "meta"}


def test_the_peak_of_device_memory_is_that_of_one_question_and_precision_flags_are_recorded(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"peak": 0}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: held["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: held.update(peak=1))
    monkeypatch.setattr("fidelab.engines.hf.adapter.device_name", lambda device: device)
    engine = tiny.opened(checkpoint("llama"), "int8")
    held["peak"] = 500
    engine.reset_peak()
    assert held["peak"] == 500  # nothing on a CPU
    assert "tf32_matmul" not in engine.runtime_info().more
    engine._arm = replace(engine._arm, device="cuda:0")
    assert engine.peak_device_bytes() == 500
    engine.reset_peak()
    assert engine.peak_device_bytes() == 1
    more = engine.runtime_info().more
    assert more["tf32_matmul"] is torch.backends.cuda.matmul.allow_tf32
    assert more["bf16_reduced_precision_reduction"] is torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


def test_a_head_is_replayed_in_chunks_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
                largest = max(largest, out.numel())
            return out

    monkeypatch.setattr(head_module, "_ROWS", 100)
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(64, 1050).to(torch.bfloat16)
    states = torch.randn(2, 64, generator=generator).to(torch.bfloat16)
    live = states @ linear.weight.T + linear.bias
    with torch.no_grad(), Watch():  # type: ignore[no-untyped-call]
        head = head_module.ReplayedHead(linear, object(), "bfloat16", states, live)
        replayed = head._replay(states, 1.0)
    due = states.float() @ linear.weight.float().T + linear.bias.float()
    torch.testing.assert_close(replayed, due)
    assert largest <= 100 * 64


@pytest.mark.parametrize(
    ("config", "window", "full"),
    [
        ({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 512}, 512, 1),
        ({"layer_types": ["full_attention"] * 3, "sliding_window": 512}, None, 3),
        ({"sliding_window": 4096}, 4096, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, None, None),
        ({}, None, None),
    ],
)
def test_the_window_of_a_model_and_its_layers_without_one_are_read_from_its_config(
    config: dict[str, Any], window: int | None, full: int | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3, **config}))
    found = shape_of(str(tmp_path))
    assert (found.window, found.full) == (window, full)
