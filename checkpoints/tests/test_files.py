"""Checkpoints as tensors by name: every layout of files gives what the library that wrote it reads."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.test_hub import COMMITS, REPO, Hub, hub  # noqa: F401
from tests.models.tiny_gguf import write_gguf

from fidelab.core.errors import InputError
from fidelab_checkpoints.files import Checkpoint, open_checkpoint, to_floats

FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of every kind that checkpoints hold."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(48, 40, generator=generator)
    return {
        "a.weight": base.bfloat16(),
        "b.weight": base.half(),
        "c.weight": base,
        "d.weight": base.to(torch.float8_e4m3fn),
        "e.qweight": torch.randint(-(1 << 31), (1 << 31) - 1, (6, 40), dtype=torch.int32, generator=generator),
        "f.experts": torch.randn(3, 8, 16, generator=generator).bfloat16(),
        "g.empty": torch.zeros(0, 7),
        "h.scalar": torch.tensor(2.5),
    }


def write_folder(
    folder: Path, content: dict[str, torch.Tensor], shards: int = 1, config: dict[str, Any] | None = None
) -> Path:
    """A checkpoint of these tensors, in as many files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    if shards == 1:
        save_file(content, folder / "model.safetensors")
        return folder
    where: dict[str, str] = {}
    for n in range(shards):
        file = f"model-{n + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(content.items())[n::shards])
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def rewrite_header(file: Path, change: Any) -> None:
    """Replace the header of a safetensors file by what ``change`` makes of it."""
    raw = file.read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    text = json.dumps(change(json.loads(raw[8:size]))).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[size:])


