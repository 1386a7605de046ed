"""The frontier as a file: whole SVG with plain colours."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from fidelab.report.standalone import DEPTH_TITLE, depth_svg, frontier_svg
from fidelab.results.plots import Curve
from fidelab.results.record import Report
from tests.present import present
from tests.report.sample import arm, hostile_report, kld_axis, many_arms, sample_report
from tests.report.sample_benches import bench_report, rich_report

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("report", [rich_report(), hostile_report(), many_arms(12)], ids=["rich", "hostile", "many"])
def test_the_file_is_xml_with_plain_colours_and_nothing_that_runs_or_is_fetched(report: Report) -> None:
    svg = present(frontier_svg(report, 900))
    root = ElementTree.fromstring(svg)
    assert (root.tag, root.get("width")) == (f"{SVG}svg", "900")
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert tags <= {"svg", "title", "style", "rect", "text", "g", "line", "path", "circle"}
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on") or "href" in name]
    style = present(root.find(f"{SVG}style"))
    assert style.text is not None
    assert not re.search(r"var\(|--|system-ui|url\(|@", style.text)


def test_every_class_that_is_drawn_in_colour_has_a_rule() -> None:
    style = (frontier_svg(rich_report(), 900) or "").split("</style>")[0]
    for rule in (".s0 { color: #0f68b0; }", ".stroke.reference", ".swatch.plain", ".d1 path", ".excellent, .identical"):
        assert rule in style


def test_no_file_where_no_arm_has_a_kld() -> None:
    assert frontier_svg(bench_report(), 900) is None


def test_the_depths_of_a_run_are_a_drawing_of_their_own() -> None:
    curve = Curve(
        key="depth",
        title=DEPTH_TITLE,
        x_label="tokens",
        y_label="mean KL, nats",
        x=(1024.0, 2048.0, 4096.0),
        y=(0.001, 0.002, 0.004),
        log_x=True,
        log_y=True,
        kl=True,
    )
    axes = {"kld": kld_axis(0.004, 0.001).model_copy(update={"plots": (curve,)})}
    svg = present(depth_svg(sample_report(candidates=(arm("q8_0", axes=axes),), control=None), 900))
    for words in (DEPTH_TITLE, ">1k<", ">2k<", ">4k<"):
        assert words in svg
    assert depth_svg(rich_report(), 900) is None
