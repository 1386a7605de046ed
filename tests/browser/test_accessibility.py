"""axe-core finds no serious fault on the pages: the report's, a bench's, one over several runs, light and dark."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fidelab.report.html import render_html
from fidelab.report.runs import render_runs, rows_of
from tests.browser.conftest import UNFOLD, Open
from tests.browser.test_pages import report_page, study_page
from tests.report.sample import sample_report
from tests.report.sample_benches import bench_report, rich_report, serving

pytestmark = pytest.mark.browser

PAGES: dict[str, Callable[[Path], str]] = {
    "report": report_page(rich_report()),
    "bench": lambda _: render_html(bench_report("bf16", serving=serving())),
    "runs": lambda _: render_runs([*rows_of("a", sample_report()), *rows_of("b", bench_report("bf16", "int8"))]),
    "study": study_page,
}

FAULTS = """() => axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) => violations
  .filter(({ impact }) => impact === 'serious' || impact === 'critical')
  .map(({ id, nodes }) => [id, nodes.length, nodes[0].html.slice(0, 160), nodes[0].failureSummary]))"""


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, which npm downloads; tests are skipped where it cannot."""
    if (npm := shutil.which("npm")) is None:
        pytest.skip("axe-core needs npm, which is not installed")
    folder = tmp_path_factory.mktemp("axe")
    words = [npm, "pack", "axe-core@4", "--silent", f"--pack-destination={folder}"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    archive = next(folder.glob("axe-core-*.tgz"), None)
    if archive is None:
        pytest.skip(f"npm could not download axe-core: {done.stderr.strip()[:200] or done.returncode}")
    with tarfile.open(archive) as packed:
        script = packed.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_serious_fault(name: str, dark: bool, axe: str, tmp_path: Path, open_page: Open) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGES[name](tmp_path), "utf-8")
    visit = open_page(page, dark=dark)
    visit(UNFOLD)
    visit(axe)
    assert visit(FAULTS) == []


def test_axe_finds_a_picture_without_a_text(axe: str, tmp_path: Path, open_page: Open) -> None:
    page = tmp_path / "page.html"
    page.write_text(PAGES["report"](tmp_path), "utf-8")
    visit = open_page(page)
    visit("document.querySelector('main').append(document.createElement('img'))")
    visit(axe)
    assert [fault[0] for fault in visit(FAULTS)] == ["image-alt"]
