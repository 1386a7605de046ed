"""Charts as files: whole SVG with plain colours, PNG with its text, all files or none."""

from __future__ import annotations

import builtins
import re
import struct
import sys
import zlib
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from fidelab.cli import app
from fidelab.core import Status
from fidelab.core.errors import OutputError, UsageError
from fidelab.report.standalone import draw_charts, write_charts
from fidelab.results.measurement import Measurement
from fidelab.results.plots import Curve
from fidelab.results.record import Report
from fidelab.results.store import RunFolder
from tests.report.hostile import TEXTS
from tests.report.sample import HOSTILE, arm, hostile_report, many_arms, sample_report
from tests.report.sample_benches import bench_report, hostile_benches, rich_report

SVG = "{http://www.w3.org/2000/svg}"


def run_of(report: Report, folder: Path) -> Path:
    """A run's folder with this report."""
    run = RunFolder.create(folder, "x", "{}")
    report.write(run.report)
    return run.path


def shape(png: bytes) -> tuple[int, int]:
    """Width and height."""
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    return int(width), int(height)


@pytest.mark.parametrize(
    "report",
    [rich_report(), hostile_benches(), hostile_report(), many_arms(12)],
    ids=["rich", "hostile", "axes", "many"],
)
def test_every_file_is_xml_with_plain_colours_and_nothing_that_runs_or_is_fetched(report: Report) -> None:
    drawn = draw_charts(report, 900)
    assert drawn
    for svg in drawn.values():
        root = ElementTree.fromstring(svg)
        assert (root.tag, root.get("width")) == (f"{SVG}svg", "900")
        tags = {element.tag.removeprefix(SVG) for element in root.iter()}
        assert tags <= {"svg", "title", "style", "rect", "text", "g", "line", "path", "circle"}
        assert not [
            name for element in root.iter() for name in element.attrib if name.startswith("on") or "href" in name
        ]
        style = root.find(f"{SVG}style")
        assert style is not None
        assert style.text is not None
        assert not re.search(r"var\(|--|system-ui|url\(|@", style.text)


def test_every_class_that_is_drawn_in_colour_has_a_rule() -> None:
    style = draw_charts(rich_report(), 900)["throughput"].split("</style>")[0]
    for rule in (".s0 { color: #0f68b0; }", ".stroke.reference", ".swatch.plain", ".d1 path", ".excellent, .identical"):
        assert rule in style


def test_charts_are_named_by_what_they_show() -> None:
    found = list(draw_charts(rich_report(), 900))
    benches = ["startup", "prefill", "decode", "cache", "throughput"]
    assert found == ["frontier", *benches, "position", "confidence", "survival", "by_length"]


@pytest.mark.parametrize("text", [*TEXTS, HOSTILE, "../../x", "..", "/etc/passwd"])
def test_no_key_leaves_the_folder(text: str, tmp_path: Path) -> None:
    plots = tuple(
        Curve(key=f"{text}{n}", title=text, x_label="x", y_label="y", x=(1, 2), y=(1, 2)) for n in ("", "", "2")
    )
    drawn = draw_charts(bench_report("a", mine=Measurement(status=Status.OK, plots=plots)), 900)
    paths = write_charts(drawn, tmp_path / "out", "svg", 900)
    assert {path.parent for path in paths} == {tmp_path / "out"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(path.name for path in paths)
    assert len(paths) == len(drawn) == 2


def test_a_legend_stands_below_the_drawing_where_lines_are_not_named() -> None:
    root = ElementTree.fromstring(draw_charts(rich_report(), 900)["throughput"])
    texts = {(found.text or "").strip(): float(found.get("y", "0")) for found in root.findall(f"{SVG}text")}
    _, _, wide, tall = map(float, (root.get("viewBox") or "").split())
    assert {"f32", "k16v8", "128 in", "32768 in"} <= texts.keys()
    assert all(y < tall for y in texts.values())
    height = float(root.get("height") or 0)
    assert height == pytest.approx(900 * tall / wide, abs=1)


def test_png_files_have_the_width_that_was_asked_and_hold_text(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    if not any(Path("/usr/share/fonts").rglob("DejaVuSans.ttf")):
        pytest.skip("no font DejaVu Sans in /usr/share/fonts")
    svg = draw_charts(bench_report(), 640)["decode"]
    bare = re.sub(r"<text.*?</text>", "", svg)
    with_text, without = (path.read_bytes() for path in write_charts({"a": svg, "b": bare}, tmp_path, "png", 640))
    assert shape(with_text) == shape(without)
    assert shape(with_text)[0] == 640
    assert ink(with_text) > 1.2 * ink(without)


def test_png_without_any_known_font_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resvg_py = pytest.importorskip("resvg_py")
    monkeypatch.setattr(resvg_py, "svg_to_bytes", partial(resvg_py.svg_to_bytes, skip_system_fonts=True))
    with pytest.raises(UsageError, match="PNG files need a font, one of Arial"):
        write_charts(draw_charts(bench_report(), 640), tmp_path / "out", "png", 640)
    assert not (tmp_path / "out").exists()


def ink(png: bytes) -> int:
    """Bytes of the compressed picture: text takes room."""
    at, found = 8, b""
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        found += png[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += 12 + size
    return len(zlib.compress(zlib.decompress(found)))


def test_without_the_package_png_says_what_to_install_and_svg_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "resvg_py":
            raise ImportError("No module named 'resvg_py'")
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "resvg_py", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    drawn = draw_charts(bench_report(), 900)
    with pytest.raises(UsageError, match=r"pip install 'fidelab\[charts\]'"):
        write_charts(drawn, tmp_path / "out", "png", 900)
    assert list(tmp_path.iterdir()) == []
    assert len(write_charts(drawn, tmp_path / "out", "svg", 900)) == len(drawn)


def test_a_failure_leaves_no_file_and_keeps_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out"
    write_charts({"a": "old"}, folder, "svg", 900)
    written = Path.write_bytes

    def fail(self: Path, data: bytes) -> int:
        if self.name == "b.svg":
            raise OSError(28, "No space left on device")
        return written(self, data)

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OutputError, match="No space left on device"):
        write_charts({"a": "new", "b": "new"}, folder, "svg", 900)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.svg"]
    assert (folder / "a.svg").read_text() == "old"


def test_the_command_writes_the_files_and_names_them(tmp_path: Path) -> None:
    run = run_of(bench_report(), tmp_path / "runs")
    done = CliRunner().invoke(
        app, ["report", str(run), "--format", "svg", "-o", str(tmp_path / "out"), "--width", "700"]
    )
    assert done.exit_code == 0
    listed = [line for line in done.stdout.splitlines() if line.endswith(".svg")]
    assert sorted(listed) == sorted(str(path) for path in (tmp_path / "out").iterdir())
    assert 'width="700"' in (tmp_path / "out" / "decode.svg").read_text()


def test_a_run_with_nothing_to_draw_says_so(tmp_path: Path) -> None:
    run = run_of(sample_report(reference=arm("f32"), candidates=(), control=None, floor={}), tmp_path)
    done = CliRunner().invoke(app, ["report", str(run), "--format", "svg", "-o", str(tmp_path / "out")])
    assert "nothing to draw" in str(done.exception)
    assert not (tmp_path / "out").exists()
