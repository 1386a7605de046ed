"""The HTML file stands alone, shows all that the record holds, and no text from outside becomes markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markupsafe import escape

from fidelab.core import Status
from fidelab.report.html import render_html, write_html
from fidelab.report.sections import sections_of
from fidelab.results.measurement import Measurement
from fidelab.results.plots import Choice, Place, Places
from fidelab.results.record import NO_REFERENCE, Report, Verdict
from tests.report.sample import (
    OUTCOMES,
    arm,
    candidate,
    hostile_report,
    kld_axis,
    many_arms,
    positions_for,
    sample_report,
    trajectory_axis,
    write_positions,
)
from tests.report.sample_axes import odd_axis
from tests.report.sample_benches import bench_report, hostile_benches, rich_report

VOID = ("meta", "br", "wbr")
REPORTS = {
    "sample": sample_report(),
    "hostile": hostile_report(),
    "many": many_arms(9),
    "rich": rich_report(),
    "one": bench_report(),
    "hostile benches": hostile_benches(),
}


class Page(HTMLParser):
    """What a browser would see: tags with attributes, text, and the scripts."""

    def __init__(self, report: Report, positions: Path | None = None) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.source = render_html(report, positions)
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif "style" not in self.open:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of every such tag."""
        return [attributes for name, attributes in self.tags if name == tag]


def report_of(**axes: Measurement) -> Report:
    """One candidate with such axes."""
    return sample_report(candidates=(candidate("q8_0", 0.02, "PASS", 100, "safe", axes=axes),))


@pytest.mark.parametrize("report", [hostile_report(), hostile_benches()], ids=["axes", "benches"])
def test_hostile_text_adds_no_tag_and_no_handler(report: Report) -> None:
    page, plain = Page(report), Page(rich_report())
    assert page.all("script") == [{"type": "application/json", "id": "fidelab-report"}, {}]
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in plain.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert not [attributes for _, attributes in page.tags if "autofocus" in attributes]


def test_hostile_text_is_shown_as_text() -> None:
    text = Page(hostile_report()).text
    assert text.count("<img src=x onerror=alert(2)>") > 30
    assert "{{ 7 * 7 }}" in text
    assert "\u202e" not in text


@pytest.mark.parametrize("report", [sample_report(), hostile_report()], ids=["sample", "hostile"])
def test_the_data_block_is_the_record(report: Report) -> None:
    block = Page(report).scripts[0]
    assert json.loads(block) == json.loads(report.to_json())
    assert not set("<>&\u2028\u2029") & set(block)


def test_the_policy_allows_the_pages_own_script_alone() -> None:
    page = Page(hostile_report())
    policy = next(tag["content"] for tag in page.all("meta") if tag.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in (policy or "").split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert page.source.index("Content-Security-Policy") < page.source.index("<style")


@pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS)
def test_the_page_is_well_formed(report: Report) -> None:
    page = Page(report)
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {(link["href"] or "").removeprefix("#") for link in page.all("a")} <= set(ids)


def test_nothing_is_fetched() -> None:
    page = Page(sample_report())
    assert not [tag for tag, attributes in page.tags if {"src", "srcset", "xlink:href"} & set(attributes)]
    assert all((attributes["href"] or "").startswith("#") for _, attributes in page.tags if "href" in attributes)
    assert not re.search(r"url\(|@import|https?:|fetch\(|XMLHttp", page.source)


def test_the_file_is_written_whole_and_stays_small_with_20_arms_and_many_positions(tmp_path: Path) -> None:
    path = write_html(sample_report(), tmp_path / "run" / "report.html")
    assert path.read_text(encoding="utf-8") == render_html(sample_report(), path.with_name("positions.parquet"))
    report = many_arms(20)
    write_positions(tmp_path, positions_for(report))
    assert write_html(report, tmp_path / "report.html").stat().st_size < 1e6


