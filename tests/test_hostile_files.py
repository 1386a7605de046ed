"""Files that somebody else wrote, damaged on purpose: a result or one line, never a traceback, never much memory.

Each attack takes a good file, changes it at random (seeded) so that its checksums hold, and runs the command that reads
it.  ``FIDELAB_MUTATIONS`` is the number of changes per attack, ``FIDELAB_SEED`` where they begin.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fidelab.captures.container import write_tensors
from fidelab.captures.manifest import MANIFEST, PROBE, dump_manifest
from fidelab.config.experiment import validate
from fidelab.core import Arm, Status, digest
from fidelab.core.errors import FidelabError
from fidelab.core.serial import from_json
from fidelab.models.gguf import read_header
from fidelab.report.html import write_html
from fidelab.results.outcomes import ArmResult, RunFacts
from fidelab.results.record import Report
from fidelab.scoring.score import score_run
from tests.captures import sample
from tests.conftest import MakeFolder
from tests.models.tiny_gguf import write_gguf
from tests.run.harness import Done, cli, compare

MUTATIONS = int(os.environ.get("FIDELAB_MUTATIONS", "10"))
SEED = int(os.environ.get("FIDELAB_SEED", "0"))
MEMORY, SECONDS = 2 << 30, 60  # that one command may take besides what this process has already

HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2, 7, 1e308, -1e308, 0.5, 1 << 31, 1 << 40, 1 << 62, 1 << 63, 10**30, -(10**18)),
    *("", "x", "x" * 10_000, "../../../etc/passwd", "/dev/zero", "\x1b]0;title\x07", "NaN", "2026-99-99", "\ud800"),
    *([], {}, [[]], [{}], [None], {"": None}, {"a": {"b": []}}, [0] * 1000, [1 << 62] * 4, float("nan"), float("inf")),
    json.loads("[" * 200 + "]" * 200),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with every key or index of it."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def changed(value: Any, dice: random.Random) -> Any:
    """A JSON value with one to three of its parts replaced, removed, doubled or renamed."""
    value = copy.deepcopy(value)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        every = list(places(value))
        if not every:
            return dice.choice(HOSTILE)
        # containers near the root are few, long lists many: choose among them alike
        room = dice.choice(list({id(container): container for container, _ in every}.values()))
        key = dice.choice(list(room) if isinstance(room, dict) else range(len(room)))
        match dice.randrange(5), room:
            case 0, dict():
                del room[key]
            case 0, list():
                del room[key]
            case 1, dict():
                room[dice.choice(("", "x", "key", "name", "__class__"))] = room.pop(key)
            case 1, list():
                room.append(copy.deepcopy(room[key]))
            case 2, _ if type(room[key]) is int:
                room[key] += dice.choice((-1, 1, 2, 1 << 20, -(1 << 20)))
            case 2, _ if isinstance(room[key], str) and room[key]:
                at = dice.randrange(len(room[key]))
                room[key] = room[key][:at] + chr(dice.randrange(1, 0x3000)) + room[key][at + 1 :]
            case _:
                room[key] = copy.deepcopy(dice.choice(HOSTILE))
    return value


def scrambled(raw: bytes, dice: random.Random, *, within: int | None = None) -> bytes:
    """Bytes with some flipped, cut, put in or doubled, among the first ``within``."""
    content = bytearray(raw)
    for _ in range(dice.choice((1, 1, 2, 8))):
        at = dice.randrange(min(within or len(content), len(content)) or 1)
        match dice.randrange(5):
            case 0:
                content[at : at + 1] = bytes([dice.randrange(256)])
            case 1:
                content[at : at + 1] = bytes([(content[at] if content else 0) ^ (1 << dice.randrange(8))])
            case 2:
                del content[at : at + dice.choice((1, 4, 8, 64))]
            case 3:
                content[at:at] = bytes(dice.randrange(256) for _ in range(dice.choice((1, 4, 8))))
            case 4:
                content[at : at + 8] = dice.choice((b"\xff" * 8, b"\0" * 8, (1 << 60).to_bytes(8, "little")))
    return bytes(content[: dice.randrange(len(content) + 1)] if dice.random() < 0.05 else content)


@contextlib.contextmanager
def bounds(memory: int = MEMORY) -> Iterator[None]:
    """What goes beyond the memory or the time ends in an exception that no command knows."""

    def stop(_number: int, _frame: Any) -> None:
        raise AssertionError(f"not done after {SECONDS} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, hard))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, handler)


def answered(done: Done) -> None:
    """A result, or one line and exit code 2."""
    assert done.code in (0, 1, 2, 3), done
    if done.code == 2:
        assert done.out == "", done
        assert done.err.splitlines()[-1].startswith("fidelab: "), done.err
        assert "Traceback" not in done.err


def attack(change: Callable[[random.Random], Any], ask: Callable[[], Any], n: int = MUTATIONS) -> None:
    """Make ``n`` changes and see what becomes of each; ``change`` begins from the good file every time."""
    for number in range(SEED, SEED + n):
        dice = random.Random(number)
        what = change(dice)
        try:
            with bounds():
                ask()
        except BaseException as error:
            raise AssertionError(f"change {number} ({str(what)[:300]}): {type(error).__name__}: {error}") from error


def attack_file(
    path: Path, damage: Callable[[bytes, random.Random], bytes], ask: Callable[[], Any], n: int = MUTATIONS
) -> None:
    """The same with the content of one file."""
    raw = path.read_bytes()

    def change(dice: random.Random) -> bytes:
        content = damage(raw, dice)
        path.write_bytes(content)
        return content

    attack(change, ask, n)


@cache
def parsed(raw: bytes) -> Any:
    """The value of a JSON or YAML text."""
    return yaml.safe_load(raw)


def another_value(raw: bytes, dice: random.Random) -> bytes:
    return json.dumps(changed(parsed(raw), dice)).encode()


def another_header(raw: bytes, dice: random.Random) -> bytes:
    """A safetensors file with another header."""
    size = 8 + int.from_bytes(raw[:8], "little")
    text = json.dumps(changed(json.loads(raw[8:size]), dice)).encode()
    return len(text).to_bytes(8, "little") + text + raw[size:]


@dataclass
class Captured:
    """A capture of a stranger, and one of this run that it is scored against."""

    room: Path
    ref: Path
    test: Path

    def __post_init__(self) -> None:
        self.files = {file.name: file.read_bytes() for file in self.test.iterdir()}
        self.manifest: dict[str, Any] = json.loads(self.files[MANIFEST])

    def put(self, name: str, content: bytes, manifest: dict[str, Any] | None = None) -> None:
        """The good capture with one other file, and checksums that hold."""
        manifest = copy.deepcopy(manifest or self.manifest)
        for file, good in self.files.items():
            (self.test / file).write_bytes(good)
        (self.test / name).write_bytes(content)
        for entry in manifest["files"]:
            if entry["name"] == name:
                entry |= {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        (self.test / MANIFEST).write_text(dump_manifest(manifest))

    def score(self) -> Report | None:
        """The report of the pair, written as JSON and as a page; ``None``: refused in one line."""
        manifests = (json.loads((self.ref / MANIFEST).read_text()), self.manifest)
        arms = [from_json(Arm, manifest["asked"]) for manifest in manifests]
        arms = [replace(arm, name=name) for arm, name in zip(arms, ("reference", "test"), strict=True)]
        axis = self.manifest["axis"]
        experiment = {
            **{"model": "fake", "engine": arms[0].engine, "dtype": arms[0].dtype, "control": "none"},
            **{"reference": {"kv": arms[0].kv}, "candidates": [{"kv": arms[1].kv, "name": "test"}]},
            **{"axes": {axis: {}}, "floor": 0.0, "twins": 0.0},
        }
        results = [
            ArmResult(role, arm, Status.OK, ran=manifest["ran"], captures={axis: folder})
            for role, arm, manifest, folder in zip(
                ("reference", "candidate:test"), arms, manifests, (self.ref, self.test), strict=True
            )
        ]
        facts = RunFacts("strangers", "2026-01-01T00:00:00Z", "", {})
        try:
            report = score_run(validate(experiment, "experiment"), facts, results).report
            report.write(self.room / "report.json")
            write_html(report, self.room / "report.html")
        except FidelabError:  # of one line
            return None
        return report


AXES = ("kld", "trajectory", "plad", "gsm8k", "eval")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run with captures of several axes."""
    room = tmp_path_factory.mktemp("files") / "room"
    room.mkdir()
    problem = {"question": "How much is 1 and 1?", "answer": "1 + 1 = 2\n#### 2"}
    (room / "problems.jsonl").write_text(f"{json.dumps(problem)}\n" * 2)
    sets = (
        *("axes.gsm8k.data=problems.jsonl", "axes.gsm8k.shots=1", "axes.gsm8k.n_predict=8", "axes.plad.n_predict=4"),
        *('axes.eval.kinds=["sql","json"]', "axes.eval.n_predict=8"),
    )
    flags = ["--axes", ",".join(AXES), "--no-floor", *(word for text in sets for word in ("--set", text))]
    done = compare(room, "tilt", flags=flags, windows=2, limit=2)
    assert done.code == 0, done.err
    return done


