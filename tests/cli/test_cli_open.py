"""``fidelab report --open``: the page opens in a browser that is not waited for, or its path is printed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fidelab.cli import browser
from fidelab.results.store import HTML, REPORT
from tests.report.sample import sample_report
from tests.run.harness import Done, cli


def run_folder(place: Path) -> Path:
    """A finished run."""
    place.mkdir(parents=True)
    (place / "config.resolved.yaml").write_text("model: smollm2-135m\ncandidates: [q8_0]\n")
    sample_report().write(place / REPORT)
    return place


def program(folder: Path, text: str) -> Path:
    """A browser that writes down what it is given, then does ``text``."""
    file = folder / "browser"
    file.write_text(f'#!/bin/sh\necho "$1" > "{folder}/opened"\n{text}\n')
    file.chmod(0o755)
    return file


def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, *words: str | Path) -> tuple[Done, str]:
    """What a command prints, and the address that the browser got."""
    monkeypatch.setenv("BROWSER", str(program(tmp_path, text)))
    done = cli("report", *words, "--open", cwd=tmp_path)
    got = tmp_path / "opened"
    return done, got.read_text().strip() if got.is_file() else ""


def test_the_page_of_a_run_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "runs" / "20260101-000000-a")
    done, address = opened(monkeypatch, tmp_path, "exit 0", folder)
    assert done.code == 0
    assert address == str(folder / HTML)
    assert "browser" not in done.err


def test_a_browser_that_runs_on_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser, "_WAIT", 0.2)
    monkeypatch.setenv("BROWSER", str(program(tmp_path, f"sleep 20\ntouch '{tmp_path}/ended'")))
    assert browser.open_page(tmp_path / "page.html")
    assert not (tmp_path / "ended").exists()


def test_without_a_browser_the_path_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "run")
    done, _ = opened(monkeypatch, tmp_path, "exit 3", folder)
    assert done.code == 0
    assert str(folder / HTML) in done.err


@pytest.mark.parametrize("environment", [{}, {"BROWSER": "no-such-program"}, {"BROWSER": "lynx %s"}])
def test_a_machine_without_a_display_has_no_browser(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "xdg-open" else None)
    assert browser.opener(environment, "linux") is None
    assert browser.opener({**environment, "DISPLAY": ":0"}, "linux") == "/usr/bin/xdg-open"


def test_a_report_outside_a_run_and_an_answer_with_other_limits_get_pages_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path / "run")
    shutil.copy(folder / REPORT, tmp_path / "other.json")
    for words in (("other.json",), (folder, "--max-kld", "0.5")):
        done, address = opened(monkeypatch, tmp_path, "exit 0", *words)
        assert done.code in (0, 1)
        assert Path(address).read_text().startswith("<!doctype html>")
        assert not (folder / HTML).exists()
        shutil.rmtree(Path(address).parent)


def test_a_moved_run_has_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "before")
    moved = folder.rename(tmp_path / "after")
    _, address = opened(monkeypatch, tmp_path, "exit 0", moved)
    assert address == str(moved / HTML)


def test_a_page_that_cannot_be_written_is_opened_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / HTML).mkdir()  # a folder in its place cannot be replaced, whoever the user is
    done, address = opened(monkeypatch, tmp_path, "exit 0", folder)
    assert "the page is unchanged" in done.err
    assert Path(address).read_text().startswith("<!doctype html>")
    shutil.rmtree(Path(address).parent)


@pytest.mark.parametrize("words", [("--format", "badge"), ("--csv",)])
def test_with_another_format_it_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    done = cli("report", run_folder(tmp_path / "run"), "--open", *words, cwd=tmp_path)
    assert done.code == 2
    assert "--open" in done.err
