"""Every reader of files: what is damaged is read or refused in one line that names the file.

Each case takes a good file and damages it at random (seeded): bits flipped, ends cut, wrong types, impossible numbers,
deep nesting, other encodings.  The reader returns or raises one :class:`FidelabError` of one line, within bounds of
time and memory.  ``tests/test_hostile_files.py`` does the same with whole commands; ``FIDELAB_MUTATIONS`` and
``FIDELAB_SEED`` are as there, with twice as many changes per case.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fidelab.captures.container import TensorFile
from fidelab.captures.manifest import MANIFEST, capture_key, load_manifest
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill
from fidelab.captures.writer import CaptureWriter
from fidelab.config.experiment import load, validate_cross
from fidelab.config.load import read_yaml
from fidelab.config.presets import find_preset, load_preset
from fidelab.config.profiles import load_profile, resolve
from fidelab.core.errors import FidelabError
from fidelab.core.serial import to_json
from fidelab.imports import lm_eval
from fidelab.imports.kld_base import BaseFile
from fidelab.imports.refract_axes import recompute
from fidelab.imports.refract_file import read_refract
from fidelab.inputs.conversations import load_traffic
from fidelab.inputs.gsm8k import load_problems
from fidelab.inputs.prompts import load_prompts
from fidelab.inputs.texts import load_text
from fidelab.inputs.tokens import Tokenizer
from fidelab.ledger.index import list_runs
from fidelab.models import resolve as resolve_model
from fidelab.models.gguf import read_header
from fidelab.physics import devices
from fidelab.results.record import Report
from fidelab_checkpoints.recipe import read_recipe
from tests.captures import sample
from tests.imports.sample import refract_report
from tests.imports.test_lm_eval import samples
from tests.models.tiny_gguf import write_gguf
from tests.run.harness import Done, compare
from tests.test_hostile_files import MUTATIONS, another_header, attack_file, changed, parsed, scrambled

DATA = Path(__file__).parent / "imports" / "data"
NUMBERS = (b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"-1", b"0", b"1e-400", b"0x7f", b"1_0", b"18446744073709551616")


def damaged(raw: bytes, dice: random.Random) -> bytes:
    """Bytes of a good file, damaged in one of the ways that hold for any file."""
    match dice.randrange(8):
        case 0:
            return raw[: dice.randrange(len(raw))]
        case 1:
            found = [*re.finditer(rb"-?\d+(\.\d+)?", raw)]
            one = dice.choice(found) if found else re.match(b"", raw)
            assert one is not None
            number = dice.choice((*NUMBERS, b"2026-99-99", b"~", b"{}", b"[1, a]", b"x" * 200_000))
            return raw[: one.start()] + number + raw[one.end() :]
        case 2:
            at = dice.choice((0, dice.randrange(len(raw)), len(raw)))
            nested = dice.choice((b"[", b'{"a":', b"- ", b"(", b"[{a: ")) * dice.choice((99, 20_000))
            return raw[:at] + dice.choice((b"", b"\nx: ", b"\n")) + nested + raw[at:]
        case 3:
            text = raw.decode("utf-8", "replace")
            return text.encode(dice.choice(("utf-16", "utf-32-be", "utf-8-sig", "cp037")), "replace")
        case _:
            return scrambled(raw, dice)


def damaged_value(raw: bytes, dice: random.Random) -> bytes:
    """A JSON or YAML file with other values, or other bytes."""
    if dice.random() < 0.4:
        return damaged(raw, dice)
    text = json.dumps(changed(parsed(raw), dice), ensure_ascii=dice.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")


def damaged_line(raw: bytes, dice: random.Random) -> bytes:
    """A file of JSON lines with another value in one of them, or other bytes."""
    if dice.random() < 0.4:
        return damaged(raw, dice)
    lines: list[Any] = raw.splitlines()
    at = dice.randrange(len(lines))
    lines[at] = json.dumps(changed(json.loads(lines[at]), dice)).encode()
    return b"\n".join(lines) + b"\n"


def damaged_tensors(raw: bytes, dice: random.Random) -> bytes:
    """A safetensors file with another header, or other bytes."""
    if dice.random() < 0.5:
        return damaged(raw, dice)
    return another_header(raw, dice)


@dataclass(frozen=True)
class Case:
    """A kind of file.

    ``make`` writes a good one into a folder and returns it; ``read`` reads it; ``damage`` makes a bad one of its bytes;
    ``named``: which part of its path messages have to hold, its name by default.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    damage: Callable[[bytes, random.Random], bytes] = damaged
    named: Callable[[Path], str] = lambda path: path.name


