"""A run begins before the hub's names of weights are verified, and ends when one is wrong or a file has changed."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from fidelab.models import verification, weights
from fidelab.models.reading import relying
from fidelab.models.resolve import resolve
from fidelab.models.verification import Verification
from fidelab.run.runner import JobRunner
from tests.run.harness import Done, cli, refused

FLAGS = ("--engine", "hf", "--kv", "q8_0", "--axes", "kld", "--windows", 2, "--n-ctx", 32, "--no-floor")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 1.5 million random weights whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = {"vocab_size": 256, "hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = Tokenizer(models.BPE(letters, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.fixture
def snapshot(checkpoint: Path, cache: Path, tmp_path: Path) -> Path:
    """The checkpoint as the hub's cache holds it: links to files that have their hash for a name."""
    folder, blobs = tmp_path / f"models--a--b/snapshots/{0:040}", tmp_path / "models--a--b/blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for file in checkpoint.iterdir():
        content = file.read_bytes()
        blob = blobs / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (folder / file.name).symlink_to(blob)
    return folder


def compare(folder: Path, cwd: Path) -> Done:
    return cli("compare", folder, *FLAGS, cwd=cwd)


def damage(folder: Path) -> Path:
    """Change one byte of the last weight."""
    blob = (folder / "model.safetensors").resolve()
    with blob.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    return blob


def captures(cwd: Path) -> list[Path]:
    return [*(cwd / "runs/captures").glob("*/*/manifest.json"), *(cwd / "runs/captures").glob("*/manifest.json")]


def test_names_of_the_hub_are_verified_beside_the_run_and_are_the_hash_that_reading_gives(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []
    read = weights.bytes_sha256

    def noted(path: Path, *stop: Any) -> str | None:
        readers.append(threading.current_thread().name)
        return read(path, *stop)

    for module in (weights, verification):
        monkeypatch.setattr(module, "bytes_sha256", noted)
    done = compare(snapshot, tmp_path)
    assert done.code == 0, done.err
    assert readers == ["hashing"]
    assert captures(tmp_path)
    monkeypatch.setenv("FIDELAB_CACHE", str(tmp_path / "another"))
    assert done.report["reference"]["weights_sha256"] == resolve(str(snapshot)).weights


def test_a_file_whose_name_is_not_its_hash_ends_the_run_and_leaves_no_outputs(snapshot: Path, tmp_path: Path) -> None:
    blob = damage(snapshot)
    line = refused_run(compare(snapshot, tmp_path))
    assert f"is damaged (its SHA-256 is not the hub's): delete {blob}" in line
    assert not captures(tmp_path)
    assert "is damaged" in refused(compare(snapshot, tmp_path))  # at once: its hash is known now


def test_a_file_that_changes_while_a_run_goes_on_ends_it_and_leaves_no_outputs(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = JobRunner.run

    def changing(self: JobRunner, *args: Any) -> Any:
        os.utime((snapshot / "model.safetensors").resolve(), (1, 1))
        return run(self, *args)

    monkeypatch.setattr(JobRunner, "run", changing)
    assert "changed while the run went on" in refused_run(compare(snapshot, tmp_path))
    assert not captures(tmp_path)


def test_hashing_beside_a_run_ends_with_it(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    file = blobs / ("ab" * 32)
    with file.open("wb") as out:
        out.truncate(1 << 33)
    with relying() as relied:
        assert weights.file_sha256(file) == file.name
    one = Verification(relied)
    one.stop()
    assert one.wait() == {}  # unfinished, and in no time


def refused_run(done: Done) -> str:
    """The last line of a run that began and was then refused."""
    assert (done.code, done.out) == (2, ""), done
    assert not (done.folder / "report.json").exists()
    return done.err.splitlines()[-1]
