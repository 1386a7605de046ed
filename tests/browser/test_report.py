"""In a browser: no text of the data runs, nothing is complained about, and the page's own script works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from fidelab.report.html import render_html
from fidelab.results.record import Report
from tests.report.sample import arm, hostile_report, kld_axis, positions_for, write_positions
from tests.report.sample_axes import odd_axis
from tests.report.sample_benches import hostile_benches, rich_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH")


def visit(page: Path, *flags: str) -> tuple[str, list[str]]:
    """The page as it stands after its scripts, and what the console said."""
    assert BROWSER is not None
    command = [
        BROWSER,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--enable-logging=stderr", "--virtual-time-budget=3000", f"--user-data-dir={page.parent / 'profile'}"),
        *flags,
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, encoding="utf-8")
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("report", [hostile_report(), hostile_benches()], ids=["axes", "benches"])
def test_no_text_of_the_data_runs_and_the_console_is_silent(tmp_path: Path, report: Report, theme: str) -> None:
    page = tmp_path / "report.html"
    tables = positions_for(report)
    page.write_text(render_html(report, write_positions(tmp_path, tables) if tables else None), "utf-8")
    dom, console = visit(page, f"--blink-settings=preferredColorScheme={0 if theme == 'dark' else 1}")
    assert console == []
    assert '<html lang="en" class="js">' in dom  # our own script ran
    assert re.findall(r'id="theme"[^>]*>(\w+) colours<', dom) == ["Light" if theme == "dark" else "Dark"]
    assert len(re.findall(r"<script", dom)) == 2
    assert "<img" not in dom
    title = re.search(r"<title>(.*?)</title>", dom, re.S)
    assert title is not None
    assert unescape(title[1]).endswith("fidelab")


DRIVER = """
const result = {};
const click = (element) => element.click();
const table = document.querySelector("#figures table");
const heads = [...table.querySelectorAll("thead th")];
const rows = () => [...table.querySelectorAll("tbody tr")];
const arms = () => rows().map((row) => row.cells[0].firstChild.textContent);
const order = (n) => { click(heads[n].querySelector("button")); return [heads[n].ariaSort, ...arms()]; };
result.start = arms();
result.rising = order(2);
result.falling = order(2);
result.again = order(2);
result.verdicts = order(1);
result.changed = order(5);
result.names = order(0);
result.others = heads.filter((head) => head.ariaSort !== "none").length;
const paper = () => getComputedStyle(document.body).backgroundColor;
const before = paper();
click(document.getElementById("theme"));
result.themes = before !== paper();
const key = document.querySelector(".legend:not(.spare) button[data-arm=candidate1]");
key.focus();
result.faint = [...document.querySelectorAll("svg .faint")].some((mark) => mark.dataset.arm === "candidate1");
result.faded = document.querySelectorAll("svg .faint").length > 0;
key.blur();
result.restored = document.querySelectorAll("svg .faint").length === 0;
click(key);
result.pressed = key.ariaPressed;
const column = (table, n) => [...table.tBodies[0].rows].map((row) => row.cells[n].firstChild.textContent);
const sorted = (section, n) => {
  const table = document.querySelector(`${section} table`);
  click(table.querySelectorAll("thead th")[n].querySelector("button"));
  return column(table, n);
};
result.prefill = sorted("#performance", 4);
result.ratios = sorted("#bench-prefill", 4);
result.served = sorted("#bench-serving", 3);
const circle = document.querySelector("#bench-serving .chart.wide .stroke circle.hollow");
const solid = document.querySelector("#bench-serving .chart.wide .stroke circle:not(.hollow)");
result.fills = [getComputedStyle(circle).fill, getComputedStyle(solid).fill, getComputedStyle(circle).stroke];
const names = [...document.querySelectorAll("[id^=bench] .chart.wide text")];
result.outside = names.filter((name) => {
  const [box, sheet] = [name.getBoundingClientRect(), name.ownerSVGElement.getBoundingClientRect()];
  return box.width && (box.left < sheet.left - 1 || box.right > sheet.right + 1);
}).map((name) => name.textContent);
dispatchEvent(new Event("beforeprint"));
result.closed = document.querySelectorAll("details:not([open]):not(#raw)").length;
document.getElementById("raw").open = true;
const phone = document.createElement("iframe");
phone.width = 390;
phone.style.border = 0;
phone.onload = () => {
  const page = phone.contentDocument.documentElement;
  result.width = [page.scrollWidth, page.clientWidth];
  result.raw = JSON.parse(document.getElementById("json").textContent).schema;
  document.title = JSON.stringify(result);
};
setTimeout(() => {
  phone.srcdoc = document.documentElement.outerHTML.replaceAll("<script>", "<script type=text/plain>");
  document.body.append(phone);
}, 50);
"""


def test_sorting_colours_highlighting_printing_and_narrow_screens_work(tmp_path: Path) -> None:
    long = "word" * 100
    control = arm("bf16", axes={long: odd_axis(long), "kld": kld_axis(0.00003, 0.000004)})
    odd = {"run_id": long, "command": long, "environment": {long: long}, "control": control}
    report = rich_report().model_copy(update=odd)
    source = render_html(report, write_positions(tmp_path, positions_for(report)))
    driven = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", source)
    page = tmp_path / "report.html"
    page.write_text(driven.replace("</body>", f"<script>{DRIVER}</script></body>"), "utf-8")
    dom, console = visit(page)
    assert console == []
    title = re.search(r"<title>(.*?)</title>", dom, re.S)
    assert title is not None
    result = json.loads(unescape(title[1]))
    arms = [found.name for found in (report.reference, report.control, *report.candidates) if found]
    absent = ["f32", "q8_0", "fp8_e5m2", "nvfp4"]
    costly = ["f16/f16", "bf16", "k16v8", "fp8_e4m3", "int4[group=32,skip-layers=0,29]"]
    assert result["start"] == arms
    assert result["rising"] == ["ascending", *costly, *absent]
    assert result["falling"] == ["descending", *reversed(costly), *absent]
    assert result["again"] == ["none", *arms]
    assert result["changed"] == ["ascending", *costly, *absent]
    assert result["verdicts"][1:5] == ["f32", "bf16", "k16v8", "f16/f16"]
    assert result["names"] == ["ascending", *sorted(arms)]
    assert result["others"] == 1
    assert (result["themes"], result["faded"], result["faint"], result["restored"]) == (True, True, False, True)
    assert result["pressed"] == "true"
    assert result["closed"] == 0
    assert result["width"][0] == result["width"][1] <= 390
    assert result["raw"] == "fidelab.report/1"
    assert result["prefill"] == ["1,268", "1,294", "1,661", "1,826", "–", "–", "–", "–", "–"]
    ratios = [float(value.strip("≈ ×")) for value in result["ratios"] if value != "–"]
    assert ratios == sorted(ratios)
    assert any(value.startswith("≈") for value in result["ratios"])
    served = [float(value.replace(",", "")) for value in result["served"]]
    assert served == sorted(served)
    hollow, solid, edge = result["fills"]
    assert hollow != solid
    assert edge == solid
    assert result["outside"] == []
