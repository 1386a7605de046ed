"""The page of a report with benches: what it shows, that foreign text stays text, and how it behaves in a browser."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest

from fidelab.report.html import render_html
from fidelab.results.record import Report
from tests.report.sample_benches import bench_report, hostile_benches, prefill, rich_report
from tests.report.test_browser import BROWSER, visit
from tests.report.test_html import Page

REPORTS = {
    "rich": rich_report(),
    "two": bench_report("bf16", "k16v8"),
    "one": bench_report(),
    "hostile": hostile_benches(),
    "prefill": bench_report("bf16", prefill=prefill()),
}
in_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH")


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_the_page_is_well_formed(report: Report) -> None:
    page = Page(report)
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {(link["href"] or "").removeprefix("#") for link in page.all("a")} <= set(ids)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttp", page.source)
    heads = [attributes for attributes in page.all("th") if attributes.get("scope") == "col"]
    assert len(heads) == len(re.findall(r"<th [^>]*><button type=\"button\">", page.source))


def test_hostile_text_adds_no_tag_and_no_handler() -> None:
    page = Page(hostile_benches())
    assert page.all("script") == [{"type": "application/json", "id": "fidelab-report"}, {}]
    assert "img" not in {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.text.count("<img src=x onerror=alert(2)>") > 20


def test_benches_without_axes_show_no_verdicts_and_say_what_was_measured() -> None:
    page = Page(REPORTS["two"])
    assert "<h1>Startup, prefill, decode, memory and serving: SmolLM2-135M-Instruct on hf</h1>" in page.source
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    assert not ids & {"verdicts", "figures", "frontier", "kld", "text"}
    assert {f"bench-{name}" for name in ("startup", "prefill", "decode", "memory", "serving")} <= ids
    assert "KLD" not in page.text.split("Repeat this run")[0]


def test_fidelity_speed_and_memory_of_an_arm_stand_in_one_row() -> None:
    section = Page(rich_report()).source.split('<section id="performance"')[1].split("</section>")[0]
    row = next(part for part in section.split("<tr>") if ">fp8_e4m3<" in part)
    for text in ("PASS", "0.0312", "1,661<small>1.31×</small>", "26,852<small>0.58×</small>"):
        assert text in row


def test_flags_are_numbered_footnotes_below_their_table() -> None:
    section = Page(rich_report()).source.split('<section id="bench-serving"')[1].split("</section>")[0]
    assert "<li>1: 64 requests at once were asked, 11.2 were in flight</li>" in section
    assert len(re.findall(r"<td>no</td><td>1</td></tr>", section)) == 4


def test_hollow_points_say_why() -> None:
    section = Page(rich_report()).source.split('<section id="bench-serving"')[1].split("</section>")[0]
    hollow = re.findall(r"<title>([^<]*)</title><circle class=\"hollow\"", section)
    assert len(hollow) == 2 * 4  # drawings, arms
    assert {title.split(": ", 1)[1] for title in hollow} == {"not valid"}


def test_time_taken_over_captures_stands_with_the_run() -> None:
    text = Page(rich_report()).text
    assert "How long the captures took" in text.split("Repeat this run")[1]


@in_browser
@pytest.mark.parametrize("theme", ["dark", "light"])
def test_no_text_of_the_data_runs_and_the_console_is_silent(tmp_path: Path, theme: str) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_html(hostile_benches()), "utf-8")
    dom, console = visit(page, f"--blink-settings=preferredColorScheme={0 if theme == 'dark' else 1}")
    assert console == []
    assert '<html lang="en" class="js">' in dom
    assert len(re.findall(r"<script", dom)) == 2
    title = re.search(r"<title>(.*?)</title>", dom, re.S)
    assert title is not None
    assert unescape(title[1]).endswith("fidelab")


DRIVER = """
const result = {};
const rows = (selector) => [...document.querySelectorAll(`${selector} tbody tr`)];
const column = (selector, n) => rows(selector).map((row) => row.cells[n].firstChild.textContent);
const press = (selector, n) => document.querySelectorAll(`${selector} thead th`)[n].querySelector("button").click();
press("#bench-prefill", 4);
result.ratios = column("#bench-prefill", 4);
press("#performance", 4);
result.prefill = column("#performance", 4);
press("#bench-serving", 3);
const [sweep] = document.querySelector("#bench-serving table").tBodies;
result.served = [...sweep.rows].map((row) => row.cells[3].firstChild.textContent);
const circle = document.querySelector("#bench-serving .chart.wide .stroke circle.hollow");
const solid = document.querySelector("#bench-serving .chart.wide .stroke circle:not(.hollow)");
result.fills = [getComputedStyle(circle).fill, getComputedStyle(solid).fill, getComputedStyle(circle).stroke];
const names = [...document.querySelectorAll("#bench-serving .chart.wide text, #bench-memory .chart.wide text")];
result.outside = names.filter((name) => {
  const [box, sheet] = [name.getBoundingClientRect(), name.ownerSVGElement.getBoundingClientRect()];
  return box.width && (box.left < sheet.left - 1 || box.right > sheet.right + 1);
}).map((name) => name.textContent);
const phone = document.createElement("iframe");
phone.width = 390;
phone.style.border = 0;
phone.onload = () => {
  const page = phone.contentDocument.documentElement;
  result.width = [page.scrollWidth, page.clientWidth];
  document.title = JSON.stringify(result);
};
setTimeout(() => {
  phone.srcdoc = document.documentElement.outerHTML.replaceAll("<script>", "<script type=text/plain>");
  document.body.append(phone);
}, 50);
"""


@in_browser
def test_sorting_hollow_points_labels_and_narrow_screens_work(tmp_path: Path) -> None:
    source = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", render_html(rich_report()))
    page = tmp_path / "report.html"
    page.write_text(source.replace("</body>", f"<script>{DRIVER}</script></body>"), "utf-8")
    dom, console = visit(page)
    assert console == []
    title = re.search(r"<title>(.*?)</title>", dom, re.S)
    assert title is not None
    result = json.loads(unescape(title[1]))
    assert result["prefill"] == ["1,243", "1,268", "1,294", "1,661", "1,826", "–", "–", "–", "–"]
    ratios = [float(value.strip("≈ ×")) for value in result["ratios"] if value != "–"]
    assert ratios == sorted(ratios)
    assert any(value.startswith("≈") for value in result["ratios"])
    served = [float(value.replace(",", "")) for value in result["served"]]
    assert served == sorted(served)
    hollow, solid, edge = result["fills"]
    assert hollow != solid
    assert edge == solid
    assert result["outside"] == []
    assert result["width"][0] == result["width"][1] <= 390
