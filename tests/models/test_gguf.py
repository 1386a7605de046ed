"""A GGUF file becomes a folder of the same model: weights, tokenizer, template, end of turn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fidelab.errors import InputError
from fidelab.models import Model, resolve
from fidelab.models.gguf import to_safetensors
from tests.models.tiny_gguf import TEMPLATE, write_gguf


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return to_safetensors(write_gguf(folder / "tiny.gguf"), folder / "hf")


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


def test_chat_template_survives(converted: Path) -> None:
    assert _tokenizer(converted).chat_template == TEMPLATE


def test_end_of_turn_is_the_end_of_sequence(converted: Path) -> None:
    generation = json.loads((converted / "generation_config.json").read_text())
    assert (_tokenizer(converted).eos_token, generation["eos_token_id"]) == ("<|im_end|>", 2)


@pytest.mark.parametrize("text", ["plain", " a  b\n\n\tc ", "Ünï 汉字 🙂", "x<|im_end|>y", "\r\n 12   345"])
def test_text_survives_the_tokenizer(text: str, converted: Path) -> None:
    tokenizer = _tokenizer(converted)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_are_cut_off_before_blanks_are_merged(converted: Path) -> None:
    assert _tokenizer(converted).tokenize("a   22") == ["a", "ĠĠĠ", "2", "2"]


def test_other_splitting_rules_stay_as_they_are(tmp_path: Path) -> None:
    folder = to_safetensors(write_gguf(tmp_path / "tiny.gguf", pre="gpt-2"), tmp_path / "hf")
    assert _tokenizer(folder).tokenize("a   22") == ["a", "ĠĠ", "Ġ", "2", "2"]


def test_gguf_path_is_a_model(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    model = resolve(str(file))
    assert (model.kind, model.gguf, model.native, model.tied) == ("gguf", file, "bf16", True)
    assert (model.vocab_size, model.hidden_size, model.max_positions, model.layers) == (261, 32, 64, 1)
    assert model.path.is_relative_to(cache)


def test_same_content_is_converted_once(tmp_path: Path, cache: Path) -> None:
    first = resolve(str(write_gguf(tmp_path / "a.gguf")))
    marker = first.path / "marker"
    marker.touch()
    second = resolve(str(write_gguf(tmp_path / "b.gguf")))
    assert (second.path, second.weights) == (first.path, first.weights)
    assert marker.exists()


def test_file_that_is_no_gguf_is_one_line(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04")
    with pytest.raises(InputError, match="is not a GGUF file"):
        resolve(str(tmp_path / "x.gguf"))


@pytest.mark.parametrize("share", [0.05, 0.5, 0.99])
def test_truncated_gguf_is_one_line_and_leaves_nothing(share: float, tmp_path: Path, cache: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(InputError, match=r"cannot be converted|is damaged") as caught:
        resolve(str(tmp_path / "x.gguf"))
    assert "\n" not in str(caught.value)
    assert not list(cache.glob("models/gguf/*/"))


def test_killed_conversion_is_not_taken_for_a_model(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    script = (
        "import sys, time; from pathlib import Path; from transformers import PreTrainedModel\n"
        "save = PreTrainedModel.save_pretrained\n"
        "def stall(self, out): save(self, out); print('saved', flush=True); time.sleep(600)\n"
        "PreTrainedModel.save_pretrained = stall\n"
        "from fidelab.models import resolve; resolve(sys.argv[1])\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(file)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "saved\n"
    child.kill()
    child.communicate()
    assert list(cache.glob("models/gguf/.*.part/hf/model.safetensors"))

    assert (resolve(str(file)).path / "tokenizer.json").is_file()
    assert not list(cache.glob("models/gguf/.*.part"))


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


@pytest.mark.parametrize("place", ["config.json", "tokenizer_config.json"])
def test_code_that_lies_beside_a_gguf_file_is_neither_run_nor_asked_about(place: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "evil.py").write_text("open(__file__ + '.ran', 'w')\nclass Evil: pass\n")
    names = {
        "AutoTokenizer": ["evil.Evil", "evil.Evil"],
        "AutoConfig": "evil.Evil",
        "AutoModelForCausalLM": "evil.Evil",
    }
    (tmp_path / place).write_text(json.dumps({"auto_map": names, "model_type": "evil", "tokenizer_class": "Evil"}))
    script = (
        "import sys; from pathlib import Path; from fidelab.models.gguf import to_safetensors; "
        "to_safetensors(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    arguments = [sys.executable, "-c", script, str(tmp_path / "tiny.gguf"), str(tmp_path / "hf")]
    done = subprocess.run(arguments, input="y\ny\n", capture_output=True, text=True, check=False)
    assert "custom code" not in done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.ran"))
    assert (tmp_path / "hf" / "model.safetensors").is_file()
