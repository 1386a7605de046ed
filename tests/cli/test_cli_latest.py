"""``latest`` is the newest run that a command can use, and it is named; runs leave a link to it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fidelab.results.store import RunFolder
from tests.run.harness import Done, cli, compare, refused


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A finished run, then newer ones: of a bench, and one that was stopped."""
    folder = tmp_path_factory.mktemp("latest")
    run = compare(folder, "tilt", windows=4, limit=2, flags=["--no-floor"])
    first = run.folder
    report = json.loads((first / "report.json").read_text())
    bench = {**report, "candidates": [], "reference": {**report["reference"], "axes": {}}}
    for name, content in (("29990101-000000-bench", bench), ("29990102-000000-stopped", None)):
        newer = folder / "runs" / name
        newer.mkdir()
        (newer / "config.resolved.yaml").write_text((first / "config.resolved.yaml").read_text())
        if content is not None:
            (newer / "report.json").write_text(json.dumps(content))
    return Done(run.code, str(first), run.err, folder)


def test_check_takes_the_newest_run_that_compares_and_names_it(done: Done) -> None:
    checked = cli("check", "latest", "--max-kld", 9, cwd=done.cwd)
    assert checked.code in (0, 3), checked
    assert checked.err == f"fidelab: latest is runs/{Path(done.out).name}\n"


def test_a_stopped_run_is_the_latest_for_resuming_and_for_showing_alone(done: Done) -> None:
    assert "latest is runs/29990102-000000-stopped" in cli("runs", "show", "latest", cwd=done.cwd).err
    assert "latest is runs/29990101-000000-bench" in cli("report", "latest", cwd=done.cwd).err


def test_where_no_run_can_be_used_that_is_said(done: Done, tmp_path: Path) -> None:
    stopped = tmp_path / "runs" / "20260101-000000-stopped"
    stopped.mkdir(parents=True)
    (stopped / "config.resolved.yaml").write_text("model: fake\n")
    line = refused(cli("report", "latest", cwd=tmp_path))
    assert line.startswith("fidelab: runs holds 1 run, and no finished run; finish the newest with: fidelab compare")
    line = refused(cli("compare", "--resume", "latest", cwd=Path(done.out)))
    assert "holds no run" in line


def test_a_finished_run_is_linked_and_the_link_means_the_same(done: Done) -> None:
    link = done.cwd / "runs" / "latest"
    assert os.readlink(link) == Path(done.out).name  # noqa: PTH115
    assert (link / "report.json").is_file()
    assert (
        cli("report", "runs/latest/report.json", "--json", cwd=done.cwd).out
        == Path(done.out, "report.json").read_text()
    )
    listed = cli("runs", "list", "--json", cwd=done.cwd).out
    assert '"latest"' not in listed


def test_a_file_of_that_name_is_kept_and_without_links_nothing_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "latest").write_text("mine")
    RunFolder(run).link_latest()
    assert (tmp_path / "latest").read_text() == "mine"
    (tmp_path / "latest").unlink()

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    RunFolder(run).link_latest()
    assert not (tmp_path / "latest").exists()
