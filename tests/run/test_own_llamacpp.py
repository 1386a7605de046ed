"""``--bin``: the user's own llama-perplexity, its files, its log, and everything that can be wrong with it."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from fidelab.imports.kld_base import BaseFile
from fidelab.imports.kld_dumps import compare_window
from fidelab.models.pieces import Pieces
from fidelab.run import own_llamacpp
from tests.models.tiny_gguf import write_gguf
from tests.run.harness import cli

ROOT = Path(__file__).parents[2]
LINES = [f"{word} number {n} of this text says {n * n} and stops.\n" for n in range(60) for word in ("Line", "Row")]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a model, a text of several documents, and programs."""
    write_gguf(tmp_path / "m.gguf")
    parts = [f" = Title {n} = \n\n{''.join(LINES[6 * n : 6 * n + 6])}" for n in range(18)]
    (tmp_path / "text.txt").write_text("".join(parts))
    program(tmp_path / "build/bin")
    return tmp_path


def program(folder: Path) -> Path:
    """The stand-ins as executable files, with a library beside them as builds have it."""
    folder.mkdir(parents=True)
    for name, function in (("llama-bench", "bench"), ("llama-perplexity", "main")):
        path = folder / name
        lines = [
            "import sys",
            f"sys.path.insert(0, {str(ROOT)!r})",
            f"from tests.run.fake_perplexity import {function}",
        ]
        path.write_text("\n".join([f"#!{sys.executable}", *lines, f"sys.exit({function}(sys.argv[1:]))\n"]))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (folder / "libllama.so").write_bytes(b"")
    return path


