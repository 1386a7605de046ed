"""Files that are nested too deeply or that aliases expand: one line, whichever command reads them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fidelab.core import format_bytes, plain_json
from fidelab.models.tiny import make_tiny
from tests.run.harness import SMALL, cli, write_inputs

DEEP = "[" * 20_000  # far beyond what any parser recurses into
OBJECTS = '{"a":' * 20_000
CLOSED = '{"a":' + "[" * 900 + "]" * 900 + "}"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
TEXTS = {"lists": DEEP, "objects": OBJECTS, "closed": CLOSED, "aliases": LAUGHS}


def report(room: Path, text: str) -> list[str]:
    folder = room / "runs" / "20260101-000000-x"
    folder.mkdir(parents=True)
    (folder / "config.resolved.yaml").write_text("model: fake\n")
    (folder / "report.json").write_text(text)
    return [str(folder)]


def outcomes(room: Path, text: str) -> list[str]:
    shutil.rmtree(room / "runs", ignore_errors=True)
    done = cli("compare", "fake", *SMALL, "--kv", "tilt[q=0.6]", "--windows", 2, "--n-ctx", 16, "--limit", 1, cwd=room)
    (done.folder / "outcomes.json").write_text(text)
    return [str(done.folder)]


def named(name: str) -> Callable[[Path, str], list[str]]:
    def write(room: Path, text: str) -> list[str]:
        (room / name).write_text(text)
        return [name]

    return write


def checkpoint(name: str) -> Callable[[Path, str], list[str]]:
    def write(room: Path, text: str) -> list[str]:
        folder = make_tiny(room / "model")
        (folder / name).write_text(text)
        return [str(folder)]

    return write


def header(room: Path, text: str) -> list[str]:
    """A checkpoint whose weights have such a header."""
    folder = make_tiny(room / "model")
    raw = text.encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    return [str(folder)]


def reference(room: Path, text: str) -> list[str]:
    (room / "pack").mkdir()
    (room / "pack" / "manifest.json").write_text(text)
    return ["pack"]


def samples(room: Path, text: str) -> list[str]:
    for name in ("one", "other"):
        (room / name).mkdir()
        (room / name / "samples_x_2026-01-01T00-00-00.000000.jsonl").write_text(text)
    return ["one"]


Writer = Callable[[Path, str], list[str]]
COMMANDS: dict[str, tuple[Writer, list[str]]] = {
    "check": (report, ["check", "FILE", "--max-kld", "1"]),
    "report": (report, ["report", "FILE"]),
    "report --rescore": (outcomes, ["report", "FILE", "--rescore"]),
    "compare --resume": (named("config.resolved.yaml"), ["compare", "--resume", "."]),
    "compare -f": (named("own.yaml"), ["compare", "-f", "FILE"]),
    "compare MODEL": (checkpoint("config.json"), ["compare", "FILE", "--kv", "q8_0", "--dry-run"]),
    "compare --reference": (reference, ["compare", "fake", "--engine", "fake", "--reference", "FILE", "--kv", "exact"]),
    "reproduce": (named("own.yaml"), ["reproduce", "FILE", "--trust", "FILE"]),
    "reproduce --resume": (named("config.resolved.yaml"), ["reproduce", "--resume", ".", "--trust", "FILE"]),
    "estimate fit": (named("points.json"), ["estimate", "fit", "FILE", "--y", "y"]),
    "estimate": (checkpoint("config.json"), ["estimate", "FILE"]),
    "checkpoint audit": (checkpoint("config.json"), ["checkpoint", "audit", "FILE"]),
    "checkpoint audit, header": (header, ["checkpoint", "audit", "FILE"]),
    "checkpoint audit, tokenizer": (checkpoint("tokenizer_config.json"), ["checkpoint", "audit", "FILE"]),
    "checkpoint audit, index": (checkpoint("model.safetensors.index.json"), ["checkpoint", "audit", "FILE"]),
    "checkpoint convert": (checkpoint("config.json"), ["checkpoint", "convert", "FILE", "out", "--to", "awq"]),
    "checkpoint quantize": (named("recipe.yaml"), ["checkpoint", "quantize", "fake", "--recipe", "FILE"]),
    "import refract": (named("refract.json"), ["import", "refract", "FILE"]),
    "import lm-eval": (samples, ["import", "lm-eval", "FILE", "other"]),
}


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_deep_file_is_one_line(command: str, kind: str, tmp_path: Path, cache: Path) -> None:
    write_inputs(tmp_path)
    write, words = COMMANDS[command]
    [file] = write(tmp_path, TEXTS[kind])
    done = cli(*(file if word == "FILE" else word for word in words), cwd=tmp_path)
    assert "Traceback" not in done.err
    assert done.code in ((0, 1, 2, 3) if command.startswith(("checkpoint audit", "report", "runs")) else (2,)), done
    if done.code == 2:
        assert "(see: fidelab" not in done.err  # the words were right, so the file was read
        assert done.err.splitlines()[-1].startswith("fidelab: "), done.err
        assert len(done.err.splitlines()[-1]) < 2000


@pytest.mark.parametrize("kind", ["lists", "objects", "closed"])
def test_a_container_programs_deep_answer_is_one_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "answer").write_text(TEXTS[kind])
    program = tmp_path / "docker"
    program.write_text(f"#!{sys.executable}\nprint(open({str(tmp_path / 'answer')!r}).read())\n")
    program.chmod(0o755)
    monkeypatch.setenv("FIDELAB_CONTAINER", str(program))
    done = cli("setup", "engines", "--image", "an/image:1", cwd=tmp_path)
    assert "Traceback" not in done.err
    assert "its answer cannot be read" in done.err + done.out


def test_json_of_other_programs_is_read_with_its_numbers_and_bounded() -> None:
    assert plain_json('{"a": [Infinity, 1e400, 1000000000000000019884624838656]}')["a"][2] > 1 << 64
    for text in (DEEP, OBJECTS, CLOSED, json.dumps("x")[:-1]):
        with pytest.raises(ValueError, match=r"nested deeper than 64 levels|Unterminated|Expecting"):
            plain_json(text)


def test_sizes_are_shown_in_a_unit_that_shows_each() -> None:
    assert format_bytes(3 << 30, 1 << 29) == ["3.00 GiB", "0.50 GiB"]
    assert format_bytes(3 << 20, 1 << 10) == ["3,072.00 KiB", "1.00 KiB"]
    assert format_bytes(57, 0) == ["57 bytes", "0 bytes"]
    assert format_bytes(0) == ["0 bytes"]


@pytest.mark.parametrize(("opens", "closes"), [("[", "]"), ('{"a":', "}"), ('[1,{"a":', "}]")])
def test_64_levels_are_read_and_65_are_refused(opens: str, closes: str) -> None:
    each = opens.count("[") + opens.count("{")
    whole, rest = divmod(64, each)
    inner = "[" * rest + "1" + "]" * rest
    plain_json(opens * whole + inner + closes * whole)
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        plain_json(opens * whole + f"[{inner}]" + closes * whole)
