"""Rules that a packed reference hands to the runs that borrow it: what is checked, and whose settings count."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fidelab.config.experiment import validate
from fidelab.core.errors import CaptureError, UsageError
from fidelab.models import resolve
from fidelab.plan.prepare import prepare
from fidelab.references.borrow import borrow, find_for
from fidelab.references.pack import MANIFEST, Pack, read_pack
from tests.run.harness import cli, run_fake


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack of a reference on the stand-in engine."""
    room = tmp_path_factory.mktemp("pack")
    done = run_fake(room, {"kld": {"windows": 4, "n_ctx": 16}}, ["tilt"], keep_rows=True)
    assert done.code == 0, done.err
    shared = cli("share", "reference", done.folder, "--to", "pack", cwd=room)
    assert shared.code == 0, shared.err
    return room / "pack"


@pytest.fixture
def pack(packed: Path, tmp_path: Path) -> Path:
    """A copy of the pack, to be changed."""
    return Path(shutil.copytree(packed, tmp_path / "pack"))


def change(pack: Path, **fields: Any) -> Pack:
    """The pack with other fields in its manifest."""
    path = pack / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return read_pack(pack)


def experiment(pack: Path, out: Path, **changes: Any) -> Any:
    base: dict[str, Any] = {"model": "fake", "engine": "fake", "reference_from": str(pack), "candidates": ["tilt"]}
    return validate({**base, "axes": {"kld": {}}, "control": "none", "output_dir": str(out), **changes}, "test")


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("weights_sha256", "weights"),
        ("engine", "engine"),
        ("dtype", "compute type"),
        ("versions", "versions"),
    ],
)
def test_a_pack_whose_captures_are_not_what_its_manifest_says_is_refused(field: str, said: str, pack: Path) -> None:
    read_pack(pack).check()
    other: Any = {"fake": "9"} if field == "versions" else "other"
    with pytest.raises(CaptureError, match=f"has another {said} than the manifest"):
        change(pack, **{field: other}).check()


def test_a_pack_that_was_edited_is_refused_and_named(pack: Path) -> None:
    part = next(pack.rglob("part-*.safetensors"))
    raw = bytearray(part.read_bytes())
    raw[-1] ^= 1
    part.write_bytes(raw)
    with pytest.raises(CaptureError, match=f"{part.name} was edited"):
        read_pack(pack).check()


def test_who_borrows_a_reference_asks_its_questions_with_its_settings(pack: Path, tmp_path: Path) -> None:
    found, borrowed = borrow(experiment(pack, tmp_path, axes={"kld": {"windows": 9, "n_ctx": 64}}))
    assert borrowed is not None
    assert found.axes["kld"]["windows"] == 4
    assert found.axes["kld"]["n_ctx"] == 16
    assert (found.control, found.floor) == ("none", 0.0)
    with pytest.raises(UsageError, match="no saved outputs of test trajectory"):
        borrow(experiment(pack, tmp_path, axes={"kld": {}, "trajectory": {}}))


def test_a_borrowed_reference_is_asked_nothing_and_candidates_are_asked_its_windows(pack: Path, tmp_path: Path) -> None:
    plan = prepare(experiment(pack, tmp_path)).plan
    [windows] = read_pack(pack).requests("kld").values()
    jobs = {job.role: job for job in plan.jobs}
    assert jobs["reference"].missing() == []
    assert [capture.request for capture in jobs["candidate:tilt"].captures] == [windows]


def test_answers_of_a_pack_are_never_those_of_a_run_of_ones_own(pack: Path) -> None:
    found = read_pack(pack)
    own = found.manifest.versions
    assert {name: found.versions[name] for name in own} == own
    assert found.versions != own
    spoiled = change(pack, machine="another")
    assert spoiled.versions != found.versions


def test_the_pack_of_a_checkpoint_is_found_by_the_checkpoints_hash(pack: Path) -> None:
    model, notes = resolve("fake"), list[str]()
    assert find_for(model, [str(pack)], notes.append) == str(pack)
    assert find_for(model, [str(pack.parent)], notes.append) == str(pack)
    change(pack, weights_sha256="of what an engine loaded")
    assert find_for(model, [str(pack)], notes.append) == str(pack)
    change(pack, checkpoint_sha256="of another checkpoint")
    assert find_for(model, [str(pack)], notes.append) is None
    assert notes == []


def test_the_distance_between_its_machines_goes_with_a_pack_into_reports(pack: Path) -> None:
    machines = {"mean": 0.002, "machines": ["one", "two"]}
    assert read_pack(pack).borrowed().difference is None
    found = change(pack, difference=machines).borrowed()
    assert found.difference is not None
    assert (found.difference.mean, found.difference.machines) == (0.002, ("one", "two"))
    assert found.place == "pack"