def bits(value: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_have_the_bytes_shapes_and_values_that_safetensors_reads(shards: int, tmp_path: Path) -> None:
    content = tensors()
    with open_checkpoint(write_folder(tmp_path / "m", content, shards)) as checkpoint:
        assert set(checkpoint.tensors) == set(content)
        assert (checkpoint.index is None) == (shards == 1)
        for file in checkpoint.files:
            for name, expected in load_file(file).items():
                raw, floats = checkpoint.read(name), checkpoint.floats(name)
                assert raw.shape == checkpoint.tensors[name].shape == tuple(expected.shape)
                assert raw.tobytes() == bits(expected)
                assert checkpoint.tensors[name].nbytes == expected.nbytes
                assert torch.equal(torch.from_numpy(floats), expected.float())


@pytest.mark.parametrize("dtype", FLOAT8)
def test_all_codes_of_8_bit_floats_decode_as_in_torch(dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(FLOAT8[dtype]).float().numpy()
    assert np.array_equal(to_floats(codes, dtype), expected, equal_nan=True)


@pytest.mark.parametrize("nbytes", [8, 100, 1000, 1 << 20])
def test_chunks_joined_are_the_tensor_and_end_with_rows(nbytes: int, tmp_path: Path) -> None:
    with open_checkpoint(write_folder(tmp_path / "m", tensors())) as checkpoint:
        for name, info in checkpoint.tensors.items():
            chunks = list(checkpoint.chunks(name, nbytes))
            assert b"".join(chunk.tobytes() for chunk in chunks) == checkpoint.read(name).tobytes()
            assert all(chunk.nbytes <= max(nbytes, 8) for chunk in chunks)
            if info.shape and chunks and 0 < info.shape[-1] * chunks[0].itemsize <= nbytes:
                assert all(chunk.size % info.shape[-1] == 0 for chunk in chunks)


def test_a_gguf_file_gives_what_its_package_dequantizes(tmp_path: Path) -> None:
    import gguf

    def q8(values: Any) -> tuple[Any, Any]:
        return gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0

    file = write_gguf(tmp_path / "m.gguf", stored={"blk.0.ffn_up.weight": q8})
    reader = gguf.GGUFReader(file)
    with open_checkpoint(file) as checkpoint:
        assert checkpoint.metadata["general.architecture"] == "llama"
        assert set(checkpoint.tensors) == {tensor.name for tensor in reader.tensors}
        for tensor in reader.tensors:
            info = checkpoint.tensors[tensor.name]
            assert (info.dtype, info.nbytes) == (tensor.tensor_type.name, tensor.n_bytes)
            assert checkpoint.read(tensor.name).tobytes() == tensor.data.tobytes()
            assert b"".join(map(bytes, checkpoint.chunks(tensor.name, 64))) == tensor.data.tobytes()
            expected = gguf.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(checkpoint.floats(tensor.name), expected)


def test_a_split_gguf_is_one_checkpoint(tmp_path: Path) -> None:
    import gguf

    values = {f"blk.{n}.w": np.full((2, 32), n, np.float32) for n in range(3)}
    for n, (name, value) in enumerate(values.items()):
        writer = gguf.GGUFWriter(tmp_path / f"m-{n + 1:05}-of-00003.gguf", "llama")
        if n == 0:
            writer.add_block_count(3)
        writer.add_uint16("split.no", n)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", 3)
        writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for path in (tmp_path, tmp_path / "m-00001-of-00003.gguf"):
        with open_checkpoint(path) as checkpoint:
            assert {key: checkpoint.floats(key).tolist() for key in checkpoint.tensors} == {
                key: value.tolist() for key, value in values.items()
            }
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(InputError, match="lacks 1 of 3 parts"):
        open_checkpoint(tmp_path / "m-00001-of-00003.gguf")


def test_quantization_is_found_where_each_writer_keeps_it(tmp_path: Path) -> None:
    gptq = {"quant_method": "gptq", "bits": 4}
    content = {"w": torch.zeros(1)}
    nested: dict[str, Any] = {"text_config": {"quantization_config": gptq}}
    configs: list[dict[str, Any]] = [{"quantization_config": gptq}, nested, {"model_type": "llama"}]
    for n, config in enumerate(configs):
        folder = write_folder(tmp_path / str(n), content, config=config)
        assert open_checkpoint(folder).quantization == (gptq if n < 2 else None)
    (folder / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
    assert open_checkpoint(folder).quantization == {**gptq, "group_size": 128}
    folder = write_folder(tmp_path / "c", content, config={"compression_config": {"config_groups": {}}})
    assert open_checkpoint(folder).quantization == {"quant_method": "compressed-tensors", "config_groups": {}}


def test_missing_shards_are_an_error_or_listed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tensors(), 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match="1 of 3 weight files are missing"):
        open_checkpoint(folder)
    checkpoint = open_checkpoint(folder, complete=False)
    assert checkpoint.missing_files == ("model-00002-of-00003.safetensors",)
    assert len(checkpoint.files) == 2


def test_a_shard_whose_name_no_file_can_have_is_missing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tensors(), 3)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00002-of-00003", "x" * 300))
    assert open_checkpoint(folder, complete=False).missing_files == (f"{'x' * 300}.safetensors",)
    with pytest.raises(InputError, match="1 of 3 weight files are missing"):
        open_checkpoint(folder)


def test_a_tensor_in_two_shards_is_kept_once_and_listed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tensors(), 2)
    second = folder / "model-00002-of-00002.safetensors"
    save_file({**load_file(second), "a.weight": torch.ones(2)}, second)
    checkpoint = open_checkpoint(folder)
    assert [copy.name for copy in checkpoint.copies] == ["a.weight"]
    assert checkpoint.tensors["a.weight"].shape == (48, 40)
    assert checkpoint.read(checkpoint.copies[0]).tolist() == [1, 1]


def _spans(name: str, begin: int, end: int) -> Any:
    return lambda header: {**header, name: {**header[name], "data_offsets": [begin, end]}}


