"""References that others ran: packed, borrowed, refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from fidelab.captures.container import write_tensors
from fidelab.captures.manifest import dump_manifest
from fidelab.core.errors import UsageError
from fidelab.references.pack import json_schema
from fidelab.results.outcomes import reference_of
from fidelab.results.record import MachineDifference, Report
from fidelab.results.store import RunFolder
from fidelab.results.verdict import judged, widened
from fidelab.run.pipeline import rescore
from fidelab.scoring import machines
from tests.run.harness import Done, cli, compare, refused

HIDDEN = ("--engine-arg", "estimator=hidden")
KV = "tilt[q=0.6]"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run with its own reference."""
    flags = [*HIDDEN, "--control", "none", "--axes", "kld,trajectory"]
    done = compare(tmp_path_factory.mktemp("local"), KV, flags=flags, windows=12)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def packed(local: Done) -> Path:
    """The pack of its reference."""
    done = cli("share", "reference", local.folder, "--to", "pack", cwd=local.cwd)
    assert done.code == 0, done.err
    return local.cwd / "pack"


@pytest.fixture
def pack(packed: Path, tmp_path: Path) -> Path:
    """A copy of the pack, to be spoiled."""
    return Path(shutil.copytree(packed, tmp_path / "pack"))


def borrow(cwd: Path, place: object, *flags: object, kv: str = KV) -> Done:
    words = ("--engine", "fake", "--reference", place, "--kv", kv, *HIDDEN)
    return cli("compare", "fake", *words, *flags, cwd=cwd)


def figures(arm: dict[str, Any]) -> dict[str, Any]:
    """A candidate's record without what differs from run to run."""
    return {**arm, "ran": None, "timing": None, "axes": {"kld": arm["axes"]["kld"]}, "composite": None}


def test_a_candidate_has_the_figures_of_the_run_that_the_reference_is_from(
    local: Done, packed: Path, tmp_path: Path
) -> None:
    done = borrow(tmp_path, packed)
    assert done.code == 0, done.err
    here, there = figures(local.arm(KV)), figures(done.arm(KV))
    assert here["certificates"].pop("trajectory", None) is None
    assert there == here
    assert done.report["floor"]["kld"] == local.report["floor"]["kld"]


@pytest.mark.model
@pytest.mark.long
def test_on_a_language_model_the_figures_are_the_local_ones_bit_for_bit(tmp_path: Path) -> None:
    words = ("compare", "smollm2-135m", "--dtype", "float32", "--kv", "q8_0", "--threads", 1)
    sizes = ("--axes", "kld", "--windows", 4, "--n-ctx", 128, "--control", "none")
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    here = cli(*words, "--reference", "f32", *sizes, cwd=tmp_path / "here")
    assert here.code == 0, here.err
    assert cli("share", "reference", here.folder, "--to", "../pack", cwd=here.cwd).code == 0
    there = cli(*words, "--reference", "../pack", cwd=tmp_path / "there")
    assert there.code == 0, there.err
    assert figures(there.arm("q8_0")) == figures(here.arm("q8_0"))
    assert "weights dequantized from Q4_1, Q8_0" in " ".join(there.out.split())


def test_a_run_does_not_take_borrowed_outputs_for_its_own(packed: Path, tmp_path: Path) -> None:
    borrow(tmp_path, packed)
    own = compare(tmp_path, KV, flags=HIDDEN, windows=12)
    assert own.code == 0, own.err
    events = [json.loads(line) for line in (own.folder / "events.jsonl").read_text().splitlines()]
    missing = next(e["missing"] for e in events if e["event"] == "job_started" and e["role"] == "reference")
    assert missing


def test_nothing_of_a_borrowed_reference_runs_here_and_the_first_screen_says_where_it_is_from(
    packed: Path, tmp_path: Path
) -> None:
    done = borrow(tmp_path, packed)
    events = [json.loads(line) for line in (done.folder / "events.jsonl").read_text().splitlines()]
    started = {event["role"]: event["missing"] for event in events if event["event"] == "job_started"}
    assert started.pop("reference") == []
    assert f"candidate:{KV}" in started
    assert not {"control", "floor"} & started.keys()
    out = " ".join(done.out.split())
    assert "reference borrowed from pack (" in out
    assert "difference between machines unknown" in out


