"""Run commands of the project, and keep what they print: ``recorded.jsonl.xz``.

These outputs hold times and last digits that another machine prints otherwise.  So they are recorded once.  Times are
written as seconds since the start, paths of the machine as ``~``.
"""

from __future__ import annotations

import json
import lzma
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from scripts.agents_text.repository import ROOT, Repository, clean

RECORDED = Path(__file__).parent / "recorded.jsonl.xz"
_SECONDS = 240
_FAULTS = (
    (" < ", " <= "),
    (" > ", " >= "),
    (" + ", " - "),
    (" * ", " / "),
    (" and ", " or "),
    (" == ", " != "),
    (" not ", " "),
    ("[0]", "[-1]"),
    (" 1", " 2"),
    ("min(", "max("),
)
_HELP = (
    "compare --help-all", "eval --help", "reproduce --help", "check --help", "report --help", "runs list --help",
    "runs page --help", "share reference --help", "import lm-eval --help", "import loads --help", "import kld-dumps --help",
    "bench serve --help", "bench sweep --help", "bench offline --help", "bench speculation --help", "estimate model --help",
    "estimate fit --help", "serve start --help", "serve check --help", "diagnose attention --help", "diagnose layers --help",
    "diagnose sensitivity --help", "checkpoint audit --help", "checkpoint quantize --help", "checkpoint convert --help",
    "setup install --help", "setup clean --help", "doctor --help",
)  # fmt: skip
_COMMANDS = (
    "estimate smollm2-135m", "estimate devices", "setup formats", "doctor", "serve presets", "setup models",
    "checkpoint audit smollm2-135m", "reproduce list", "serve show gemma4-31b", "reproduce arithmetic",
)  # fmt: skip
_PYTHON = tuple(
    (f"python {' '.join(options)}", options)
    for options in (
        ["-m", "cProfile", "-s", "cumulative", "-m", "fidelab", "estimate", "smollm2-135m"],
        ["-m", "cProfile", "-s", "tottime", "-m", "fidelab", "setup", "formats"],
        ["-X", "importtime", "-m", "fidelab", "--version"],
        ["-m", "dis", "src/fidelab/metrics/intervals.py"],
        ["-m", "dis", "src/fidelab/core/registry.py"],
        ["-m", "trace", "--trace", "--ignore-dir", sys.prefix, "--module", "fidelab.formats.known"],
        ["-m", "tokenize", "-e", "src/fidelab/inputs/prompts.py"],
        ["-m", "ast", "src/fidelab/inputs/files.py"],
        ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "k16v8/tests"],
        ["-m", "pytest", "--fixtures", "-q", "-p", "no:cacheprovider", "tests/engines"],
    )
)
_COMPARE = "compare smollm2-135m --engine hf --dtype float32 --reference f32 --axes {axes} --quick --windows {windows} --n-ctx 256 --kv {kv}"
_RUNS = (
    ("kld", 4, "q8_0 --kv fp8_e4m3"), ("kld", 3, "int4 --kv k16v8"), ("kld", 2, "q4_0 --kv q5_1"),
    ("kld,perplexity", 3, "q4_0 --kv int4"), ("kld", 6, "nvfp4 --kv fp8_e5m2"),
)  # fmt: skip
_TIMES = re.compile(r"\b\d{2}:\d{2}:\d{2}(?:[.,]\d+)?\b")
_EPOCHS = re.compile(r"\b1[789]\d{8}\.\d+\b")
_MOST = 240_000  # characters that are kept of an output
_TRIES = 4  # faults in a source until a test fails


def recorded(*kinds: str) -> list[dict[str, str]]:
    """Return the recorded outputs of these kinds, each with its command."""
    lines = lzma.decompress(RECORDED.read_bytes()).decode().split("\n")
    return [one for one in map(json.loads, filter(None, lines)) if one["kind"] in kinds]


def _shortened(kind: str, text: str) -> str:
    """Return a linter's output without two rules that fill it, and a list of tests with two cases of each test."""
    if kind == "lint":
        parts = re.split(r"\n\n(?=[A-Z]+\d+ )" if "\n    |" in text else "\n", text)
        joint = "\n\n" if "\n    |" in text else "\n"
        return joint.join(part for part in parts if not re.search(r"\b(?:E501|CPY001|Q000|D\d{3}|PLR2004)\b", part))
    seen: Counter[str] = Counter()
    lines = []
    for line in text.split("\n"):
        name = line.partition("[")[0] if " PASSED" in line else ""
        seen[name] += 1
        if not name or seen[name] <= 2:
            lines.append(line)
    return "\n".join(lines)


def _clock(text: str) -> str:
    """Return the text with times of day as seconds since its first."""
    first: float | None = None

    def since(found: re.Match[str]) -> str:
        nonlocal first
        hours, minutes, seconds = found[0].replace(",", ".").split(":")
        now = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
        first = now if first is None else first
        return f"{(now - first) % 86400:.1f} s"

    epochs = [float(found) for found in _EPOCHS.findall(text)]
    return _EPOCHS.sub(lambda found: f"{float(found[0]) - epochs[0]:.3f}", _TIMES.sub(since, text))


