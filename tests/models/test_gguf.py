"""A GGUF file is a model: its text is read without the weights, and these become a folder of the same model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fidelab.core.errors import InputError, OutputError
from fidelab.models import Model, check_conversion, pull, resolve, with_weights
from fidelab.models.convert import to_safetensors
from fidelab.models.gguf import hf_config, read_header, text_folder
from tests.models.tiny_gguf import TEMPLATE, write_gguf
from tests.sizes import first


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return _converted(write_gguf(folder / "tiny.gguf"))


def _converted(file: Path) -> Path:
    text = text_folder(file, file.parent / "text")
    return to_safetensors(file, text, file.parent / "hf")


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_weights_are_the_files_in_bfloat16(converted: Path) -> None:
    import gguf
    import torch
    from safetensors.torch import load_file

    reader = gguf.GGUFReader(converted.parent / "tiny.gguf")
    source = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    found = load_file(converted / "model.safetensors")["model.embed_tokens.weight"]
    expected = torch.from_numpy(np.asarray(source.data).copy()).to(torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_the_template_the_end_of_turn_and_any_text_survive(converted: Path) -> None:
    tokenizer = _tokenizer(converted)
    assert tokenizer.chat_template == TEMPLATE
    generation = json.loads((converted / "generation_config.json").read_text())
    assert (tokenizer.eos_token, generation["eos_token_id"]) == ("<|im_end|>", 2)
    for text in ("plain", " a  b\n\n\tc ", "Ünï 汉字 🙂", "x<|im_end|>y", "\r\n 12   345"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_are_cut_off_before_blanks_are_merged_unless_other_rules_are_named(
    converted: Path, tmp_path: Path
) -> None:
    assert _tokenizer(converted).tokenize("a   22") == ["a", "ĠĠĠ", "2", "2"]
    folder = text_folder(write_gguf(tmp_path / "tiny.gguf", pre="gpt-2"), tmp_path / "text")
    assert _tokenizer(folder).tokenize("a   22") == ["a", "ĠĠ", "Ġ", "2", "2"]


@pytest.fixture
def file(tmp_path: Path, cache: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def _weights(cache: Path) -> list[Path]:
    return list(cache.rglob("*.safetensors"))


def test_gguf_path_is_a_model_without_converting_it(file: Path, cache: Path) -> None:
    model = resolve(str(file))
    assert (model.kind, model.gguf, model.native, model.tied, model.text_only) == ("gguf", file, "bf16", True, True)
    assert (model.vocab_size, model.hidden_size, model.max_positions, model.layers) == (261, 32, 64, 1)
    assert (model.kv_heads, model.head_dim, model.convertible) == (1, 16, True)
    assert model.path.is_relative_to(cache)
    assert not _weights(cache)


def test_the_header_says_of_a_model_what_its_conversion_does(file: Path) -> None:
    read, converted = resolve(str(file)), pull(str(file))
    sizes = ("vocab_size", "hidden_size", "max_positions", "layers", "kv_heads", "head_dim", "parameters")
    same = (*sizes, "tied", "native")
    assert {name: getattr(read, name) for name in same} == {name: getattr(converted, name) for name in same}
    assert (converted.text_only, converted.weight_bytes) == (False, read.converted_bytes)


def test_the_text_is_that_of_transformers_own_reading(file: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "m.gguf").symlink_to(file)
    other: Any = AutoTokenizer.from_pretrained(tmp_path / "alone", gguf_file="m.gguf")
    ours = _tokenizer(resolve(str(file)).path)
    assert ours.backend_tokenizer.to_str(True) != ""
    assert ours.get_vocab() == other.get_vocab()
    assert ours.chat_template == other.chat_template == TEMPLATE
    for text in (" a  b\n\n\tc ", "Ünï 汉字 🙂", "x<|im_end|>y"):
        assert ours(text)["input_ids"] == other(text)["input_ids"]


def test_same_content_is_converted_once(tmp_path: Path, cache: Path) -> None:
    first = pull(str(write_gguf(tmp_path / "a.gguf")))
    marker = first.path / "marker"
    marker.touch()
    second = pull(str(write_gguf(tmp_path / "b.gguf")))
    assert (second.path, second.weights) == (first.path, first.weights)
    assert marker.exists()


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.99])
def test_a_file_that_is_not_a_gguf_or_truncated_is_one_line_and_leaves_nothing(
    share: float, tmp_path: Path, cache: Path
) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(whole[: int(share * len(whole))] or b"PK\x03\x04")
    with pytest.raises(InputError, match="is damaged or incomplete" if share else "is not a GGUF file") as caught:
        resolve(str(tmp_path / "x.gguf"))
    assert "\n" not in str(caught.value)
    assert not list(cache.glob("models/gguf/*/"))


def test_any_damage_of_the_header_is_one_line(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "x.gguf").read_bytes()
    end = read_header(tmp_path / "x.gguf").tensors[0].offset
    rng = np.random.default_rng(0)
    refused: list[str] = []
    for _ in range(400):
        place, size = int(rng.integers(4, end)), int(rng.integers(1, 9))
        damaged = bytearray(whole)
        damaged[place : place + size] = rng.bytes(size) if size % 2 else b"\xff" * size
        (tmp_path / "x.gguf").write_bytes(damaged)
        try:
            read_header(tmp_path / "x.gguf")
        except InputError as error:
            refused.append(str(error))
    assert len(refused) > 20
    assert not any("\n" in line for line in refused)


def test_killed_conversion_is_not_taken_for_a_model(file: Path, cache: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time; from fidelab.models import convert, pull\n"
        "def stall(out, *rest): out.write(b'half'); out.flush(); print('half', flush=True); time.sleep(600)\n"
        "convert._write_values = stall\n"
        "pull(sys.argv[1])\n"
    )
    own = {**os.environ, "TMPDIR": str(tmp_path)}  # another process that shares it sweeps what a dead one left
    child = subprocess.Popen([sys.executable, "-c", script, str(file)], stdout=subprocess.PIPE, text=True, env=own)
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    child.kill()
    child.communicate()
    assert list(cache.glob("models/gguf/.*.part-*/files/safetensors/model.safetensors"))

    assert (pull(str(file)).path / "tokenizer.json").is_file()
    assert not list(cache.glob("models/gguf/.*.part*"))


def test_conversion_that_does_not_fit_the_disk_says_what_it_needs_and_leaves_nothing(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = resolve(str(file))
    assert check_conversion(model) == model.converted_bytes > 0
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    for attempt in (check_conversion, with_weights):
        with pytest.raises(OutputError, match=r"need 64\.\d\d MiB.*1\.00 MiB are free.*FIDELAB_CACHE"):
            attempt(model)
    assert not _weights(cache)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((32, 32), r"converted.*up_proj\.weight has the shape \(32, 32\), not \(64, 32\)"),
        (None, r"1 of 11 parameters are not in the file, first model\.layers\.0\.mlp\.up"),
    ],
    ids=["another shape", "missing"],
)
def test_a_tensor_that_the_model_does_not_have_so_is_one_line(
    shape: tuple[int, ...] | None, said: str, tmp_path: Path, cache: Path
) -> None:
    file = write_gguf(tmp_path / "x.gguf", changed={"blk.0.ffn_up.weight": shape})
    with pytest.raises(InputError, match=said):
        pull(str(file))
    assert not _weights(cache)


def test_file_of_an_unknown_architecture_is_a_model_without_a_conversion(tmp_path: Path, cache: Path) -> None:
    model = resolve(str(write_gguf(tmp_path / "x.gguf", architecture="smollm3")))
    assert (model.architecture, model.convertible, model.vocab_size) == ("smollm3", False, 261)
    assert _tokenizer(model.path).tokenize("a   22") == ["a", "ĠĠĠ", "2", "2"]
    with pytest.raises(InputError, match=r"cannot be converted.*smollm3.*use engine llamacpp"):
        with_weights(model)
    with pytest.raises(InputError, match="has no tokenizer that Transformers can build"):
        resolve(str(write_gguf(tmp_path / "y.gguf", tokenizer="rwkv")))
    assert not _weights(cache)


@pytest.mark.full
def test_a_conversion_takes_little_more_memory_than_the_largest_tensor(tmp_path: Path) -> None:
    """The whole model would take seven times that here."""
    from fidelab.models.tiny import GGUF_NAME, make_tiny

    sizes = {"vocab": 9_000, "layers": 12, "hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64}
    script = (
        "import sys; from pathlib import Path; from threading import Event, Thread\n"
        "from fidelab.models import convert\n"
        "def anonymous():\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return next(int(line.split()[1]) for line in lines if line.startswith('RssAnon')) / 1024\n"
        "write = convert._write\n"
        "def watched(*rest):\n"
        "    seen, done = [anonymous()], Event()\n"
        "    def look():\n"
        "        while not done.wait(0.002): seen.append(anonymous())\n"
        "    watcher = Thread(target=look); watcher.start(); write(*rest); done.set(); watcher.join()\n"
        "    print(max(seen) - seen[0])\n"
        "convert._write = watched\n"
        "folder = Path(sys.argv[1]); (folder / 'text').mkdir()\n"
        "convert.to_safetensors(folder / 'model.gguf', folder / 'text', folder / 'hf')\n"
    )
    make_tiny(tmp_path, "Q8_0", **sizes)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    largest = 4 * sizes["vocab"] * sizes["hidden"] / 2**20
    total = sum(4 * np.prod(tensor.shape) for tensor in read_header(tmp_path / GGUF_NAME).tensors) / 2**20
    assert total > 7 * largest
    assert float(done.stdout) < 2 * largest


_SIZES = {
    "context_length": 64,
    "embedding_length": 32,
    "block_count": 2,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 8,
    "rope.freq_base": 1e4,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
}
_LFM2 = {
    "token_embd.weight": (261, 32),
    "token_embd_norm.weight": (32,),
    **{f"blk.{n}.{name}_norm.weight": (32,) for n in (0, 1) for name in ("attn", "ffn")},
    **{f"blk.{n}.ffn_{name}.weight": (48, 32) for n in (0, 1) for name in ("gate", "up")},
    **{f"blk.{n}.ffn_down.weight": (32, 48) for n in (0, 1)},
    "blk.0.shortconv.in_proj.weight": (96, 32),
    "blk.0.shortconv.out_proj.weight": (32, 32),
    "blk.0.shortconv.conv.weight": (32, 3),
    **{f"blk.1.attn_{name}.weight": (rows, 32) for name, rows in {"q": 32, "k": 16, "v": 16, "output": 32}.items()},
    **{f"blk.1.attn_{name}_norm.weight": (8,) for name in "qk"},
}


def _write_architecture(path: Path, architecture: str, more: dict[str, Any], shapes: dict[str, Any]) -> Path:
    """A GGUF file of two layers and random weights, some of them quantized."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_SIZES, "vocab_size": 261, **more}.items():
        add: Any = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"{architecture}.{key}", value)
    writer.add_token_list([f"t{i}" for i in range(261)])
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        content = rng.standard_normal(shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        if len(shape) > 1 and shape[-1] % 32 == 0:
            writer.add_tensor(name, gguf.quants.quantize(content, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, content)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes_of(file: Path, architecture: str) -> dict[str, tuple[int, ...]]:
    """The tensors that Transformers expects in a file of these keys, as llama.cpp stores them."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    config = hf_config(file, file.parent)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    parameters, shapes = model.state_dict(), {}
    for name, parameter in get_gguf_hf_weights_map(model, processor).items():
        shape = tuple(parameters[parameter].shape)
        if "_exps" in name:
            name = name if name.endswith(".weight") else f"{name}.weight"
            shape = (shape[0], shape[1] // 2, shape[2]) if "gate_up" in parameter else shape
        transposed = architecture == "gpt2" and name.endswith("weight") and ("attn_" in name or "ffn_" in name)
        if len(shape) > 1 or "norm" in name or name.endswith("bias"):
            shapes[name] = shape[::-1] if transposed else shape
    return {name: shape for name, shape in shapes.items() if name != "output.weight"}


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("llama", {"rope.dimension_count": 8}),
        ("qwen2", {}),
        ("qwen3moe", {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16}),
        ("gemma2", {"attention.sliding_window": 16}),
        ("gpt2", {}),
        ("lfm2", {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3}),
    ],
)
def test_conversion_tensor_by_tensor_gives_what_transformers_gives_at_once(
    architecture: str, more: dict[str, Any], tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    shapes: dict[str, Any] = _LFM2
    if architecture != "lfm2":
        shapes = _shapes_of(_write_architecture(tmp_path / "keys.gguf", architecture, more, {}), architecture)
    file = _write_architecture(tmp_path / "model.gguf", architecture, more, shapes)
    (tmp_path / "text").mkdir()
    folder = to_safetensors(file, tmp_path / "text", tmp_path / "hf")
    auto: Any = AutoModelForCausalLM
    once = auto.from_pretrained(
        tmp_path, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    ours, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    expected = once.state_dict()
    assert {name: value.dtype for name, value in ours.state_dict().items()} == {n: x.dtype for n, x in expected.items()}
    assert [name for name, value in ours.state_dict().items() if not torch.equal(value, expected[name])] == []


@pytest.mark.model
def test_embedded_tokenizer_speaks_as_the_model_was_trained(smollm2: Model) -> None:
    tokenizer = _tokenizer(smollm2.path)
    assert tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("\n\n1. a   22") == [1116, 33, 30, 253, 333, 34, 34]


@pytest.mark.model
def test_embedded_model_answers_and_ends_its_turn(smollm2: Model) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = _tokenizer(smollm2.path)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32, local_files_only=True)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()
    assert out[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert "Paris" in tokenizer.decode(out)


@pytest.mark.parametrize("place", first(["config.json", "tokenizer_config.json"]))
def test_code_that_lies_beside_a_gguf_file_is_neither_run_nor_asked_about(
    place: str, tmp_path: Path, cache: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "evil.py").write_text("open(__file__ + '.ran', 'w')\nclass Evil: pass\n")
    evil = "evil.Evil"
    names = {"AutoTokenizer": [evil, evil], "AutoConfig": evil, "AutoModelForCausalLM": evil}
    (tmp_path / place).write_text(json.dumps({"auto_map": names, "model_type": "evil", "tokenizer_class": "Evil"}))
    script = (
        "import sys; from fidelab.inputs.tokens import Tokenizer; from fidelab.models import pull, resolve; "
        "Tokenizer.load(resolve(sys.argv[1])); pull(sys.argv[1])"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path / "tiny.gguf")]
    done = subprocess.run(arguments, input="y\ny\n", capture_output=True, text=True, check=False)
    assert "custom code" not in done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.ran"))
    assert _weights(cache)
