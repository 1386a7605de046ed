"""Reference and candidate are different checkpoints of one tokenizer."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.engines import tiny
from tests.run.harness import Done, axis_of, cli

WORDS = 3_000


def small(vocab: int = tiny.VOCAB, seed: int = 0) -> transformers.LlamaForCausalLM:
    """A Llama of a few thousand weights; the first 64 rows of its tables do not depend on ``vocab``."""
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    built = transformers.LlamaForCausalLM(config).float().eval()
    for index, (_, parameter) in enumerate(built.named_parameters()):
        if parameter.ndim > 1:
            generator = torch.Generator().manual_seed(1000 * seed + index)
            drawn = torch.randn((256, *parameter.shape[1:]), generator=generator) * 0.2
            parameter.data = drawn[: parameter.shape[0]].clone()
    return built


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    picks = np.random.default_rng(0).integers(3, tiny.VOCAB, WORDS)
    (folder / "text.txt").write_text(" ".join(f"w{i}" for i in picks))
    tiny.save(small(), folder / "reference")
    return folder


def compare(room: Path, model: Path, *flags: str) -> Done:
    return cli(
        *("compare", room / "reference", "--dtype", "float32", "--reference", "f32", "--candidate", f"model={model}"),
        *("--axes", "kld", "--text", room / "text.txt", "--windows", 24, "--n-ctx", 32, "--control", "none"),
        *("--set", "axes.kld.place=start", "--no-floor", "--threads", 1, *flags),
        cwd=room,
    )


def brute_force(room: Path, change: Callable[[transformers.LlamaForCausalLM], None], common: int = tiny.VOCAB) -> float:
    """Mean KL over the same windows, by two whole forwards in float64 over the common ids."""
    ids = [int(word[1:]) for word in (room / "text.txt").read_text().split()][: 24 * 32]
    windows = torch.tensor(ids).reshape(24, 32)
    reference = small()
    other = copy.deepcopy(reference)
    change(other)
    with torch.no_grad():
        p, q = (m(windows).logits[:, 16:31, :common].double().log_softmax(-1) for m in (reference, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def rounded(model: transformers.LlamaForCausalLM) -> None:
    """Weights as a bfloat16 checkpoint holds them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()


def test_a_quantized_checkpoint_is_compared_with_the_original_by_their_own_heads(room: Path) -> None:
    other = small()
    rounded(other)
    done = compare(room, tiny.save(other, room / "rounded"))
    assert done.code == 0, done.err
    arm = done.arm("rounded")
    expected = brute_force(room, rounded)
    assert expected > 1e-6
    assert axis_of(arm, "kld").value("mean") == pytest.approx(expected, rel=0.02)
    assert arm["model"].endswith("rounded")


def test_a_padded_vocabulary_is_cut_to_the_common_ids(room: Path) -> None:
    padded = small(vocab=80)
    done = compare(room, tiny.save(padded, room / "padded"))
    assert done.code == 0, done.err
    # the common rows are equal: cut and renormalised nothing is left of the padding
    assert done.axis("padded", "kld").value("mean") == pytest.approx(0.0, abs=1e-9)


def test_another_tokenizer_is_refused_by_the_arm_alone(room: Path) -> None:
    folder = tiny.save(small(), room / "other-words")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"w10"', '"x"').replace('"w11"', '"w10"').replace('"x"', '"w11"'))
    done = compare(room, folder, "--kv", "bf16")
    arm = done.arm("other-words")
    assert arm["status"] == "failed"
    assert "tokenizer differs" in arm["reason"]
    assert done.arm("bf16")["status"] == "ok"


def test_a_renamed_token_that_the_text_does_not_hold_is_refused_when_scored(room: Path) -> None:
    folder = shutil.copytree(room / "reference", room / "renamed")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["elsewhere"] = vocabulary.pop("w2")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    done = compare(room, folder, "--kv", "bf16")
    arm = done.arm("renamed")
    assert arm["status"] == "failed"
    assert "vocabulary differs: token 2 is 'elsewhere', in the reference 'w2'" in arm["reason"]
    assert done.arm("bf16")["status"] == "ok"


def test_a_checkpoint_that_is_not_to_be_had_leaves_the_other_arms_theirs(
    room: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = compare(room, Path("nobody/no-such-model"), "--kv", "bf16")
    arm = done.arm("no-such-model")
    assert arm["status"] == "not_supported"
    assert "cannot fetch nobody/no-such-model from the hub" in arm["reason"]
    assert done.arm("bf16")["status"] == "ok"
