"""Every page that fidelab writes, in a browser: silent, reachable by keyboard, light and dark, on paper, on phones."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

import fidelab
from fidelab.core import Status
from fidelab.physics.explainer import explainer
from fidelab.report.explainer import render_explainer
from fidelab.report.html import render_html
from fidelab.report.runs import render_runs, rows_of
from fidelab.report.study import study_html
from fidelab.results.measurement import Flag
from fidelab.results.plots import Curve
from fidelab.results.record import NO_REFERENCE, Report
from fidelab.results.study import SCHEMA, Study, StudyRow
from fidelab.studies.roundings import KLD, TOP1, heatmap
from tests.browser.conftest import UNFOLD, Open, Visit
from tests.report.sample import (
    HOSTILE,
    arm,
    broken,
    hostile_report,
    kld_axis,
    many_arms,
    positions_for,
    sample_report,
    write_positions,
)
from tests.report.sample_axes import odd_axis
from tests.report.sample_benches import bench_report, hostile_benches, rich_report

pytestmark = pytest.mark.browser

LONG = "word" * 100
FORMATS = ("bf16", "k16v8", "int4")


def report_page(report: Report) -> Callable[[Path], str]:
    """The page of a report, with positions beside it."""

    def render(folder: Path) -> str:
        tables = positions_for(report)
        return render_html(report, write_positions(folder, tables) if tables else None)

    return render


def wide_report() -> Report:
    """Every kind of axis and bench, and words that do not break."""
    control = arm("bf16", axes={LONG: odd_axis(LONG), "kld": kld_axis(0.00003, 0.000004)})
    changes = {"run_id": LONG, "command": LONG, "environment": {LONG: LONG}, "control": control}
    return rich_report().model_copy(update=changes)


def crashed_report() -> Report:
    """The reference crashed, so that nothing was compared."""
    report = sample_report()
    reason = "the worker was ended by SIGABRT (last log line: out of memory)"
    reference = broken("f32", Status.FAILED, reason)
    candidates = tuple(broken(one.name, Status.FAILED, f"{NO_REFERENCE}: {reason}") for one in report.candidates)
    return report.model_copy(update={"reference": reference, "candidates": candidates, "control": None})


def study_page(_: Path) -> str:
    """All kinds of weights of 30 layers in two formats, curves, a row that is marked, and names that do not break."""
    kinds = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    places = [(name, str(n), kind) for name in ("int4[group=64]", HOSTILE) for n in range(30) for kind in kinds]
    rows = [
        StudyRow(
            status=Status.OK,
            at={"group": f"model.layers.{layer}.{kind}", "format": name},
            metrics=(KLD(0.001 * (int(layer) + 1), (0.0005, 0.002)), TOP1(0.98)),
            flags=(Flag(kind="stands out", text=HOSTILE),) if layer == "12" else (),
        )
        for name, layer, kind in places
    ]
    x, y = tuple(map(float, range(30))), tuple(0.001 * (n + 1) for n in range(30))
    study = Study(
        schema=SCHEMA,
        run_id=LONG,
        created=datetime(2026, 5, 4, tzinfo=UTC),
        fidelab_version=fidelab.__version__,
        command=f"fidelab {LONG}",
        kind="sensitivity",
        title=LONG,
        windows=8,
        n_rows=2040,
        documents=8,
        columns=("group", "format", "kld", "top1"),
        rows=tuple(rows),
        sentences=(LONG, HOSTILE),
        heatmap=heatmap("mean KL", "kind", "layer", dict.fromkeys(places, 0.5)),
        curves=tuple(
            Curve(key="x", title="x", x_label="layer", y_label="error", x=x, y=y, log_y=True, series=name)
            for name in ("error", "floor")
        ),
    )
    return study_html(study)


PAGES: dict[str, Callable[[Path], str]] = {
    "report": report_page(sample_report()),
    "one": report_page(sample_report(candidates=sample_report().candidates[:1])),
    "fifty": report_page(many_arms(50)),
    "crashed": report_page(crashed_report()),
    "hostile": report_page(hostile_report()),
    "hostile benches": report_page(hostile_benches()),
    "wide": report_page(wide_report()),
    "runs": lambda _: render_runs([*rows_of("a", sample_report()), *rows_of("b", bench_report("bf16", "int8"))]),
    "study": study_page,
    "explain": lambda _: render_explainer(explainer(FORMATS), fidelab.__version__),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of a page, which is made when it is first asked for."""
    folder = tmp_path_factory.mktemp("pages")

    def find(name: str) -> Path:
        file = folder / name / "page.html"
        if not file.exists():
            file.parent.mkdir()
            file.write_text(PAGES[name](file.parent), "utf-8")
        return file

    return find