def _printed(command: list[str], tree: Path, runs: Path) -> str:
    environment = {
        **os.environ, "PYTHONPATH": f"{tree}/src:{tree}/k16v8/src:{tree}/checkpoints/src", "OMP_NUM_THREADS": "1",
        "COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb", "HYPOTHESIS_STORAGE_DIRECTORY": str(runs / "hypothesis"),
    }  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_SECONDS
        )
        text = done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as late:
        text = (late.stdout or b"").decode(errors="replace") + "\n(stopped)\n"
    text = (
        text.replace(f"{tree}/", "").replace(str(tree), ".").replace(str(runs), "runs").replace(str(ROOT), "~/project")
    )
    return clean(_clock(re.sub(r"\bon \S+ \(Linux[^)]*\)", "on this machine", text)))


def _faults(tree: Path, repository: Repository) -> Iterator[tuple[str, str, str, str]]:
    """Yield test file, source file, its own text and that with a fault."""
    order = random.Random(5)
    tests = {Path(name).name.removeprefix("test_"): name for name in repository.under("tests/", "checkpoints/tests/")}
    sources = [name for name in repository.under("src/", "checkpoints/src/") if Path(name).name in tests]
    order.shuffle(sources)
    for name in sources:
        text = (tree / name).read_text("utf-8")
        lines = text.splitlines(keepends=True)
        numbers = list(range(len(lines)))
        order.shuffle(numbers)
        for number in numbers:
            fitting = [(old, new) for old, new in _FAULTS if old in lines[number]]
            if fitting and not lines[number].lstrip().startswith(("#", '"', "import", "from", "def")):
                old, new = order.choice(fitting)
                changed = [*lines[:number], lines[number].replace(old, new, 1), *lines[number + 1 :]]
                yield tests[Path(name).name], name, text, "".join(changed)


def record(seconds: float) -> None:
    """Run the commands for about so many seconds, and write what they printed."""
    repository, began = Repository(), time.monotonic()
    python = sys.executable
    with tempfile.TemporaryDirectory() as folder:
        tree, runs = repository.extracted(Path(folder) / "tree"), Path(folder) / "runs"
        runs.mkdir()
        records: list[dict[str, str]] = []

        def keep(kind: str, shown: str, text: str) -> None:
            if kind in ("lint", "tests"):
                text = _shortened(kind, text)
            if len(text) < 200:
                return
            records.append({"kind": kind, "command": clean(shown), "output": text[:_MOST]})
            packed = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in records).encode()
            RECORDED.write_bytes(lzma.compress(packed, preset=9 | lzma.PRESET_EXTREME))
            print(f"{time.monotonic() - began:7.0f} s  {len(text):8}  {shown[:90]}", flush=True)

        for line in (*_COMMANDS, *_HELP):
            keep("command", f"fidelab {line}", _printed([python, "-m", "fidelab", *line.split()], tree, runs))
        for axes, windows, kv in _RUNS:
            line = _COMPARE.format(axes=axes, windows=windows, kv=kv)
            where = runs / f"{axes.replace(',', '-')}-{kv.split()[0]}"
            keep(
                "run",
                f"fidelab {line}",
                _printed([python, "-m", "fidelab", *line.split(), "--output-dir", str(where)], tree, runs),
            )
            for file in (
                sorted(where.rglob("*.jsonl")) + sorted(where.rglob("*.log")) + sorted(where.rglob("report.json"))
            ):
                content = file.read_text("utf-8", errors="replace").replace(str(runs), "runs").replace(f"{tree}/", "")
                keep("file", f"cat runs/{file.relative_to(runs)}", clean(_clock(content)))
        for shown, options in _PYTHON:
            keep("command", shown, _printed([python, *options], tree, runs))
        rules = ["--isolated", "--select", "ALL", "--ignore", "D,ANN,INP,S101,COM812", "--output-format"]
        for place, form in (
            ("benchmarks", "full"),
            ("k16v8/src", "full"),
            ("checkpoints/src", "concise"),
            ("src/fidelab/engines", "concise"),
        ):
            keep(
                "lint",
                f"ruff check {place} --select ALL --ignore E501,CPY001,PLR2004",
                _printed([python, "-m", "ruff", "check", place, *rules, form], tree, runs),
            )
        pytest = [
            python,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-n",
            "0",
            "-m",
            "not engines and not browser and not long and not full and not model",
        ]
        rooms = ("formats", "metrics", "inputs", "config", "ledger", "results", "axes")
        for room in rooms:
            keep(
                "tests",
                f"pytest tests/{room} -vv --durations=10",
                _printed([*pytest, f"tests/{room}", "-vv", "--durations=10"], tree, runs),
            )
        tried: Counter[str] = Counter()
        for test, name, text, changed in _faults(tree, repository):
            if time.monotonic() - began > seconds:
                break
            if tried[name] >= _TRIES:
                continue
            tried[name] += 1
            (tree / name).write_text(changed, "utf-8")
            printed = _printed([*pytest, test, "--maxfail=3", "-q"], tree, runs)
            (tree / name).write_text(text, "utf-8")
            if "Error" in printed:
                tried[name] = _TRIES
                keep("failure", f"pytest {test} --maxfail=3", printed)
