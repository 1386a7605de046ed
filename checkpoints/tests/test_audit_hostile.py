"""Checkpoints of strangers, damaged at random: the audit gives a verdict or one line, within 1 GB and a minute.

``FIDELAB_MUTATIONS`` and ``FIDELAB_SEED`` as in ``tests/test_hostile_files.py``; a quarter of the mutations for each
kind of file.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tests import test_hostile_files as hostile
from tests.models.tiny_gguf import write_gguf
from tests.sizes import first
from tests.test_hostile_files import MUTATIONS, attack, changed, scrambled

from checkpoints.tests.synthetic import Synthetic, plain, quantized
from fidelab.core.errors import FidelabError
from fidelab_checkpoints.audit import audit

EACH = -(-MUTATIONS // 4)


def audited(path: Path, base: Path | None = None) -> None:
    """A verdict whose JSON is whole, or one line."""
    try:
        with hostile.bounds(1 << 30):
            outcome = audit(path, base)
    except FidelabError as error:
        message = str(error)
    else:
        assert outcome.verdict in ("ok", "suspicious", "broken")
        message = json.dumps(outcome.as_json(), allow_nan=False)
    assert "\n" not in message


@pytest.mark.parametrize("form", ["gptq", "w4a16"])
def test_a_strangers_header_is_audited_or_one_line(form: str, tmp_path: Path) -> None:
    folder = quantized(form, moe=form == "w4a16").write(tmp_path / "m")
    base = plain(moe=form == "w4a16").write(tmp_path / "base")
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    good = json.loads(raw[8:size])

    def change(dice: random.Random) -> bytes:
        text = json.dumps(changed(good, dice)).encode()
        whole = len(text).to_bytes(8, "little") + text + raw[size:]
        content = scrambled(raw, dice, within=size) if dice.random() < 0.5 else whole
        file.write_bytes(content)
        return content[:size]

    attack(change, lambda: audited(folder, base), EACH)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
def test_a_strangers_index_and_config_are_read_or_one_line(name: str, tmp_path: Path) -> None:
    folder = _with_all(quantized("w4a16")).sharded().write(tmp_path / "m")
    base = plain().write(tmp_path / "base")
    raw = (folder / name).read_bytes()
    good = json.loads(raw)

    def change(dice: random.Random) -> bytes:
        content = scrambled(raw, dice) if dice.random() < 0.3 else json.dumps(changed(good, dice)).encode()
        (folder / name).write_bytes(content)
        return content

    attack(change, lambda: audited(folder, base), EACH)


def _with_all(content: Synthetic) -> Synthetic:
    """With everything that rules read of a configuration."""
    content.config |= {
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
        "sliding_window": 64,
        "layer_types": ["full"],
    }
    content.config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8}
    return content


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_an_original_of_a_stranger_is_compared_or_one_line(name: str, tmp_path: Path) -> None:
    folder, base = quantized("gptq").write(tmp_path / "m"), plain().write(tmp_path / "base")
    raw = (base / name).read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little") if name != "config.json" else 0

    def change(dice: random.Random) -> bytes:
        content = json.dumps(changed(json.loads(raw[8:size] if size else raw), dice)).encode()
        (base / name).write_bytes(len(content).to_bytes(8, "little") + content + raw[size:] if size else content)
        return content

    attack(change, lambda: audited(folder, base), EACH)


def test_a_strangers_gguf_is_audited_or_one_line(tmp_path: Path) -> None:
    import gguf

    def blocks(values: Any) -> tuple[Any, Any]:
        return gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0

    path = write_gguf(tmp_path / "m.gguf", stored={"blk.0.ffn_up.weight": blocks})
    raw = path.read_bytes()
    header = len(raw) - gguf_data(path)

    def change(dice: random.Random) -> bytes:
        content = scrambled(raw, dice, within=dice.choice((64, 1024, header)))
        path.write_bytes(content)
        return content[:64]

    attack(change, lambda: audited(path), EACH)


def gguf_data(path: Path) -> int:
    """Bytes of tensor data."""
    from fidelab.models.gguf import read_header

    return read_header(path).data_bytes


def _tensors(names: Iterable[str]) -> bytes:
    """A header of empty tensors."""
    return b"{%s}" % b",".join(
        b'"%s":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % name.encode() for name in names
    )


ENDLESS: dict[str, Callable[[], bytes]] = {
    "many short keys": lambda: b"{" + b",".join(b'"%x":1' % n for n in range(6_000_000)) + b"}",
    "many tensors": lambda: _tensors(map(str, range(60_000))),
    "experts with large numbers": lambda: _tensors(f"layers.{n}.mlp.experts.{4000}.a" for n in range(20_000)),
    "an expert beyond all numbers": lambda: _tensors([f"mlp.experts.{'9' * 400}.a", f"mlp.experts.{'9' * 4}.a"]),
    "a name without end": lambda: _tensors(["_" * 50_000_000]),
    "names of underscores": lambda: _tensors("_norm" * 100 + str(n) for n in range(10_000)),
    "a shape without end": lambda: b'{"x":{"dtype":"F4","shape":[' + b"9," * 30_000_000 + b'9],"data_offsets":[0,0]}}',
}


@pytest.mark.parametrize("kind", first(ENDLESS, 2))
def test_a_header_as_large_as_may_be_stays_within_a_gigabyte(kind: str, tmp_path: Path) -> None:
    folder = quantized("gptq").write(tmp_path / "m")
    text = ENDLESS[kind]()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
    del text
    audited(folder)
    shutil.rmtree(folder)