# WCAG 2's contrast of an element's own text against what lies behind it
CONTRAST = """() => {
  const parse = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, alpha = 1] = parse(getComputedStyle(at).backgroundColor);
      if (alpha === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const low = [];
  const kinds = "body *:not(svg :not(text), script, style, noscript, [disabled], .heat *, option)";
  for (const element of document.querySelectorAll(kinds)) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility()) continue;
    const { color, fill } = getComputedStyle(element);
    const [a, b] = [parse(element.matches("svg text") ? fill : color).slice(0, 3), behind(element)].map(light);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const name = `${element.tagName}.${element.className}: ${element.textContent.trim().slice(0, 40)}`;
    if (ratio < 4.5) low.push(`${ratio.toFixed(2)} ${name}`);
  }
  return [...new Set(low)];
}"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_silent_asks_no_network_and_can_be_read_in_both_colours(
    name: str, dark: bool, pages: Callable[[str], Path], open_page: Open
) -> None:
    visit = open_page(pages(name), dark=dark)
    assert visit.faults == []
    visit(UNFOLD)
    assert visit("document.querySelectorAll('img, iframe, link, b').length") == 0  # no text of the data is markup
    ground = visit("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(ground[:3]) < 300) == dark
    assert visit(CONTRAST) == []


# Parts that scroll by themselves and that no key reaches, in browsers that do not stop at them unasked
STUCK = """[...document.querySelectorAll('body *')].filter((part) => part.checkVisibility()
  && ['auto', 'scroll'].includes(getComputedStyle(part).overflowX)
  && (part.scrollWidth > part.clientWidth + 1 || part.scrollHeight > part.clientHeight + 1)
  && part.tabIndex < 0 && !part.querySelector('a[href], button, input, select, summary, [tabindex="0"]'))
  .map((part) => part.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_390_pixels_does_not_scroll_sideways_and_keys_reach_parts_that_do(
    name: str, pages: Callable[[str], Path], open_page: Open
) -> None:
    visit = open_page(pages(name), width=390)
    visit(UNFOLD)
    assert visit("document.documentElement.scrollWidth") <= 390
    assert visit(STUCK) == []
    assert visit.faults == []


# Controls that are to be seen, each with a number by which it is known again
CONTROLS = """() => {
  const kinds = "a[href], button, input, select, summary, textarea, [tabindex]:not([tabindex='-1'])";
  const shown = [...document.querySelectorAll(kinds)].filter((found) => found.checkVisibility() && !found.disabled);
  shown.forEach((found, n) => { found.dataset.control = n; });
  return shown.length;
}"""
UNNAMED = """[...document.querySelectorAll('[data-control]')].filter((found) => !(found.labels?.length
  || found.ariaLabel || (found.matches('a, button, summary') && found.textContent.trim())))
  .map((found) => found.outerHTML)"""
FOCUSED = """() => {
  const here = document.activeElement;
  const style = getComputedStyle(here);
  const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
  const box = here.getBoundingClientRect();
  const inside = box.width > 0 && box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
  return [here.dataset.control ?? null, ring && inside, here.tagName + " " + here.textContent.trim().slice(0, 40)];
}"""


def reached(visit: Visit, most: int) -> tuple[set[int], list[str]]:
    """Which controls Tab reaches, and those that do not show that they have the focus."""
    found: set[int] = set()
    unseen = []
    for _ in range(most):
        visit.page.keyboard.press("Tab")
        number, is_seen, name = visit(FOCUSED)
        if number is None:
            continue
        if not is_seen:
            unseen.append(name)
        found.add(int(number))
    return found, unseen


@pytest.mark.parametrize("name", PAGES)
def test_tab_reaches_every_control_which_has_a_name_and_shows_where_it_is(
    name: str, pages: Callable[[str], Path], open_page: Open
) -> None:
    visit = open_page(pages(name))
    n = visit(CONTROLS)
    assert visit(UNNAMED) == []
    found, unseen = reached(visit, n + 40)  # parts that scroll are stops, too
    assert sorted(set(range(n)) - found) == []
    assert unseen == []


@pytest.mark.parametrize("name", PAGES)
def test_on_paper_the_ground_is_white_nothing_is_cut_off_and_buttons_are_gone(
    name: str, pages: Callable[[str], Path], open_page: Open
) -> None:
    visit = open_page(pages(name), dark=True, width=740)  # A4 less its margins
    visit.page.emulate_media(media="print")
    visit("dispatchEvent(new Event('beforeprint'))")
    assert visit("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert visit(CONTRAST) == []
    buttons = "[...document.querySelectorAll('button, select, input')].filter((part) => part.checkVisibility())"
    assert visit(f"{buttons}.filter((part) => !part.closest('th, .legend')).map((part) => part.textContent)") == []
    assert visit("document.querySelectorAll('details:not([open]):not(#raw)').length") == 0
    cut = """[...document.querySelectorAll('body *')].filter((part) => part.checkVisibility()
      && getComputedStyle(part).overflowY !== 'visible' && part.scrollHeight > part.clientHeight + 1
      && !part.closest('svg, .unseen')).map((part) => part.className)"""
    assert visit(cut) == []
    assert visit.page.pdf(format="A4").startswith(b"%PDF")


@pytest.mark.parametrize("name", PAGES)
def test_every_command_is_copied_as_it_stands(name: str, pages: Callable[[str], Path], open_page: Open) -> None:
    visit = open_page(pages(name))
    visit.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit(UNFOLD)
    for button in visit.page.locator("button.copy").all():
        button.click()
        shown = visit("(id) => document.getElementById(id).textContent", button.get_attribute("data-copy"))
        button.filter(has_text="Copied").wait_for()
        assert visit("navigator.clipboard.readText()") == shown
    assert visit.page.locator("button.copy").count() > 0 or name in ("explain", "explain points", "runs")


@pytest.mark.parametrize("name", PAGES)
def test_enter_opens_everything_that_is_folded_and_sorts_tables(
    name: str, pages: Callable[[str], Path], open_page: Open
) -> None:
    visit = open_page(pages(name))
    closed = "document.querySelector('details:not([open])')"
    while visit(f"{closed}?.querySelector('summary').focus() ?? {closed} !== null"):
        visit.page.keyboard.press("Enter")
        assert visit("document.activeElement.parentElement.open")
    for n, table in enumerate(visit.page.locator("table.sortable").all()[:8]):
        table.locator("thead button").first.focus()
        visit.page.keyboard.press("Enter")
        orders = (
            f"[...document.querySelectorAll('table.sortable')[{n}].tHead.rows[0].cells].map((head) => head.ariaSort)"
        )
        assert visit(orders)[0] == "ascending"
        assert set(visit(orders)[1:]) <= {"none"}


# Parts that say nothing to a screen reader
UNLABELLED = """[...document.querySelectorAll('svg.chart, table, th, [role="region"], details')].filter((part) => {
  if (part.matches('svg')) return part.getAttribute('role') !== 'img' || !part.ariaLabel;
  if (part.matches('table')) return !part.caption?.textContent.trim();
  if (part.matches('th')) return !['row', 'col'].includes(part.scope);
  return part.matches('details') ? !part.querySelector('summary')?.textContent.trim() : !part.ariaLabel;
}).map((part) => part.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("name", PAGES)
def test_charts_tables_and_headings_have_labels_for_screen_readers(
    name: str, pages: Callable[[str], Path], open_page: Open
) -> None:
    visit = open_page(pages(name))
    assert visit(UNLABELLED) == []
    assert visit("document.querySelectorAll('h1').length") == 1


@pytest.mark.parametrize("width", [1440, 1024, 860, 390])
@pytest.mark.parametrize("name", sorted({*PAGES} - {"explain"}))  # that one draws for its window
def test_no_chart_is_larger_than_it_was_drawn_for(
    name: str, width: int, pages: Callable[[str], Path], open_page: Open
) -> None:
    visit = open_page(pages(name), width=width)
    visit(UNFOLD)
    grown = """[...document.querySelectorAll('svg.chart')].filter((part) => part.checkVisibility()
      && part.getBoundingClientRect().width > part.viewBox.baseVal.width + 0.5).map((part) => part.ariaLabel)"""
    assert visit(grown) == []


@pytest.mark.parametrize(("width", "beside"), [(1440, True), (1024, True), (860, True), (859, False)])
def test_table_and_chart_stand_next_to_each_other_from_860_pixels(
    width: int, beside: bool, pages: Callable[[str], Path], open_page: Open
) -> None:
    visit = open_page(pages("report"), width=width)
    table, chart = visit("""['figures', 'frontier'].map((id) => document.getElementById(id).getBoundingClientRect())
      .map(({ top, bottom, left, right }) => [top, bottom, left, right])""")
    assert (table[0] == chart[0] and table[3] <= chart[2]) is beside
    assert beside or table[1] <= chart[0]
    assert table[0] < 844  # the first figures are seen without scrolling


@pytest.mark.parametrize("width", [1200, 1024, 860, 390])
@pytest.mark.parametrize("name", ["report", "fifty", "one", "crashed"])
def test_nothing_of_a_report_is_cut_at_1200_pixels_nor_of_its_first_table_on_a_phone(
    name: str, width: int, pages: Callable[[str], Path], open_page: Open
) -> None:
    visit = open_page(pages(name), width=width)
    if width == 1200 and name != "fifty":  # whose details have 50 rows of 20 figures
        visit(UNFOLD)
    cut = """[...document.querySelectorAll('.scroll')].filter((part) => part.checkVisibility()
      && part.scrollWidth > part.clientWidth + 1).map((part) => part.ariaLabel)"""
    assert visit(cut) == []
    assert visit("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("what", ["5,000 positions", "200 arms"])
def test_large_reports_lose_nothing(what: str, tmp_path: Path, open_page: Open) -> None:
    if what == "200 arms":
        report = many_arms(200)
    else:
        axes = {"kld": kld_axis(0.000712, 0.000142, control=0.00003, n_items=5000)}
        report = sample_report()
        candidates = tuple(one.model_copy(update={"axes": axes}) if one.axes else one for one in report.candidates)
        report = report.model_copy(update={"candidates": candidates})
    file = tmp_path / "report.html"
    file.write_text(report_page(report)(tmp_path), "utf-8")
    visit = open_page(file)
    assert visit.faults == []
    assert "left out" not in visit("document.getElementById('main').textContent")
    if what == "200 arms":
        assert visit("document.querySelectorAll('#figures tbody tr').length") == 200
    else:  # drawn of single positions
        assert visit("document.querySelectorAll('#axis-kld figure').length") == 3
