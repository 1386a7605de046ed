"""The report's own script: sorting, colours, highlighting, printing; and no text of the data runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fidelab.results.record import Report
from tests.browser.conftest import Open
from tests.browser.test_pages import report_page, wide_report
from tests.report.sample import hostile_report
from tests.report.sample_benches import hostile_benches

pytestmark = pytest.mark.browser


def written(report: Report, folder: Path) -> Path:
    """The file of the report's page."""
    page = folder / "report.html"
    page.write_text(report_page(report)(folder), "utf-8")
    return page


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("report", [hostile_report(), hostile_benches()], ids=["axes", "benches"])
def test_no_text_of_the_data_runs_and_our_script_does(
    tmp_path: Path, report: Report, dark: bool, open_page: Open
) -> None:
    visit = open_page(written(report, tmp_path), dark=dark)
    assert visit("document.documentElement.className") == "js"
    assert visit("document.getElementById('theme').ariaLabel") == f"{'Light' if dark else 'Dark'} colours"
    assert visit("document.scripts.length") == 2
    assert visit("document.images.length") == 0
    assert visit.page.title().endswith("fidelab")
    assert visit.faults == []


DRIVER = """() => {
const result = {};
document.querySelectorAll("details:not(#raw)").forEach((part) => { part.open = true; });
const click = (element) => element.click();
const table = document.querySelector("#figures table");
const heads = [...table.querySelectorAll("thead th")];
const rows = () => [...table.querySelectorAll("tbody tr")];
const arms = () => rows().map((row) => row.cells[0].textContent);
const order = (n) => { click(heads[n].querySelector("button")); return [heads[n].ariaSort, ...arms()]; };
result.start = arms();
result.rising = order(2);
result.falling = order(2);
result.again = order(2);
result.verdicts = order(1);
result.changed = order(4);
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
  // matrices of single figures come first
  const title = document.querySelector(`${section} h3.part`)?.textContent ?? "";
  const table = [...document.querySelectorAll(`${section} .scroll`)]
    .find((part) => part.ariaLabel.includes(title)).querySelector("table");
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
result.raw = JSON.parse(document.getElementById("json").textContent).schema;
return result;
}"""


def test_sorting_colours_highlighting_and_printing_work(tmp_path: Path, open_page: Open) -> None:
    report = wide_report()
    visit = open_page(written(report, tmp_path))
    visit("() => { for (const id of ['run', 'raw']) document.getElementById(id).open = true; }")
    visit.page.locator("#json").filter(has_text="fidelab.report/1").wait_for()
    result = visit(DRIVER)
    assert visit.faults == []
    absent = ["q8_0", "fp8_e5m2", "nvfp4"]
    costly = ["f16/f16", "k16v8", "fp8_e4m3", "int4[group=32,skip-layers=0,29]"]
    arms = [*costly, *absent]  # the best first
    assert result["start"] == arms
    assert result["rising"] == ["ascending", *costly, *absent]
    assert result["falling"] == ["descending", *reversed(costly), *absent]
    assert result["again"] == ["none", *arms]
    assert result["changed"] == ["ascending", *costly, *absent]
    assert result["verdicts"][1:5] == costly
    assert result["names"] == ["ascending", *sorted(arms)]
    assert result["others"] == 1
    assert (result["themes"], result["faded"], result["faint"], result["restored"]) == (True, True, False, True)
    assert result["pressed"] == "true"
    assert result["closed"] == 0
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
