"""``fidelab checkpoint convert --to gguf``: the same weights, tokens and shape for llama.cpp, or a refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from fidelab.checkpoints import convert as module
from fidelab.checkpoints.convert import convert
from fidelab.checkpoints.files import open_checkpoint
from fidelab.checkpoints.layouts import StoredArray, quantized_modules
from fidelab.core.errors import FidelabError, InputError, OutputError
from fidelab.models import gguf_writer
from fidelab.models.convert import originals
from fidelab.models.gguf import read_header, text_folder
from fidelab.models.tiny import make_tiny
from tests.checkpoints.quantized import write_quantized

TEXT = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", vocab=600)


def copied(source: Path, target: Path, **changes: Any) -> Path:
    """The model without its GGUF file, with changes of its config."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.gguf"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


def fields(file: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(file)
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


def test_the_file_is_the_one_that_was_written_for_the_same_model_by_hand(tiny: Path, tmp_path: Path) -> None:
    certificate = convert(tiny, tmp_path / "out", "gguf", dtype="float16")
    ours, theirs = (gguf.GGUFReader(file) for file in (tmp_path / "out" / "model.gguf", tiny / "model.gguf"))
    by_name = {tensor.name: tensor for tensor in theirs.tensors}
    assert {tensor.name for tensor in ours.tensors} == by_name.keys()
    for tensor in ours.tensors:
        assert tensor.tensor_type == by_name[tensor.name].tensor_type
        np.testing.assert_array_equal(tensor.data, by_name[tensor.name].data)
    assert fields(tmp_path / "out" / "model.gguf") == fields(tiny / "model.gguf")
    assert certificate.exact
    assert len(certificate.tensors) == len(by_name)


def test_types_are_kept_and_vectors_become_float32(tiny: Path, tmp_path: Path) -> None:
    convert(tiny, tmp_path / "out", "gguf")
    kinds = {(len(t.shape), t.type) for t in read_header(tmp_path / "out" / "model.gguf").tensors}
    assert kinds == {(1, gguf.GGMLQuantizationType.F32), (2, gguf.GGMLQuantizationType.BF16)}


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_a_quantized_checkpoint_becomes_its_dense_weights(method: str, tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "source", method)
    certificate = convert(folder, tmp_path / "out", "gguf")
    assert certificate.exact
    assert len(certificate.modules) == 14
    text = text_folder(tmp_path / "out" / "model.gguf", tmp_path / "text")
    read_back = dict(originals(tmp_path / "out" / "model.gguf", text))
    with open_checkpoint(folder) as checkpoint:
        for name, entry in quantized_modules(checkpoint.tensors, checkpoint.quantization).items():
            parts = {
                part: StoredArray(checkpoint.read(tensor), checkpoint.tensors[tensor].dtype)
                for part, tensor in entry.parts.items()
            }
            np.testing.assert_array_equal(read_back[f"{name}.weight"], entry.unpack(parts).dequantize())


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_each_architecture_is_read_back_by_transformers_as_it_was(
    kind: str, tied: bool, tiny: Path, tmp_path: Path
) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=600,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        **({"sliding_window": None} if kind == "mistral" else {}),
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, value in model.named_parameters():
        if "norm" in name or "bias" in name:
            value.data.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path / "model")
    for name in TEXT:
        shutil.copy(tiny / name, tmp_path / "model")
    certificate = convert(tmp_path / "model", tmp_path / "out", "gguf")
    assert certificate.exact
    assert len(certificate.tensors) == len(load_file(tmp_path / "model" / "model.safetensors"))


def test_the_source_is_left_as_it_was(tiny: Path, tmp_path: Path) -> None:
    source = copied(tiny, tmp_path / "source")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    convert(source, tmp_path / "out", "gguf")
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["certificate.json", "model.gguf"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"model_type": "gpt2"}, "of model type gpt2"),
    "scaled rotations": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        "rope_type linear",
    ),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act gelu"),
    "fewer tokens than the tokenizer": ({"vocab_size": 500}, "500 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_the_file_cannot_say_is_refused_and_nothing_is_left(name: str, tiny: Path, tmp_path: Path) -> None:
    changes, said = REFUSED[name]
    source = copied(tiny, tmp_path / "source", **changes)
    with pytest.raises(FidelabError, match=said) as refused:
        convert(source, tmp_path / "out", "gguf")
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def _wordpiece(content: dict[str, Any]) -> None:
    content["model"]["type"] = "WordPiece"


def _bytes(content: dict[str, Any]) -> None:
    content["model"]["byte_fallback"] = True


def _split(content: dict[str, Any]) -> None:
    content["pre_tokenizer"] = {"type": "Whitespace"}


def _lower(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Lowercase"}


@pytest.mark.parametrize(
    ("change", "said"),
    [(_wordpiece, "not byte-level BPE"), (_bytes, "byte fallback"), (_split, "splits words"), (_lower, "splits words")],
)
def test_a_tokenizer_without_a_name_in_llama_cpp_is_refused(
    change: Callable[[dict[str, Any]], None], said: str, tiny: Path, tmp_path: Path
) -> None:
    source = copied(tiny, tmp_path / "source")
    content = json.loads((source / "tokenizer.json").read_text())
    change(content)
    (source / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=said):
        convert(source, tmp_path / "out", "gguf")


def test_a_tokenizer_that_is_read_back_differently_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = gguf_writer._json

    def without_merges(file: Path) -> dict[str, Any]:
        content = read(file)
        content["model"]["merges"] = content["model"]["merges"][:1]
        return content

    monkeypatch.setattr(gguf_writer, "_json", without_merges)
    with pytest.raises(InputError, match="gives other tokens"):
        convert(tiny, tmp_path / "out", "gguf")


def test_weights_in_another_order_are_noticed(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_writer, "_arranged", lambda tensor, *_: tensor.read())  # halves of heads not interleaved
    with pytest.raises(OutputError, match=r"(q|k)_proj.weight differs"):
        convert(tiny, tmp_path / "out", "gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_without_a_place_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    source = copied(tiny, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.extra.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"no place for tensor model.layers.0.self_attn.extra.weight"):
        convert(source, tmp_path / "out", "gguf")


def test_a_type_that_would_lose_is_refused_unless_allowed(tiny: Path, tmp_path: Path) -> None:
    source = copied(tiny, tmp_path / "source")
    tensors = {name: value.float() * 1.0001 for name, value in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="cannot be stored as float16 without loss"):
        convert(source, tmp_path / "out", "gguf", dtype="float16")
    certificate = convert(source, tmp_path / "out", "gguf", dtype="float16", lossy=True)
    assert not certificate.exact
    assert 0 < certificate.worst.max_error < 1e-2


def test_a_file_that_is_gguf_already_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a GGUF file already"):
        convert(tiny / "model.gguf", tmp_path / "out", "gguf")


def test_a_lacking_tensor_is_noticed(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_the_last(*words: Any) -> Any:
        yield from list(originals(*words))[:-1]

    monkeypatch.setattr(module, "originals", without_the_last)
    with pytest.raises(OutputError, match="lacks tensor"):
        convert(tiny, tmp_path / "out", "gguf")