def test_without_a_candidate_the_model_itself_is_compared(packed: Path, tmp_path: Path) -> None:
    done = cli("compare", "fake", "--engine", "fake", "--reference", packed, *HIDDEN, cwd=tmp_path)
    assert done.code == 0, done.err
    assert [arm["name"] for arm in done.report["candidates"]] == ["fake"]


def test_a_run_is_scored_again_without_the_pack(pack: Path, tmp_path: Path) -> None:
    done = borrow(tmp_path, pack)
    shutil.rmtree(pack)
    again, _ = rescore(done.folder)
    assert json.loads(again.to_json())["candidates"] == done.report["candidates"]
    assert again.borrowed is not None


def test_a_pack_tells_nothing_of_folders(local: Done, packed: Path) -> None:
    for file in packed.rglob("*.json"):
        assert str(local.cwd) not in file.read_text()
        assert str(Path.home()) not in file.read_text()


def manifest_of(pack: Path) -> dict[str, Any]:
    return dict(json.loads((pack / "manifest.json").read_text()))


def change(pack: Path, **fields: Any) -> None:
    (pack / "manifest.json").write_text(json.dumps({**manifest_of(pack), **fields}))


def sign(pack: Path) -> None:
    """Make the manifest's sizes and hashes those of the files."""
    files = [path for path in pack.rglob("*") if path.is_file() and path != pack / "manifest.json"]
    change(
        pack,
        files=[
            {
                "name": path.relative_to(pack).as_posix(),
                "bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
            for path in files
        ],
    )


def file_named(name: str) -> dict[str, Any]:
    return {"name": name, "bytes": 1, "sha256": "0" * 64}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def other_windows(pack: Path) -> None:
    """Other tokens in the request, with the hashes of files made to fit."""
    flip(pack / "captures" / "kld" / "probe.json.gz")
    sign(pack)


def other_head(pack: Path) -> None:
    """A head of other shape, with all hashes made to fit."""
    change(pack, captures={"kld": "kld"})
    shutil.rmtree(pack / "captures" / "trajectory")
    [old] = (pack / "heads").iterdir()
    sha, size = write_tensors(pack / "heads" / "new", {"weight": np.eye(7, dtype=np.float32)})
    old.unlink()
    (pack / "heads" / "new").rename(pack / "heads" / f"{sha[:24]}.safetensors")
    edit_capture(pack, head={"file": f"{sha[:24]}.safetensors", "sha256": sha, "bytes": size})


def edit_capture(pack: Path, **groups: dict[str, Any]) -> None:
    path = pack / "captures" / "kld" / "manifest.json"
    manifest = json.loads(path.read_text())
    for name, fields in groups.items():
        manifest[name] |= fields
    path.write_text(dump_manifest(manifest))
    sign(pack)


PART = "captures/kld/part-00000.safetensors"
SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no pack": (lambda pack: (pack / "manifest.json").unlink(), "it has no manifest.json"),
    "cut manifest": (lambda p: (p / "manifest.json").write_text((p / "manifest.json").read_text()[:99]), "is damaged"),
    "huge manifest": (lambda p: (p / "manifest.json").write_bytes(b" " * (17 << 20)), "is damaged"),
    "other version": (lambda pack: change(pack, schema="fidelab.reference/9"), "its schema is 'fidelab.reference/9'"),
    "unknown field": (lambda pack: change(pack, run="rm"), "is damaged or truncated (run)"),
    "truncated": (lambda pack: (pack / PART).write_bytes((pack / PART).read_bytes()[:99]), "missing or truncated"),
    "edited": (lambda pack: flip(pack / PART), "was edited"),
    "missing head": (lambda pack: shutil.rmtree(pack / "heads"), "missing or truncated"),
    "path upwards": (lambda p: change(p, files=[file_named("captures/../../x/manifest.json")]), "files.0.name"),
    "absolute path": (lambda p: change(p, files=[file_named("/etc/passwd")]), "files.0.name"),
    "pickle": (lambda p: change(p, files=[file_named("captures/kld/part-00000.bin")]), "files.0.name"),
    "capture upwards": (lambda p: change(p, captures={"kld": "../../kld"}), "captures without files"),
    "huge files": (
        lambda p: change(p, files=[*manifest_of(p)["files"], {**file_named(PART), "bytes": 1 << 41}]),
        "TiB",
    ),
    "other windows": (other_windows, "probe.json.gz"),
    "other request": (lambda pack: edit_capture(pack, key={"probe": "0" * 64}), "probe.json.gz"),
    "other head": (other_head, "the output head does not fit"),
    "other arm": (lambda pack: edit_capture(pack, asked={"dtype": "float16"}), "another configuration"),
    "other vocabulary": (lambda pack: edit_capture(pack, vocabulary={"sha256": "0" * 64}), "another vocabulary"),
    "other weights": (lambda pack: change(pack, weights_sha256="0" * 64), "another weights"),
    "other tokenizer": (
        lambda p: change(p, tokenizer={**manifest_of(p)["tokenizer"], "sample_sha256": "0" * 64}),
        "splits text differently",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_damaged_or_foreign_pack_is_refused_in_one_line(name: str, pack: Path, tmp_path: Path) -> None:
    spoil, says = SPOILED[name]
    spoil(pack)
    assert says in refused(borrow(tmp_path, pack))
    assert not list(tmp_path.glob("runs/2*"))


def test_a_model_with_another_vocabulary_is_refused(packed: Path, tmp_path: Path) -> None:
    assert "the model has another vocabulary: token " in refused(
        cli("compare", "smollm2-135m", "--engine", "hf", "--reference", packed, "--kv", "q8_0", cwd=tmp_path)
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--windows", 3], "leave out --windows"),
        (["--text", "other.txt"], "leave out --text"),
        (["--axes", "kld,rniah"], "has no saved outputs of test rniah; it has kld, trajectory"),
        (["--benches", "decode"], "benches: a borrowed reference answers no new questions"),
        (["--runs", 2], "runs: a borrowed reference answers no new questions"),
    ],
)
def test_what_takes_the_reference_itself_is_refused(
    flags: list[object], says: str, packed: Path, tmp_path: Path
) -> None:
    assert says in refused(borrow(tmp_path, packed, *flags))


def test_a_reference_whose_rows_are_gone_cannot_be_packed(tmp_path: Path) -> None:
    done = compare(tmp_path, KV, windows=12)  # log-probabilities, dropped once compared
    assert "capture again with --keep-rows" in refused(
        cli("share", "reference", done.folder, "--to", "pack", cwd=tmp_path)
    )
    assert [path.name for path in tmp_path.iterdir() if "pack" in path.name] == []


def test_windows_of_a_private_log_are_not_packed(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("".join(f"line {i} of a log\n" for i in range(200)))
    words = ("--engine", "fake", "--reference", "exact", "--kv", KV, *HIDDEN, "--axes", "kld", "--traffic", "log.txt")
    done = cli("compare", "fake", *words, "--windows", 4, "--n-ctx", 16, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "are of a log of requests" in refused(cli("share", "reference", done.folder, "--to", "pack", cwd=tmp_path))


def test_a_folder_that_exists_is_not_written_to_and_what_an_interrupted_packing_left_is_replaced(
    local: Done, pack: Path
) -> None:
    before = manifest_of(pack)
    assert cli("share", "reference", local.folder, "--to", pack, cwd=local.cwd).code == 2
    assert manifest_of(pack) == before
    room = pack.parent / "room"
    left = room / ".pack.part-0123456789abcdef"  # as core.scratch names it; nobody holds the lock
    (left / "files" / "captures").mkdir(parents=True)
    (left / "lock").touch()
    assert cli("share", "reference", local.folder, "--to", room / "pack", cwd=local.cwd).code == 0
    assert [path.name for path in room.iterdir()] == ["pack"]


def test_a_borrowed_reference_is_not_packed_again(packed: Path, tmp_path: Path) -> None:
    done = borrow(tmp_path, packed)
    assert "borrowed from pack; share that" in refused(
        cli("share", "reference", done.folder, "--to", "again", cwd=tmp_path)
    )


def test_auto_finds_the_pack_of_the_model_in_a_folder_of_packs(pack: Path, tmp_path: Path) -> None:
    shutil.copytree(pack, pack.parent / "packs" / "a")
    change(pack.parent / "packs" / "a", checkpoint_sha256="0" * 64)
    shutil.copytree(pack, pack.parent / "packs" / "b")
    done = borrow(tmp_path, "auto", "--references", pack.parent / "packs")
    assert done.code == 0, done.err
    assert done.report["borrowed"]["place"] == "b"


def test_auto_runs_the_reference_where_no_place_has_one_and_names_places_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    places = [word for place in ("nothing", "broken") for word in ("--references", tmp_path / place)]
    done = borrow(tmp_path, "auto", *places, "--axes", "kld", "--windows", 12, "--n-ctx", 16)
    assert done.code == 2 or done.report["borrowed"] is None
    assert "leave out --windows" not in done.err
    assert "none of 2 places has one" in done.err
    assert "broken: manifest.json is damaged" in done.err


def elsewhere(run: Path, to: Path) -> Path:
    """A copy of a run, made on another machine by what it says."""
    shutil.copytree(run.parent, to)
    outcomes = to / run.name / "outcomes.json"
    record = json.loads(outcomes.read_text())
    record["facts"]["environment"]["processor"] = "another one"
    outcomes.write_text(json.dumps(record))
    return to / run.name


def test_a_pack_says_how_far_a_run_on_another_machine_is(local: Done, tmp_path: Path) -> None:
    other = elsewhere(local.folder, tmp_path / "other")
    done = cli("share", "reference", local.folder, "--to", tmp_path / "pack", "--other", other, cwd=local.cwd)
    assert done.code == 0, done.err
    found = manifest_of(tmp_path / "pack")["difference"]
    assert (found["mean"], found["machines"][1]) == (0.0, "another one")
    out = " ".join(borrow(tmp_path, tmp_path / "pack").out.split())
    assert "verdicts allow for 0 between machines" in out
    words = ("share", "reference", local.folder, "--to", tmp_path / "same", "--other", local.folder)
    assert "was made on the same machine" in refused(cli(*words, cwd=local.cwd))


def test_an_interval_is_widened_by_the_triangle_inequality_of_roots() -> None:
    assert widened((0.04, 0.09), 0.01) == pytest.approx((0.01, 0.16))
    assert widened((0.04, 0.09), 0.0) == pytest.approx((0.04, 0.09))
    assert widened((0.0001, 0.04), 0.01)[0] == 0.0


def test_a_verdict_allows_for_the_difference_between_machines(packed: Path, tmp_path: Path) -> None:
    report = Report.from_json(RunFolder(borrow(tmp_path, packed).folder).report)
    [arm] = report.candidates
    assert report.borrowed is not None
    bands = []
    for mean in (None, 0.0, 100.0):
        difference = None if mean is None else MachineDifference(mean=mean, machines=("a", "b"))
        found = report.borrowed.model_copy(update={"difference": difference})
        [again] = judged(report.model_copy(update={"borrowed": found})).candidates
        assert again.verdict is not None
        bands.append(again.verdict.band)
    assert arm.verdict is not None
    assert bands == [arm.verdict.band, arm.verdict.band, None]  # only the widened end lies in FAIL


def test_the_manifest_holds_to_its_schema_which_is_the_one_in_its_folder(packed: Path) -> None:
    schema = Path(__file__).parents[2] / "schema" / "fidelab.reference-0.schema.json"
    assert json.loads(schema.read_text()) == json_schema()
    jsonschema.Draft202012Validator(json_schema()).validate(manifest_of(packed))


@pytest.mark.parametrize("what", ["weights", "kv", "dtype", "engine"])
def test_machines_are_compared_by_the_same_reference_alone(
    what: str, local: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = elsewhere(local.folder, tmp_path / "other")

    def changed(run: RunFolder) -> Any:
        result, facts = reference_of(run)
        if run.path == other:
            arm: Any = result.arm
            result = replace(result, arm=replace(arm, **{what: "another"}))
        return result, facts

    monkeypatch.setattr(machines, "reference_of", changed)
    with pytest.raises(UsageError, match=f"its reference has another {what}"):
        machines.machine_difference(RunFolder(local.folder), RunFolder(other))