def test_every_outcome_the_command_and_the_settings_are_shown() -> None:
    report = sample_report()
    text = Page(report).text
    assert [word for word in (*OUTCOMES, report.command, '"n_ctx": 512') if word not in text] == []


def test_an_empty_report_and_an_arm_that_ran_without_axes_render() -> None:
    page = Page(sample_report(candidates=(), control=None, floor={}))
    assert "chart" not in {(attributes.get("class") or "").split(" ")[0] for attributes in page.all("svg")}
    assert Page(sample_report(candidates=(arm("q8_0"),), control=arm("bf16"), floor={})).open == []


def test_every_heading_of_a_table_that_sorts_is_a_button_that_names_its_order() -> None:
    page = Page(sample_report())
    heads = [attributes for attributes in page.all("th") if "aria-sort" in attributes]
    assert len(heads) == len(re.findall(r"<th [^>]*><button type=\"button\">", page.source))
    sorts = re.findall(r"<table class=\"sortable.*?<thead>(.*?)</thead>", page.source, re.DOTALL)
    assert len(heads) == sum(head.count("<th ") for head in sorts)
    assert len(page.all("table")) >= 7
    kinds = {(attributes["class"] or "").split()[0] for attributes in page.all("table")}
    assert kinds == {"sortable", "turned", "heat"}
    assert {attributes.get("aria-sort") for attributes in heads} == {"none"}


def test_a_table_of_many_columns_and_few_rows_is_turned() -> None:
    page = Page(sample_report()).source.split('<section id="axis-kld"')[1].split("</section>")[0]
    table = page.split('<table class="turned')[1].split("</table>")[0]
    heads = re.findall(r"<th scope=\"col\">(.*?)</th>", table)
    assert heads[:3] == ["configuration", "control bf16", "k16v8"]
    first = table.split("<tbody>")[1].split("</tr>")[0]
    assert '<th scope="row">mean, nats</th>' in first
    assert first.count("<td>") == len(heads) - 1


def test_the_control_is_a_band_with_its_name_in_every_kl_chart_and_said_where_it_costs_nothing() -> None:
    source = Page(sample_report()).source
    wide = [part.split("</svg>")[0] for part in source.split('<svg class="chart wide"')[1:4]]
    assert ["control (kernel noise) ≤ 0.000034" in part for part in wide] == [True] * 3
    same = arm("bf16", axes={"kld": kld_axis(0, 0, status=Status.IDENTICAL)})
    assert "The control has a KLD of exactly 0" in Page(sample_report(control=same)).source


def test_a_floor_above_zero_is_a_band_and_one_of_zero_is_said() -> None:
    zero = Page(sample_report()).source
    some = Page(sample_report(floor={"kld": kld_axis(0.00001, 0.000002)})).source
    none = Page(sample_report(floor={})).source
    assert "KLD is deterministic on this machine." in zero
    assert "floor (run-to-run noise) ≤ 0.000012" not in zero
    assert "floor (run-to-run noise) ≤ 0.000012" in some
    assert "Run-to-run noise was not measured" in none


def test_divergences_say_whether_they_are_near_ties_and_where_a_text_ends() -> None:
    source = Page(sample_report()).source
    assert '<span class="tag real">real</span> · prompt 3, token 17: margin 1.31 nats' in source
    assert '<span class="tag near">near tie</span> · prompt 0, token 2: margin 0.0400 nats' in source
    assert '<span class="tag ">ended</span> · prompt 5, token 9: one side ends</p>' in source
    assert "(ends here)" in source
    assert "blue during\n  the day" in Page(sample_report()).text


def test_an_axis_shows_its_figures_by_their_units_and_its_panels() -> None:
    page = Page(sample_report())
    for text in (
        "94.00% (50.00% to 99.00%)",
        "< 0.001",
        "hits by length and place",
        "accuracy by length",
        "by perturbation",
        "60.7",
        "largest drift",
        "ends at once",
        "not measurable: no informative cell",
    ):
        assert text in page.text
    assert "onset" not in page.text.split("Repeat this run")[0]  # nobody measured it