def compare(here: Path, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in this process; programs get the variables."""
    command = ("compare", "m.gguf", "--engine", "llamacpp", "--bin", "build", *words)
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "COLUMNS": "2000", **variables}):
        done = cli(*command, cwd=here)
    return subprocess.CompletedProcess([*map(str, command)], done.code, done.out, done.err)


USUAL = ("--text", "text.txt", "--n-ctx", "32", "--windows", "40")


def measured(here: Path, *words: object, **variables: str) -> dict[str, Any]:
    done = compare(here, *words, "--json", **variables)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def resumed(here: Path, run: Path) -> dict[str, Any]:
    done = cli("compare", "--resume", run, "--json", cwd=here)
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def kld(arm: dict[str, Any], key: str = "mean") -> float:
    [metric] = [metric for metric in arm["axes"]["kld"]["metrics"] if metric["key"] == key and not metric["cell"]]
    return float(metric["value"])


def test_the_mean_is_that_of_the_programs_own_files(here: Path) -> None:
    report = measured(here, "--kv", "q8_0", "--kv", "q4_0", *USUAL, "--keep-rows")
    [run] = (here / "runs").glob("2*")
    reference = BaseFile.read(run / "rows/reference-32.kld")
    for arm in report["candidates"]:
        test = BaseFile.read(run / f"rows/{arm['name']}-32.kld")
        kl = np.concatenate([compare_window(reference, test, number).kl for number in reference.numbers])
        assert kld(arm) == pytest.approx(kl.mean(), rel=1e-9)
    assert 0 < kld(report["candidates"][0]) < kld(report["candidates"][1])


def test_documents_of_the_text_are_the_units_of_the_intervals(here: Path) -> None:
    report = measured(here, "--kv", "q8_0", *USUAL)
    facts = report["candidates"][0]["axes"]["kld"]["facts"]
    read = 40 * 32  # tokens, which are bytes here
    starts = [match.start() for match in re.finditer(r"^ = Title", (here / "text.txt").read_text(), re.MULTILINE)]
    assert facts["n_documents"] == sum(start < read for start in starts)


def test_a_quick_look_reads_as_many_documents_as_a_confirmation_needs(here: Path) -> None:
    done = compare(here, "--kv", "q8_0", "--text", "text.txt", "--n-ctx", "32", "--quick", "--dry-run")
    assert "10 windows of 32 tokens" in done.stdout


def test_a_dry_run_knows_how_long_it_takes_once_the_program_has_run_with_these_options(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fidelab.plan.paces.cache_dir", lambda: here / "cache")
    asked = ("--kv", "q8_0", *USUAL)
    assert "how long is not known" in compare(here, *asked, "--dry-run").stdout
    measured(here, *asked)
    expected = json.loads(compare(here, *asked, "--dry-run", "--json").stdout)["seconds"]
    rates = [pace["tokens_per_second"] for pace in json.loads((here / "cache/own_paces.json").read_text())]
    assert expected == pytest.approx(2 * 40 * 32 / rates[-1], abs=0.05)  # two starts of 40 windows of 32 tokens
    assert "at the pace of its last run here" in compare(here, *asked, "--dry-run").stdout
    other = compare(here, *asked, "--threads", "1", "--dry-run").stdout
    assert "how long is not known" in other


@pytest.mark.parametrize("name", ["m", "m[1]", "m*"])
def test_a_split_model_has_the_hash_of_its_own_parts(tmp_path: Path, name: str) -> None:
    hashes = []
    for folder, second in (("a", b"2"), ("b", b"2"), ("c", b"3")):
        (tmp_path / folder).mkdir()
        parts = [tmp_path / folder / f"{name}-0000{n}-of-00002.gguf" for n in (1, 2)]
        for part, content in zip(parts, (b"1", second), strict=True):
            part.write_bytes(content)
        hashes.append(own_llamacpp._weights(parts[0]))
    assert hashes[0] == hashes[1] != hashes[2]


def test_files_of_rows_are_gone_after_the_run(here: Path) -> None:
    assert compare(here, "--kv", "q8_0", *USUAL).returncode == 0
    assert not [*here.rglob("*.kld")]


def test_how_much_of_the_run_is_left_is_known_when_its_first_line_is_told(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[float, float]] = []
    monkeypatch.setattr("fidelab.cli.progress._Lines.progress", lambda self, job, tokens: told.append(self._pace))
    measured(here, *USUAL, "--kv", "q8_0")
    assert told
    assert all(0 < done <= total for done, total in told), told


def test_progress_names_the_context_and_counts_from_when_the_model_is_there(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, Any]] = []
    lines = "fidelab.cli.progress._Lines"
    monkeypatch.setattr(f"{lines}.stage", lambda self, text: told.append(("stage", text)))
    monkeypatch.setattr(f"{lines}.opened", lambda self, job, seconds: told.append(("opened", job.role)))
    monkeypatch.setattr(f"{lines}.progress", lambda self, job, tokens: told.append(("progress", job.role)))
    monkeypatch.setattr(f"{lines}.job_ended", lambda self, job, result: told.append(("ended", result.timing)))
    report = measured(here, "--kv", "q8_0", "--text", "text.txt", "--n-ctx", "32,64", "--windows", "20")
    assert [text for what, text in told if what == "stage"] == ["windows of 32 tokens: 20", "windows of 64 tokens: 10"]
    working: set[str] = set()
    for what, role in told:
        if what == "opened":
            working.add(role)
        elif what == "progress":
            assert role in working
        elif what == "stage":
            working = set()
    spent = [timing["seconds"] for what, timing in told if what == "ended"]
    assert len(spent) == 2
    assert sum(spent) == pytest.approx(report["candidates"][0]["timing"]["seconds"])  # each start its own


def test_what_the_log_names_is_the_proof_and_the_size(here: Path) -> None:
    [arm] = measured(here, "--kv", "q8_0/q4_0", *USUAL)["candidates"]
    assert (arm["ran"]["k_dtype"], arm["ran"]["v_dtype"]) == ("q8_0", "q4_0")
    assert arm["ran"]["proof"]["named"] == "shown"


def test_a_log_without_types_leaves_the_proof_open(here: Path) -> None:
    [arm] = measured(here, "--kv", "q8_0", *USUAL, FAKE_PERPLEXITY="silent")["candidates"]
    assert arm["status"] == "ok"
    assert arm["ran"]["proof"]["named"].startswith("open: ")


def test_a_build_that_ignores_the_type_is_not_taken_for_it(here: Path) -> None:
    [arm] = measured(here, "--kv", "q8_0", *USUAL, FAKE_PERPLEXITY="ignores types")["candidates"]
    assert arm["status"] == "not_engaged"
    assert "the engine stored f16" in arm["reason"]


@pytest.mark.parametrize("mode", ["crash q4_0", "killed q4_0"])
def test_a_program_that_fails_for_one_candidate_leaves_the_others(here: Path, mode: str) -> None:
    done = compare(here, "--kv", "q4_0", "--kv", "q8_0", *USUAL, "--json", FAKE_PERPLEXITY=mode)
    assert done.returncode == 1
    broken, good = json.loads(done.stdout)["candidates"]
    assert (broken["status"], good["status"]) == ("failed", "ok")
    expected = "exit code 1: ggml_cuda_host_malloc: failed" if mode.startswith("crash") else "ended by signal 6"
    assert expected in broken["reason"]
    assert not [*here.rglob("*.kld")]


def test_a_failed_reference_fails_the_run_in_one_line(here: Path) -> None:
    done = compare(here, "--kv", "q8_0", *USUAL, FAKE_PERPLEXITY="crash f16")
    assert done.returncode == 1
    assert "the reference failed: llama-perplexity ended with exit code 1" in done.stderr


def test_a_text_that_is_too_short_says_how_many_windows_it_has(here: Path) -> None:
    done = compare(here, "--kv", "q8_0", "--text", "text.txt", "--n-ctx", "64", "--windows", "9999")
    assert done.returncode == 1
    assert re.search(r"the text has \d+ of 9999 windows of 64 tokens: write --windows \d+ or add text", done.stderr)


def test_a_stopped_run_ends_the_program_and_is_resumed(here: Path) -> None:
    command = [sys.executable, "-m", "fidelab", "compare", "m.gguf", "--engine", "llamacpp", "--bin", "build"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FAKE_PERPLEXITY": "stall"}
    child = subprocess.Popen(
        [*command, "--kv", "q8_0", *USUAL],
        cwd=here,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not [*here.rglob("reference-32.kld")]:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    [run] = (here / "runs").glob("2*")
    assert f"--resume {run.relative_to(here)}" in said or str(run) in said
    assert resumed(here, run)["candidates"][0]["status"] == "ok"


def test_a_candidate_that_was_measured_is_not_run_again(here: Path) -> None:
    compare(here, "--kv", "q8_0", *USUAL)
    again = compare(here, "--kv", "q8_0", "--kv", "q4_0", *USUAL)
    assert "q8_0: found in an earlier run" in again.stderr
    other = compare(here, "--kv", "q8_0", *USUAL, FAKE_BUILD="def5678")
    assert "q8_0: found in an earlier run" not in other.stderr


def decode(arm: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = arm["benches"]["decode"]
    return found


def test_speed_is_measured_by_llama_bench_at_the_context(here: Path) -> None:
    report = measured(here, "--kv", "q8_0", *USUAL, "--speed")
    size = (here / "m.gguf").stat().st_size
    for arm, kv_bytes in ((report["reference"], 4), (report["candidates"][0], 2 * 34 / 32)):
        [metric] = decode(arm)["metrics"]
        assert metric["cell"] == {"depth": 32, "batch": 1}
        assert metric["value"] == pytest.approx(1.001 * 100_000 / (size + 100 * kv_bytes), rel=1e-6)
        assert decode(arm)["facts"]["measured"] == "by llama-bench, in a process of its own"


@pytest.mark.parametrize(("flags", "measures"), [((), True), (("--no-speed",), False)])
def test_on_a_gpu_speed_is_measured_unasked(here: Path, flags: tuple[str, ...], measures: bool) -> None:
    plain = measured(here, "--kv", "q8_0", *USUAL, "--output-dir", "plain")["candidates"][0]
    [arm] = measured(here, "--kv", "q8_0", *USUAL, *flags, FAKE_PERPLEXITY="gpu")["candidates"]
    assert ("decode" in arm["benches"]) == measures
    assert kld(arm) == kld(plain)  # rows are compared while they come


def test_the_folder_above_a_build_is_taken_as_well(here: Path) -> None:
    done = compare(here, "--bin", ".", "--kv", "q8_0", *USUAL, "--dry-run")
    assert (done.returncode, "build/bin/llama-perplexity -m" in done.stdout) == (0, True)


def test_on_a_processor_speed_is_measured_only_if_asked(here: Path) -> None:
    assert "decode" not in measured(here, "--kv", "q8_0", *USUAL)["candidates"][0]["benches"]


def test_the_next_command_starts_the_server_with_the_context_that_was_asked_for(here: Path) -> None:
    report = measured(here, "--kv", "q8_0", *USUAL, "--context", "48")
    assert "-ctk q8_0 -ctv q8_0 -c 48 -fa on" in json.dumps(report)


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("crash", "llama-bench ended with exit code 1: main: error: failed to create context"),
        ("other types", "llama-bench measured 32 tokens at 32 with K f16 and V q8_0"),
        ("garbage", "llama-bench printed no rates"),
    ],
)
def test_a_failed_llama_bench_leaves_the_loss(here: Path, mode: str, says: str) -> None:
    done = compare(here, "--kv", "q8_0", *USUAL, "--speed", "--json", FAKE_BENCH=mode)
    [arm] = json.loads(done.stdout)["candidates"]
    assert (arm["status"], decode(arm)["status"]) == ("ok", "failed")
    assert says in decode(arm)["reason"]
    assert kld(arm) > 0
    assert done.returncode == 1


@pytest.mark.parametrize("missing", [True, False], ids=["missing", "old"])
def test_speed_without_a_llama_bench_is_refused_only_if_asked(here: Path, missing: bool) -> None:
    if missing:
        (here / "build/bin/llama-bench").unlink()
    variables = {} if missing else {"FAKE_BENCH": "old"}
    done = compare(here, "--kv", "q8_0", *USUAL, "--speed", **variables)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "holds no llama-bench" in done.stderr if missing else "has no --n-depth: it is too old" in done.stderr
    assert compare(here, "--kv", "q8_0", *USUAL, **variables).returncode == 0


def test_a_resumed_run_does_not_start_the_reference_for_a_finished_context_again(here: Path) -> None:
    words = ("--kv", "q8_0", "--text", "text.txt", "--n-ctx", "16", "--n-ctx", "32", "--windows", "20")
    assert compare(here, *words).returncode == 0
    [run] = (here / "runs").glob("2*")
    (run / "contexts/32.json").unlink()
    (run / "report.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in (run / "logs").iterdir()}
    resumed(here, run)
    after = {path: path.stat().st_mtime_ns for path in (run / "logs").iterdir()}
    assert {path.name for path in after if before.get(path) != after[path]} == {"reference-32.log"}


def test_another_file_of_weights_is_a_candidate(here: Path) -> None:
    write_gguf(here / "q.gguf", seed=1)
    [arm] = measured(here, "--candidate", "model=q.gguf", *USUAL)["candidates"]
    assert (arm["name"], arm["status"], arm["kv"]["k"]) == ("q.gguf", "ok", "f16")
    assert kld(arm) > 0.1


def test_the_program_reads_the_text_that_is_printed_by_a_dry_run(here: Path) -> None:
    done = compare(here, "--kv", "q8_0", *USUAL, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("llama-perplexity -m") == 2
    assert not (here / "runs").exists()


def test_the_reference_may_be_a_file_of_rows(here: Path) -> None:
    first = measured(here, "--kv", "q8_0", *USUAL, "--keep-rows")
    [base] = here.rglob("reference-32.kld")
    second = measured(here, "--reference", base, "--kv", "q8_0", "--text", "text.txt", "--output-dir", "other")
    assert kld(second["candidates"][0]) == kld(first["candidates"][0])


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"text": "changed"}, "other tokens or rows than"),
        ({"words": ("--n-ctx", "64")}, "has windows of 32 tokens; leave --n-ctx out"),
        ({"words": ("--text", "auto")}, "holds no text: name the one that it was made from"),
        ({"damage": True}, "llama-perplexity was ended early"),
    ],
    ids=["another text", "another context", "no text", "damaged"],
)
def test_a_file_of_rows_of_something_else_is_refused(here: Path, changed: dict[str, Any], says: str) -> None:
    compare(here, "--kv", "q8_0", *USUAL, "--keep-rows")
    [base] = here.rglob("reference-32.kld")
    if "text" in changed:
        (here / "text.txt").write_text((here / "text.txt").read_text().replace("number", "nombre"))
    if "damage" in changed:
        base.write_bytes(base.read_bytes()[:-9])
    words = ("--text", "text.txt", *changed.get("words", ()))
    done = compare(here, "--reference", base, "--kv", "q8_0", *words, "--output-dir", "other")
    assert done.returncode in (1, 2)
    assert says in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--bin", "nowhere", "--kv", "q8_0"), "--bin nowhere: the folder does not exist"),
        (("--bin", "empty", "--kv", "q8_0"), "--bin empty: the folder holds no llama-perplexity"),
        (("--kv", "q8"), "has no cache type 'q8'; it has q8_0"),
        (("--kv", "q8_0[group=32]"), "llama.cpp's types have no options"),
        (("--kv", "q8_0", "--kv", "q8_0"), "candidate 'q8_0' is given twice"),
        (("--candidate", "model=missing.gguf"), "missing.gguf"),
        (("--kv", "q8_0", "--n-ctx", "128"), "--n-ctx 128 is beyond the limit of "),
        (("--kv", "q8_0", "--axes", "kld,gsm8k"), "measures the KLD alone and knows no --axes gsm8k"),
        (("--kv", "q8_0", "--benches", "decode"), "knows no --benches decode"),
        (("--kv", "q8_0", "--runs", "2"), "knows no --runs"),
        (("--kv", "q8_0", "--speed", "--engine-arg", "no-escape=yes"), "cannot measure this configuration's speed"),
        (("--kv", "q8_0", "--deadline", "9"), "knows no --deadline"),
        (("--kv", "q8_0", "--device", "cpu"), "--engine-arg n-gpu-layers=99"),
        (("--kv", "q8_0", "--engine-arg", "ctx-size=9"), "the comparison sets it; write --n-ctx N"),
        (("--kv", "q8_0", "--engine-arg", "n-gpu-layer=9"), "has no flag --n-gpu-layer; nearest: n-gpu-layers"),
        (("--kv", "q8_0", "--engine", "hf"), "bin names the user's own llama.cpp: engine llamacpp"),
        (("--kv", "q8_0", "--reference", "build"), "it is a KV format, or a file that llama-perplexity"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_writes_nothing(here: Path, words: tuple[str, ...], says: str) -> None:
    (here / "empty").mkdir()
    usual = [] if "--n-ctx" in words else ["--n-ctx", "32"]
    done = compare(here, *words, "--text", "text.txt", *usual, "--windows", "4")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert says in done.stderr
    assert not (here / "runs").exists()


def test_a_program_that_is_too_old_is_named(here: Path) -> None:
    done = compare(here, "--kv", "q8_0", *USUAL, FAKE_PERPLEXITY="old")
    assert done.returncode == 2
    assert "it is too old; build or fetch llama.cpp of this year" in done.stderr


def test_a_program_that_does_not_start_is_named(here: Path) -> None:
    (here / "build/bin/llama-perplexity").write_text(
        "#!/bin/sh\necho 'error while loading libcudart.so.12' >&2\nexit 127\n"
    )
    done = compare(here, "--kv", "q8_0", *USUAL)
    assert done.returncode == 2
    assert "does not start: error while loading libcudart.so.12" in done.stderr


def test_pieces_spell_the_text_byte_by_byte(here: Path) -> None:
    pieces = Pieces.read(here / "m.gguf")
    text = "Ünï  = 汉\n".encode()
    ids = {pieces.bytes_of(token): token for token in reversed(range(len(pieces.strings)))}
    tokens = [ids[bytes([byte])] for byte in text]
    assert pieces.ends(tokens, text) == list(range(1, len(text) + 1))
    assert pieces.ends(tokens, b"other") is None