def text(name: str, content: Any) -> Callable[[Path], Path]:
    """Makes a file of a text, of a value as JSON or YAML, or (.jsonl) of values as lines."""

    def make(folder: Path) -> Path:
        path = folder / name
        if isinstance(content, str):
            path.write_text(content)
        elif path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(value) + "\n" for value in content))
        else:
            path.write_text(json.dumps(content) if path.suffix == ".json" else yaml.safe_dump(content, sort_keys=False))
        return path

    return make


def copied(source: Path) -> Callable[[Path], Path]:
    """Makes a copy of a file."""
    return lambda folder: Path(shutil.copy(source, folder))


def read_profile(path: Path) -> None:
    profile = load_profile(str(path), [path])
    for variant in (None, *profile.variants):
        resolve(str(path), profile, variant)


def read_tensors(path: Path) -> None:
    file = TensorFile(path)
    for name in file.names():
        file.get(name)


def read_capture(path: Path) -> None:
    """Everything of a capture whose manifest was made to hold for its part."""
    capture = Capture(path.parent, verify=False)
    _ = capture.request, capture.pieces()
    for item in range(len(capture.items)):
        for name in capture.names(item):
            capture.array_shape(item, name)
        capture.floats(item, "logprobs", 0, 3)


def make_part(folder: Path, vocab: int) -> Path:
    """The part of a capture of one window of four tokens."""
    request = Prefill("kld", ((1, 2, 3, 4),), 0, 3, ((0, 0, 0, 0),))
    key = capture_key(sample.ARM, request, {}, 0)
    pieces = [f"<{i}>" for i in range(vocab)]
    words = sample.vocabulary(pieces)
    from fidelab.captures.writer import store_vocabulary

    store_vocabulary(folder, words, pieces)
    out = CaptureWriter(folder / "arm" / "kld-0-r0", request, key, to_json(sample.ARM), words)
    scores = np.random.default_rng(0).normal(size=(3, vocab))
    rows = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    out.add(0, {"logprobs": rows.astype(np.float16)})
    return out.finish("logprobs", {}, {}) / "part-00000.safetensors"


def read_base(path: Path) -> None:
    base = BaseFile.read(path)
    for number in base.numbers:
        rows = base.open(number)
        _ = base.tokens(number), rows.rows(0, 4), rows.unknown(0, 4)


def read_refract_axes(path: Path) -> None:
    file = read_refract(path)
    _ = file.model, file.backend, file.version, file.kv("reference"), file.kv("candidate"), file.score("gtm")
    recompute(file, 0)


def read_devices(path: Path) -> None:
    for name, row in devices._read(path).items():
        devices._device(name, row, str(path))


@cache
def fake() -> Tokenizer:
    return Tokenizer.load(resolve_model("fake"))


EXPERIMENT = {
    "model": "fake",
    "engine": "fake",
    "reference": "exact",
    "candidates": ["tilt", {"kv": "tilt[q=0.6]", "name": "six"}],
    "axes": {"kld": {"windows": 2, "n_ctx": 16}, "trajectory": {"n_predict": 4, "limit": 1}},
    "benches": {"decode": {}},
    "limits": {"margin": "1%"},
    "seed": 1,
}
ENGINES = {
    "kind": "cross-engine",
    "model": "m",
    "engines": [
        {"engine": "vllm", "reference": "bf16", "candidate": "fp8_e4m3"},
        {"engine": "llamacpp", "reference": "f16", "candidate": "q8_0"},
    ],
}
CHAT = [{"role": "user", "content": "Rain in Oslo?"}, {"role": "assistant", "content": "Yes."}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}
ROWS = [{"name": f"{n}", "batch": n, "tok_s": 9.5 * n, "none": None} for n in range(1, 5)]
MINE = {"memory": 32, "bandwidth": 640, "sustained": 600, "compute": {"fp8_e4m3": 383}, "links": {"pcie": 64}}
RECIPE = {
    "method": "gptq",
    "scheme": {"format": "W4A16", "group": 32},
    "keep": ["lm_head", "re:.*gate$"],
    "keep_layers": {"first": 1, "every": 6},
    "calibration": {"sources": [{"text": "recipe.yaml", "weight": 0.5}], "samples": 16, "length": 64},
}
PACKAGE = Path(load.__code__.co_filename).parents[1]