@pytest.fixture(params=AXES)
def captured(run: Done, request: pytest.FixtureRequest, tmp_path: Path) -> Captured:
    room = tmp_path / "room"
    shutil.copytree(run.cwd / "runs" / "captures", room)
    [ref], [test] = (room.glob(f"fake-fake-{kv}-*/{request.param}-*") for kv in ("exact", "tilt"))
    captured = Captured(room, ref, test)
    assert captured.score() is not None
    return captured


PER_AXIS = -(-MUTATIONS // len(AXES))


def rehashed(manifest: dict[str, Any]) -> str:
    """A manifest with a checksum that holds, where one can be made of it."""
    with contextlib.suppress(ValueError, TypeError):
        return dump_manifest(manifest)
    return json.dumps(manifest)


def test_a_strangers_manifest_is_a_result_or_one_line(captured: Captured) -> None:
    def change(dice: random.Random) -> str:
        text = rehashed(changed(captured.manifest, dice))
        (captured.test / MANIFEST).write_text(text)
        return text

    attack(change, captured.score, PER_AXIS)


def test_a_strangers_request_is_a_result_or_one_line(captured: Captured) -> None:
    good = json.loads(gzip.decompress(captured.files[PROBE]))

    def change(dice: random.Random) -> Any:
        record = changed(good, dice)
        text = json.dumps(record, separators=(",", ":"), sort_keys=True).encode()
        manifest = copy.deepcopy(captured.manifest)
        manifest["key"]["probe"] = digest(text)
        for field in ("settings", "axis", "kind"):  # as a stranger would who wants it to be read
            if isinstance(record, dict) and type(record.get(field)) is type(manifest[field]):
                manifest[field] = record[field]
        with contextlib.suppress(ValueError):
            captured.put(PROBE, gzip.compress(text), manifest)
        return record

    attack(change, captured.score, PER_AXIS)


def test_a_strangers_part_is_a_result_or_one_line(captured: Captured) -> None:
    name = "part-00000.safetensors"
    raw = captured.files[name]
    size = 8 + int.from_bytes(raw[:8], "little")

    def change(dice: random.Random) -> Any:
        bits = dice.random() < 0.3
        content = scrambled(raw, dice, within=size) if bits else another_header(raw, dice)
        captured.put(name, content)
        return content[:size]

    attack(change, captured.score, PER_AXIS)


@pytest.mark.parametrize("harm", ["words", "head"])
def test_strangers_heads_and_vocabularies_are_a_result_or_one_line(harm: str, tmp_path: Path) -> None:
    head = {"weight": np.ones((8, 4), np.float32), "bias": np.ones(8, np.float32)}

    def write(kv: str, arrays: dict[str, Any]) -> Path:
        out = sample.writer(tmp_path / kv, sample.named(kv))
        from fidelab.captures.writer import store_head

        for item in range(3):
            out.add(item, {"hidden": np.full((2, 4), item, np.float32)})
        out.head(store_head(tmp_path / kv, arrays, None, 1.0))
        return out.finish("hidden", {"device": "cpu"}, {})

    ref, test = write("bf16", head), write("int4", {**head, "bias": np.zeros(8, np.float32)})
    captured = Captured(tmp_path, ref, test)
    assert captured.score() is not None
    [words] = (tmp_path / "int4" / "vocabularies").iterdir()
    [weights] = (tmp_path / "int4" / "heads").iterdir()
    raw = weights.read_bytes()

    def change(dice: random.Random) -> Any:
        manifest = copy.deepcopy(captured.manifest)
        if harm == "words":
            pieces = changed(sample.PIECES, dice)
            words.write_bytes(scrambled(gzip.compress(json.dumps(pieces).encode()), dice, within=20))
            return pieces
        content = another_header(raw, dice)
        weights.write_bytes(content)
        manifest["head"] |= {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        (captured.test / MANIFEST).write_text(dump_manifest(manifest))
        return content

    attack(change, captured.score)


def test_a_request_that_unpacks_to_more_than_any_request_is_refused(run: Done, tmp_path: Path) -> None:
    shutil.copytree(run.cwd / "runs" / "captures", tmp_path / "c")
    [ref], [test] = ((tmp_path / "c").glob(f"fake-fake-{kv}-*/kld-*") for kv in ("exact", "tilt"))
    captured = Captured(tmp_path, ref, test)
    packer = zlib.compressobj(1, wbits=31)
    packed = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(600)), packer.flush()])
    captured.put(PROBE, packed)
    with bounds(512 << 20):
        report = captured.score()
    assert (len(packed) < 4 << 20, report is None) == (True, False)
    assert "probe.json.gz is damaged (it unpacks to more than 128 MiB)" in str(report and report.candidates[0].reason)


