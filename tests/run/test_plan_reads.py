"""A dry run reads no large weights, downloads nothing, and says what will be read and what does not fit."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from fidelab.models import reading
from fidelab.models.weights import file_sha256
from tests.run.harness import cli

HIDDEN, INNER, LAYERS, KV, VOCABULARY = 8192, 28672, 80, 1024, 128256
GIB = 2**30


def sparse_70b(folder: Path) -> Path:
    """A llama of 70 billion parameters in bfloat16, 30 files of holes behind right headers."""
    folder.mkdir()
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (KV, HIDDEN) for name in "kv"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (HIDDEN, INNER)}
    names, index = list(shapes), {}
    for number in range(30):
        file = f"model-{number + 1:05}-of-00030.safetensors"
        end, header = 0, {}
        for name in names[number::30]:
            size = 2 * shapes[name][0] * (shapes[name][1] if len(shapes[name]) > 1 else 1)
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [end, end + size]}
            end, index[name] = end + size, file
        content = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(content)) + content)
            out.truncate(8 + len(content) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN}
    config |= {"intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 64, "head_dim": 128}
    config |= {"num_key_value_heads": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 131072}
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5}))
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = Tokenizer(models.BPE(letters, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def read_bytes() -> int:
    """Bytes that this process has read from files so far, holes included."""
    return int(next(line.split()[1] for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line))


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return sparse_70b(tmp_path / "70b")


def test_a_dry_run_of_141_gb_reads_no_weights_and_says_that_they_do_not_fit(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []

    def note(path: Path) -> str:
        hashed.append(path)
        return "0" * 64

    monkeypatch.setattr("fidelab.models.weights.sha256_of", note)
    words = (
        "compare",
        large,
        "--engine",
        "hf",
        "--kv",
        "q8_0",
        "--axes",
        "kld",
        "--quick",
        "--device",
        "cpu",
        "--dry-run",
    )
    before = read_bytes()
    done = cli(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert read_bytes() - before < GIB
    assert [path for path in hashed if path.suffix == ".safetensors"] == []
    assert "in bfloat16 needs 131 GiB for its weights, this machine has" in done.out
    assert ": will not fit" in done.out
    assert "131.42 GiB of weights are read for their hash when the run starts" in done.out
    plan = json.loads(cli(*words, "--json", cwd=tmp_path).out)
    assert plan["unread_bytes"] == sum(file.stat().st_size for file in large.glob("*.safetensors"))
    assert not (tmp_path / "runs").exists()


def test_a_file_of_the_hubs_cache_is_known_by_its_name_without_reading(tmp_path: Path) -> None:
    blobs, name = tmp_path / "models--a--b/blobs", "ab" * 32
    blobs.mkdir(parents=True)
    with (blobs / name).open("wb") as out:
        out.truncate(3 * GIB)
    link = tmp_path / "model.safetensors"
    link.symlink_to(blobs / name)
    with reading.plan_alone() as reads:
        assert file_sha256(link) == name
    assert reads.unread == {(blobs / name): 3 * GIB}


def test_small_weights_are_read_until_a_gib_is_reached(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for file in files:
        with file.open("wb") as out:
            out.truncate(GIB // 2)
    reads = reading.Reads()
    assert [reads.may_read(file, file.stat().st_size) for file in files] == [True, True, False]


def test_a_dry_run_of_a_model_that_is_not_here_names_the_command_that_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    done = cli("compare", "someone/model-8b", "--engine", "hf", "--kv", "q8_0", "--dry-run", cwd=tmp_path)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "a dry run downloads nothing: fidelab setup fetch someone/model-8b" in done.err


def test_a_budget_that_is_too_short_is_said(tmp_path: Path) -> None:
    words = ("compare", "fake", "--engine", "fake", "--reference", "exact", "--kv", "tilt", "--axes", "kld")
    done = cli(*words, "--budget", "1s", "--dry-run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "budget 1 s: " in done.out


def test_hashing_of_many_files_says_how_far_it_is_and_gives_the_hash_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(reading, "_EVERY_SECONDS", 0.0)
    file = tmp_path / "large.safetensors"
    file.write_bytes(bytes(range(256)) * 40_000)
    seen: list[tuple[int, int]] = []
    with reading.told(lambda done, total: seen.append((done, total))):
        assert file_sha256(file) == hashlib.sha256(file.read_bytes()).hexdigest()
    size = file.stat().st_size
    assert seen[-1] == (size, size)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