def test_empty_and_extreme_panels_render() -> None:
    page = Page(report_of(odd=odd_axis("odd")))
    assert page.open == []
    drawn = page.source.split('type="application/json"')[0]
    assert not re.search(r'"(nan|-?inf)|(nan|inf)[" ]', drawn, re.I)


def test_the_survival_chart_has_a_line_per_arm_named_directly_where_they_are_few_or_in_a_legend() -> None:
    report = report_of(trajectory=trajectory_axis(50, 5))
    chart = Page(report).source.split("<h3>How long greedy text stays the same</h3>")[1].split("</svg>")[0]
    assert re.findall(r'data-arm="(\w+)"', chart) == ["control", "candidate0", "floor"]
    few, many = Page(many_arms(3)).source, Page(many_arms(12)).source
    assert ['class="legend spare"' in page for page in (few, many)] == [True, False]


def test_flags_are_numbered_footnotes_below_their_table() -> None:
    section = Page(rich_report()).source.split('<section id="bench-serving"')[1].split("</section>")[0]
    assert "<li>1: 64 requests at once were asked, 11.2 were in flight</li>" in section
    assert len(re.findall(r"<td>no</td><td>1</td></tr>", section)) == 4


def test_definitions_of_metrics_stand_below_the_tables_of_their_section() -> None:
    report = rich_report()
    section = next(section for section in sections_of(report) if section.legend)
    page = Page(report).source.split(f'<section id="{section.kind}-{section.name}"')[1].split("</section>")[0]
    definitions = page.split("<summary>Definitions</summary>")[1]
    assert all(f"<li>{escape(line)}</li>" in definitions for line in section.legend)
    assert "Time per configuration" in Page(report).text.split("Repeat this run")[1]


def test_a_cause_that_hits_every_arm_is_told_once() -> None:
    cause = "the worker was ended by SIGABRT"
    lost = Measurement(status=Status.FAILED, reason=f"{NO_REFERENCE}: {cause}")
    candidates = tuple(
        arm(
            kv,
            status=Status.FAILED,
            reason=cause,
            axes={"kld": lost},
            verdict=Verdict(sentence=f"not running: {cause}"),
        )
        for kv in ("q4_0", "q8_0")
    )
    reference = arm("f32", status=Status.FAILED, reason=cause)
    report = sample_report(reference=reference, control=None, candidates=candidates, floor={"kld": lost})
    assert render_html(report).partition('<script type="application/json"')[0].count(cause) == 1


def test_the_worst_places_are_sentences_with_both_choices_and_the_text_before() -> None:
    place = Place(
        window=2,
        position=40,
        kl=1.25,
        before="the train\ngoes to",
        actual=" Paris",
        reference=Choice(text=" Lyon", probability=0.81),
        candidate=Choice(text=" <b>Paris", probability=0.62),
    )
    kld = kld_axis(0.01, 0.001)
    plots = (*kld.plots, Places(title="Worst places", places=(place,)))
    text = Page(report_of(kld=kld.model_copy(update={"plots": plots}))).text
    assert "The candidate says <b>Paris (62.0%) where the reference says Lyon (81.0%). KLD 1.25" in " ".join(
        text.split()
    )
    assert "the train↵goes to" in text


def test_every_chart_states_what_it_shows() -> None:
    page = Page(rich_report())
    charts = [
        attributes["aria-label"] or "" for tag, attributes in page.tags if tag == "svg" and "aria-label" in attributes
    ]
    assert all(re.search(r"\. .*\d", chart) for chart in charts)
    frontier = next(chart for chart in charts if chart.startswith("Fidelity against size"))
    assert "k16v8 0.00071 at 34,560" in frontier
    position = next(chart for chart in charts if chart.startswith("KL by position"))
    assert re.search(r"fp8_e4m3 from 0\.0\d+ at \d+ to 0\.0\d+ at \d+", position)