BAD_HEADERS = {
    "overlap": ("begins within", lambda header: {**header, "x": {**header["b.weight"]}}),
    "beyond the end": ("truncated", _spans("c.weight", 1 << 40, (1 << 40) + 48 * 40 * 4)),
    "gap": ("leaves a gap", lambda header: {k: v for k, v in header.items() if k != "c.weight"}),
    "billions": ("impossible sizes", lambda header: {**header, "x": {**header["c.weight"], "shape": [10**9] * 8}}),
    "fp8 size": ("not its shape's size", lambda header: {**header, "d.weight": {**header["d.weight"], "shape": [9]}}),
    "list": ("not an object", lambda header: [header]),
}


@pytest.mark.parametrize("fault", BAD_HEADERS)
def test_a_malicious_header_is_one_line(fault: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tensors())
    says, change = BAD_HEADERS[fault]
    rewrite_header(folder / "model.safetensors", change)
    with pytest.raises(InputError, match=says) as refused:
        open_checkpoint(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("length", [0, 7, 1 << 20, 1 << 62])
def test_a_truncated_or_endless_header_is_one_line(length: int, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tensors())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length] if length < 8 else length.to_bytes(8, "little") + b"{}")
    with pytest.raises(
        InputError, match="model.safetensors is empty" if length == 0 else "not a complete safetensors file"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize("shard", ["../other.safetensors", "/etc/passwd", "a/../../b.safetensors"])
def test_an_index_cannot_name_files_outside_its_folder(shard: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tensors(), 2)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    for complete in (True, False):
        with pytest.raises(InputError, match="outside its folder"):
            open_checkpoint(folder, complete=complete)


def test_pickled_weights_and_a_folder_without_config_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(InputError, match=r"pickled weights only \(pytorch_model.bin\)"):
        open_checkpoint(tmp_path)
    folder = write_folder(tmp_path / "m", tensors())
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match="has no config"):
        open_checkpoint(folder)


def test_a_header_of_millions_of_values_is_refused_within_memory(tmp_path: Path) -> None:
    """100 MB of short numbers would be gigabytes of objects."""
    folder = write_folder(tmp_path / "m", {"w": torch.zeros(1)})
    text = b'{"x":[' + b"1000," * 18_000_000 + b"1]}"
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="more than 4,000,000 values"):
        open_checkpoint(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


HUB_SCRIPT = """
import hashlib, json, sys
from fidelab_checkpoints.files import open_checkpoint
with open_checkpoint(sys.argv[1]) as checkpoint:
    name = sys.argv[2]
    print(json.dumps([sorted(checkpoint.tensors), hashlib.sha256(checkpoint.read(name)).hexdigest(),
                      [hashlib.sha256(b"".join(map(bytes, checkpoint.chunks(name, 4096)))).hexdigest()][0]]))
"""


def hub_environment(endpoint: str, home: Path) -> dict[str, str]:
    """Variables with which a process asks the imitated hub."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return env | {"HF_HUB_DISABLE_XET": "1", "FIDELAB_CACHE": str(home / "fidelab")}


def _from_hub(endpoint: str, name: str, tensor: str, home: Path) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", HUB_SCRIPT, name, tensor],
        env=hub_environment(endpoint, home),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer: list[Any] = json.loads(done.stdout)
    return answer


def _expected(checkpoint: Checkpoint, tensor: str) -> list[Any]:
    from hashlib import sha256

    content = sha256(checkpoint.read(tensor).data).hexdigest()
    return [sorted(checkpoint.tensors), content, content]


def test_a_repository_on_the_hub_is_read_as_its_folder(hub: Hub, tmp_path: Path) -> None:  # noqa: F811
    content = {"small": torch.arange(64.0), "large": torch.randn(1 << 16)}
    folder = write_folder(tmp_path / "source", content, 2)
    hub.files[COMMITS["main"]] = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert _from_hub(hub.endpoint, REPO, "small", tmp_path / "home") == _expected(open_checkpoint(folder), "small")