CASES = {
    "experiment": Case(text("run.yaml", EXPERIMENT), load, damaged_value),
    "cross-engine": Case(
        text("cross.yaml", ENGINES), lambda path: validate_cross(read_yaml(path), str(path)), damaged_value
    ),
    "profile": Case(copied(PACKAGE / "config" / "profiles" / "decode.yaml"), read_profile, damaged_value),
    "preset": Case(
        copied(PACKAGE / "config" / "presets" / "coder-30b.yaml"),
        lambda path: load_preset(find_preset(str(path))),
        damaged_value,
    ),
    "recipe": Case(text("recipe.yaml", RECIPE), read_recipe, damaged_value),
    "devices": Case(text("devices.yaml", {"mine": MINE, "other": MINE}), read_devices, damaged_value),
    "manifest": Case(
        lambda folder: sample.write(folder) / MANIFEST,
        lambda path: load_manifest(path.parent),
        damaged_value,
        named=lambda path: path.parent.name,
    ),
    "container": Case(lambda folder: make_part(folder, 8), read_tensors, damaged_tensors),
    "part": Case(lambda folder: make_part(folder, 8), read_capture, damaged_tensors, lambda path: path.parent.name),
    "request": Case(
        lambda folder: sample.write(folder) / "probe.json.gz",
        lambda path: Capture(path.parent, verify=False).request,
        named=lambda path: path.parent.name,
    ),
    "traffic": Case(
        text("log.jsonl", [{"messages": CHAT, "tools": [TOOL]}] * 3),
        lambda path: load_traffic(path, fake()),
        damaged_line,
    ),
    "plain text": Case(text("log.txt", "Some text. " * 50), lambda path: load_traffic(path, fake())),
    "prompts": Case(text("p.jsonl", [{"prompt": "a"}, {"messages": CHAT, "id": "x"}]), load_prompts, damaged_line),
    "problems": Case(
        text("gsm.jsonl", [{"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}] * 3),
        lambda path: load_problems(str(path)),
        damaged_line,
    ),
    "text": Case(text("words.txt", "Wörter und Sätze. " * 50), lambda path: load_text(path)),
    "GGUF": Case(lambda folder: write_gguf(folder / "m.gguf"), read_header, lambda raw, dice: damaged_head(raw, dice)),
    "perplexity base": Case(copied(DATA / "llama-perplexity-f32.kld"), read_base),
    "lm-eval": Case(
        lambda folder: next(samples(folder, [1, 0, 1]).rglob("*.jsonl")),
        lambda path: lm_eval._read(path.parent.parent),
        damaged_line,
    ),
    "refract": Case(text("refract.json", refract_report()), read_refract_axes, damaged_value),
}


def damaged_head(raw: bytes, dice: random.Random) -> bytes:
    """A GGUF file with other bytes in its header."""
    if dice.random() < 0.2:
        return damaged(raw, dice)
    return scrambled(raw, dice, within=dice.choice((64, 1024, 8192)))


def refusal(read: Callable[[], object]) -> str | None:
    """The message by which a file is refused."""
    try:
        read()
    except FidelabError as error:
        return str(error)
    return None


def assail(case: Case, path: Path, n: int) -> None:
    """Damage a file ``n`` times; every time it is read or refused in one line that names it."""
    case.read(path)

    def ask() -> None:
        said = refusal(lambda: case.read(path))
        assert said is None or (case.named(path) in said and "\n" not in said and len(said) < 2000), said

    attack_file(path, case.damage, ask, n)


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_read_or_refused_in_one_line_that_names_it(name: str, tmp_path: Path) -> None:
    assail(CASES[name], CASES[name].make(tmp_path), 2 * MUTATIONS)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A small run."""
    return compare(tmp_path_factory.mktemp("damaged"), "tilt[q=0.6]", windows=4, limit=2)


def test_a_damaged_report_is_read_or_refused_in_one_line(run: Done, tmp_path: Path) -> None:
    path = Path(shutil.copy(run.folder / "report.json", tmp_path))
    assail(Case(lambda _: path, Report.from_json, damaged_value), path, 2 * MUTATIONS)


@pytest.mark.parametrize("name", ["report.json", "outcomes.json", "config.resolved.yaml"])
def test_a_damaged_run_never_keeps_the_ledger_from_listing_runs(name: str, run: Done, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(run.cwd / "runs", runs, symlinks=True)
    [folder] = runs.glob("2*")

    def ask() -> None:
        assert len(list_runs(runs)) <= 1

    attack_file(folder / name, damaged_value, ask)
