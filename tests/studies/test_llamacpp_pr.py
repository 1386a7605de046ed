"""``reproduce llama.cpp-pr``: the four things that llama.cpp asks of a new quantization, with stand-in programs."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fidelab.studies.llamacpp_pr import FileFigures, NewQuantization, as_markdown
from tests.models.tiny_gguf import write_gguf
from tests.run.harness import cli
from tests.run.test_own_llamacpp import LINES, program

NEWEST = 222
"""Number of a ggml type that no package knows yet."""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    for seed, name in enumerate(("base", "new", "small", "large")):
        write_gguf(tmp_path / f"m-{name}.gguf", seed=seed)
    _in_a_new_format(tmp_path / "m-new.gguf", "blk.0.ffn_up.weight")
    (tmp_path / "text.txt").write_text("".join(LINES))
    program(tmp_path / "bin")
    return tmp_path


def _in_a_new_format(file: Path, tensor: str) -> None:
    """Give a tensor a type that is newer than the package ``gguf``."""
    content = file.read_bytes()
    at = content.index(tensor.encode()) + len(tensor) + 4 + 2 * 8  # its name, the number of dimensions, and they
    file.write_bytes(content[:at] + NEWEST.to_bytes(4, "little") + content[at + 4 :])


def ask(here: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in this process; programs get the variables."""
    command = ("reproduce", "llama.cpp-pr", "m-new.gguf", "--base", "m-base.gguf", *words)
    usual = ("--text", "text.txt", "--n-ctx", "32", "--windows", "20")
    environment = {"OMP_NUM_THREADS": "1", "PATH": f"{here / 'bin'}:{os.environ['PATH']}", **variables}
    with mock.patch.dict(os.environ, environment):
        done = cli(*command, *usual, cwd=here)
    return subprocess.CompletedProcess([*command], done.code, done.out, done.err)


NEIGHBOURS = ("--neighbours", "m-small.gguf,m-large.gguf")


def test_the_four_parts_are_there_with_every_file(here: Path) -> None:
    done = ask(here, *NEIGHBOURS, "--url", "https://example.org/m-new.gguf")
    assert done.returncode == 0, done.stderr
    heads = re.findall(r"^### (.+)$", done.stdout, re.MULTILINE)
    expected = ["Model in the new format", "Perplexity", "KL divergence from the base", "Speed on the processor"]
    assert heads == [*expected, "How it was measured"]
    parts = dict(zip(heads, re.split(r"^### .+$", done.stdout, flags=re.MULTILINE)[1:], strict=True))
    assert "sha256" in parts["Model in the new format"]
    assert "<https://example.org/m-new.gguf>" in parts["Model in the new format"]
    for head, files in (("Perplexity", 4), ("KL divergence from the base", 3), ("Speed on the processor", 4)):
        assert len(re.findall(r"^\| \**`m-", parts[head], re.MULTILINE)) == files
    assert str(here) not in done.stdout
    [written] = (here / "runs").glob("2*/llama.cpp-pr.md")
    assert written.read_text() == done.stdout


def test_figures_are_those_of_the_comparison_and_of_llama_bench(here: Path) -> None:
    done = ask(here, *NEIGHBOURS, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    [record] = (here / "runs").glob("2*/report.json")
    report = json.loads(record.read_text())
    arms = {Path(arm["model"]).name: arm for arm in report["candidates"]}
    for one in found["files"]:
        size = (here / one["file"]).stat().st_size
        assert len(one["rates"]["tg128"]) == 6  # two starts of three
        assert statistics.median(one["rates"]["tg128"]) == pytest.approx(1.001 * 100_000 / (size + 400), rel=1e-6)
        assert one["perplexity"] == [9.0, 0.5]
        if one["role"] != "base":
            assert one["kld"]["mean"] == _mean(arms[one["file"]])


def _mean(arm: dict[str, Any]) -> float:
    return next(float(m["value"]) for m in arm["axes"]["kld"]["metrics"] if m["key"] == "mean" and not m["cell"])


def test_a_format_that_no_package_knows_has_a_size(here: Path) -> None:
    found = json.loads(ask(here, *NEIGHBOURS, "--json").stdout)
    by_role = {one["role"]: one for one in found["files"]}
    assert by_role["new"]["bits_per_weight"] == pytest.approx(by_role["base"]["bits_per_weight"], rel=0.01)


def test_a_file_whose_speed_cannot_be_measured_keeps_its_loss(here: Path) -> None:
    done = ask(here, *NEIGHBOURS, "--json", FAKE_BENCH="crash")
    assert done.returncode == 1
    assert done.stderr.count("llama-bench ended with exit code 1") == 4
    found = json.loads(done.stdout)
    assert all(one["kld"]["mean"] > 0 and not one["rates"] for one in found["files"] if one["role"] != "base")


def test_a_dry_run_starts_nothing(here: Path) -> None:
    done = ask(here, *NEIGHBOURS, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("llama-perplexity -m") == 4
    assert "then 8 starts of llama-bench" in done.stderr
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--neighbours", "missing.gguf"), "missing.gguf"),
        (("--neighbours", "m-none*.gguf"), "matches no GGUF model"),
        (("--neighbours", "m-new.gguf"), "is given twice"),
        (("--neighbours", "m-small.gguf", "--bin", "empty"), "--bin empty: the folder holds no llama-perplexity"),
        (("--neighbours", "m-small.gguf", "--bin", "half"), "holds no llama-bench"),
        (("--neighbours", ","), "at least one neighbour"),
        ((), "--neighbours"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_refused_before_anything_runs(here: Path, words: tuple[str, ...], says: str) -> None:
    (here / "empty").mkdir()
    program(here / "half")
    (here / "half/llama-bench").unlink()
    done = ask(here, *words)
    assert done.returncode == 2, done.stdout
    assert says in done.stderr
    assert not (here / "runs").exists()


def test_no_program_in_path_is_said(here: Path) -> None:
    done = ask(here, *NEIGHBOURS, PATH="/usr/bin:/bin")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no llama-perplexity in PATH: write --bin FOLDER" in done.stderr


def figures(role: str, file: str, size: int, mean: float | None) -> FileFigures:
    interval = None if mean is None else (0.9 * mean, 1.1 * mean)
    kld = {} if mean is None else {"mean": mean}
    return FileFigures(role, file, size, None, "0" * 64, None, kld, interval, {})


def test_a_neighbour_without_a_figure_is_not_placed_beside_the_new_file() -> None:
    files = (
        figures("new", "new.gguf", 300, 0.01),
        figures("neighbour", "closer.gguf", 290, 0.005),
        figures("neighbour", "broken.gguf", 280, None),
        figures("base", "base.gguf", 900, 0.0),
    )
    found = NewQuantization(files, "llama-perplexity", "a processor", 2, "wiki.raw", 4, 512, ())
    said = [line for line in as_markdown(found).splitlines() if "closer to the base" in line]
    assert said == ["`closer.gguf` is no larger, and closer to the base."]
    assert "`broken.gguf` is" not in as_markdown(found)