@pytest.fixture
def again(run: Done, tmp_path: Path) -> Path:
    """The run's folder, to be harmed, beside its captures."""
    shutil.copytree(run.cwd / "runs", tmp_path / "runs", symlinks=True)
    [folder] = (tmp_path / "runs").glob("2*")
    return folder


@pytest.mark.parametrize("words", [("report",), ("report", "--markdown")], ids=["report", "markdown"])
def test_a_strangers_report_is_shown_or_one_line(words: tuple[str, ...], again: Path) -> None:
    def ask() -> None:
        answered(cli(words[0], again, *words[1:], cwd=again))

    attack_file(again / "report.json", another_value, ask, -(-MUTATIONS // 4))


def test_a_strangers_baseline_is_compared_or_one_line(again: Path) -> None:
    shutil.copy(again / "report.json", again / "before.json")

    def ask() -> None:
        answered(cli("check", again, "--all", "--max-kld", 1, "--baseline", "before.json", cwd=again))

    attack_file(again / "before.json", another_value, ask)


@pytest.mark.parametrize("name", ["outcomes.json", "config.resolved.yaml"])
def test_a_strangers_run_folder_is_scored_or_one_line(name: str, again: Path) -> None:
    def damage(raw: bytes, dice: random.Random) -> bytes:
        return scrambled(raw, dice) if dice.random() < 0.3 else another_value(raw, dice)

    attack_file(again / name, damage, lambda: answered(cli("report", "--rescore", again, cwd=again)))


def test_a_strangers_experiment_is_planned_or_one_line(run: Done, tmp_path: Path) -> None:
    good: dict[str, Any] = {
        "model": "fake",
        "engine": "fake",
        "reference": "exact",
        "candidates": ["tilt", {"kv": "tilt[q=0.6]", "name": "six"}],
        "axes": {"kld": {"windows": 2, "n_ctx": 16}, "trajectory": {"n_predict": 4, "limit": 1}},
        "text": str(run.cwd / "text.txt"),
        "prompts": str(run.cwd / "prompts.txt"),
        "seed": 1,
    }
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(good))

    def damage(raw: bytes, dice: random.Random) -> bytes:
        return scrambled(raw, dice) if dice.random() < 0.5 else another_value(raw, dice)

    attack_file(path, damage, lambda: answered(cli("compare", "-f", path, "--dry-run", cwd=tmp_path)))


LOADS = ("compilation-config", "load-format", "tool-parser-plugin", "worker-cls", "hf-overrides", "speculative-config")
CODE = ("evil.module", "./evil.py", "owner/name", "http://evil.example", "evil:Class")


def test_a_strangers_options_and_clusters_are_asked_about_whatever_their_values(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"

    def change(dice: random.Random) -> dict[str, Any]:
        value: Any = dice.choice(CODE)
        for _ in range(dice.randrange(4)):  # as deep as options of engines go
            value = {dice.choice(("cls", "config", "a", "backend")): value, "n": 1} if dice.random() < 0.7 else [value]
        experiment: dict[str, Any] = {"model": "fake", "engine": "vllm", "candidates": ["fp8_e4m3"]}
        match dice.randrange(3):
            case 0:
                experiment["engine_args"] = {dice.choice(LOADS): value}
            case 1:
                experiment["candidates"] = [{"kv": "fp8_e4m3", "engine_args": {dice.choice(LOADS): value}}]
            case _:
                experiment["executor"] = {"name": "ray", "address": f"evil.example:{dice.randrange(1, 65536)}"}
        path.write_text(json.dumps(experiment))
        return experiment

    def ask() -> None:
        done = cli("compare", "-f", path, "--dry-run", cwd=tmp_path)
        answered(done)
        assert "asks for actions that need permission" in done.err

    attack(change, ask)


def test_a_strangers_profile_folder_runs_nothing_whatever_it_holds(tmp_path: Path) -> None:
    profile = {
        "kind": "profile",
        "purpose": "a question",
        "source": {"title": "a paper", "setup": "a machine"},
        "parameters": {"size": 1},
        "stages": [{"name": "formats", "command": ["setup", "formats"]}],
        "expected": [],
    }
    (tmp_path / "own.yaml").write_text(json.dumps(profile))
    assert cli("reproduce", "own.yaml", "--trust", "own.yaml", cwd=tmp_path).code == 0
    [folder] = (tmp_path / "runs" / "profiles").iterdir()
    resolved = folder / "config.resolved.yaml"
    written = resolved.read_text()
    head = "".join(line for line in written.splitlines(keepends=True) if line.startswith("#"))
    good = yaml.safe_load(written)

    def change(dice: random.Random) -> Any:
        found = changed(good, dice)
        resolved.write_text(head + json.dumps(found))
        return found

    def ask() -> None:
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        done = cli("reproduce", "--resume", folder, cwd=tmp_path)
        answered(done)
        assert done.code == 2
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before

    attack(change, ask)


def test_a_strangers_model_config_is_read_or_one_line(tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path / "model", text_config={"hidden_size": 8}, time_step_limit=[0.0, 1.0])
    ask = partial(cli, "setup", "fetch", folder, cwd=tmp_path)
    attack_file(folder / "config.json", another_value, lambda: answered(ask()))


def test_a_strangers_weight_header_is_read_or_one_line(tmp_path: Path, make_folder: MakeFolder) -> None:
    folder = make_folder(tmp_path / "model")

    def damage(raw: bytes, dice: random.Random) -> bytes:
        whole, size = another_header(raw, dice), 8 + int.from_bytes(raw[:8], "little")
        return scrambled(raw, dice, within=size) if dice.random() < 0.3 else whole

    ask = partial(cli, "setup", "fetch", folder, cwd=tmp_path)
    attack_file(folder / "model.safetensors", damage, lambda: answered(ask()))


def test_a_strangers_gguf_header_is_walked_or_one_line(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "good.gguf")
    read_header(path)

    def ask() -> None:
        with contextlib.suppress(FidelabError):
            read_header(path)

    within = (64, 1024, 8192)
    attack_file(path, lambda raw, dice: scrambled(raw, dice, within=dice.choice(within)), ask, 4 * MUTATIONS)


def test_strangers_dumps_are_compared_or_one_line(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("ref", "test"):
        (tmp_path / name).mkdir()
        for window in range(3):
            scores = rng.normal(size=(4, 8))
            rows = (scores - np.log(np.exp(scores).sum(1, keepdims=True))).astype(np.float32)
            write_tensors(tmp_path / name / f"{window}.safetensors", {"log_probs": rows})

    def damage(raw: bytes, dice: random.Random) -> bytes:
        whole = another_header(raw, dice)
        return scrambled(raw, dice) if dice.random() < 0.5 else whole

    ask = partial(cli, "import", "kld-dumps", tmp_path / "ref", tmp_path / "test", cwd=tmp_path)
    attack_file(tmp_path / "test" / "1.safetensors", damage, lambda: answered(ask()))
