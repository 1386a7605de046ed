"""Numbers have one format, and every outcome has words."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from fidelab.core import Status
from fidelab.report.html import render_html
from fidelab.report.markdown import render_markdown
from fidelab.report.sections import Section, sections_of
from fidelab.report.tables import cache_layers_of, runtime_table
from fidelab.report.text import render_text
from fidelab.report.view import ArmRow, View, build_view
from fidelab.results.measurement import Definition, Measurement
from fidelab.results.numbers import (
    ABSENT,
    format_bytes,
    format_figure,
    format_interval,
    format_kld,
    format_percent,
    format_percent_span,
    format_range,
    format_score,
    format_share,
    format_span,
    heading,
    one_line,
    printable,
)
from fidelab.results.record import Comparison, Composite, NoiseFloor, Report, RuntimeRecord, Verdict
from tests.present import present
from tests.report.sample import arm, candidate, kld_axis, sample_report, trajectory_axis
from tests.report.sample_axes import rniah_axis


@pytest.mark.parametrize(
    ("interval", "text"), [((64.6, 100.0), "65–100"), ((99.52, 99.91), "99.5–99.9"), ((100.0, 100.0), "100.0–100.0")]
)
def test_a_narrow_range_of_scores_keeps_its_width(interval: tuple[float, float], text: str) -> None:
    assert format_range(interval) == text


def rows() -> dict[str, ArmRow]:
    return {row.name: row for row in build_view(sample_report()).rows}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (0.0007, "0.000700"),
        (0.00003, "0.0000300"),
        (9.996e-5, "0.000100"),
        (0.0001, "0.000100"),
        (0.03124, "0.0312"),
        (0.9996, "1.00"),
        (2.133356, "2.13"),
        (123.4, "123"),
        (1234, "1230"),
        (-0.00012, "−0.000120"),
    ],
)
def test_kld_has_three_significant_digits(value: float | None, text: str) -> None:
    assert format_kld(value) == text


def test_an_excess_shows_its_sign_and_a_lower_bound_is_marked() -> None:
    assert [format_kld(value, signed=True) for value in (0.01, -0.01, 0)] == ["+0.0100", "−0.0100", "0"]
    assert format_kld(0.5, bound=True) == "≥ 0.500"


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        ((0.085, 0.126), "0.085–0.13"),
        ((0.0, 0.012), "0–0.012"),
        ((2e-5, 0.0001), "0.000020–0.00010"),
        ((0.02001, 0.02049), "0.0200–0.0205"),  # two digits would make both the same
        ((-0.002, 0.001), "−0.0020 to 0.0010"),
        ((0.0, 0.0), "0–0"),
        (None, "–"),  # no interval is not one of zero width
    ],
)
def test_an_interval_of_nats_shows_both_ends(interval: tuple[float, float] | None, text: str) -> None:
    assert format_span(interval) == text


@pytest.mark.parametrize(
    ("share", "interval", "text", "span"),
    [
        (1 / 17, (1 / 19, 1 / 16), "5.88%", "5.3–6.2%"),
        (0.2, (0.18, 0.25), "20.0%", "18–25%"),
        (1 / 1234, (0.0, 0.001), "0.081%", "0–0.10%"),
        (0.0, (0.0, 0.004), "0%", "≤ 0.40%"),
        (0.0, (0.0, 0.26), "0%", "≤ 26%"),
        (0.0, (0.0, 1.0), "0%", "≤ 100%"),
        (0.913, (0.88, 0.94), "91.3%", "88–94%"),
        (0.999, None, "99.9%", "–"),
        (1.0, (0.9, 1.0), "100%", "90–100%"),
        (None, None, "–", "–"),
    ],
)
def test_changes_are_percentages(
    share: float | None, interval: tuple[float, float] | None, text: str, span: str
) -> None:
    assert (format_percent(share), format_percent_span(interval, share)) == (text, span)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (1, "100.00%"), (0.999999, "> 99.99%"), (0.00001, "< 0.01%"), (0, "0.00%"), (0.5, "50.00%")],
)
def test_shares_never_round_to_all_or_nothing(value: float | None, text: str) -> None:
    assert format_share(value) == text


def test_scores_have_one_decimal_and_bytes_stand_in_full() -> None:
    assert [format_score(value) for value in (69.62, 100, None)] == ["69.6", "100.0", "–"]
    assert format_bytes(57344) == "57,344"


def test_foreign_text_has_no_control_characters_and_stays_on_its_line_where_it_is_one() -> None:
    assert one_line("a\n\tb\x1b[31m\x00") == "a b\ufffd[31m\ufffd"
    assert printable("a\n\tb\x1b[31m\u202e\x00c") == "a\n\tb\ufffd[31m\ufffd\ufffdc"


@pytest.mark.parametrize(
    ("name", "verdict", "key"),
    [
        ("f32", "reference", "reference"),
        ("bf16", "control", "control"),
        ("k16v8", "excellent", "excellent"),
        ("f16/f16", "identical", "excellent"),
        ("q8_0", "failed", "broken"),
        ("fp8_e5m2", "not engaged", "broken"),
        ("nvfp4", "not supported", "broken"),
    ],
)
def test_every_outcome_has_its_word(name: str, verdict: str, key: str) -> None:
    row = rows()[name]
    assert (row.mark, row.key) == (verdict, key)


def test_an_arm_without_a_band_has_no_verdict_and_its_reason_is_shown_even_where_the_sentence_lacks_it() -> None:
    bare = arm("q4", verdict=Verdict(sentence="no verdict: too little text"))
    lost = arm("q5", status=Status.FAILED, reason="no memory", verdict=Verdict(sentence="not running"))
    first, second = build_view(sample_report(candidates=(bare, lost))).candidates
    assert (first.verdict, second.sentence) == ("no verdict", "not running (no memory)")


def test_a_verdicts_further_notes_stand_in_its_row() -> None:
    [first, *_] = sample_report().candidates
    assert first.verdict is not None
    verdict = first.verdict.model_copy(update={"notes": ("Rounding noise 0.0001",)})
    [row] = build_view(sample_report(candidates=(first.model_copy(update={"verdict": verdict}),))).candidates
    assert "Rounding noise 0.0001" in row.others


def test_topk_figures_are_lower_bounds_and_have_no_excess_and_a_negative_one_is_shown_as_such() -> None:
    def view_of(axis: Measurement) -> View:
        return build_view(sample_report(candidates=(candidate("q4", 0.02, "PASS", 1, "x", axes={"kld": axis}),)))

    view = view_of(kld_axis(0.02, 0.001, control=0.01, bound=True))
    row = view.candidates[0]
    assert (row.kld.value, row.excess.value) == ("≥ 0.0200", "–")
    assert [point.name for point in view.points] == ["bf16"]
    less = view_of(kld_axis(0.02, 0.001, over=(-0.001, (-0.002, 0))))
    assert str(less.candidates[0].excess) == "−0.00100 (−0.0020 to 0)"


def test_failed_items_are_listed_with_their_counts() -> None:
    assert build_view(sample_report()).failures == (
        "int4[group=32,skip-layers=0,29]: 12 of 8,160 items failed (kld)",
        "int4[group=32,skip-layers=0,29]: trajectory failed: time-out after 60 s",
        "int4[group=32,skip-layers=0,29]: rniah not measurable: no informative cell",
    )


def test_a_missing_floor_and_control_are_said_and_a_broken_control_says_why() -> None:
    view = build_view(sample_report(floor={}, control=None))
    assert (view.floor, view.control) == ("Run-to-run noise (reference against itself): not measured", "Control: none")
    view = build_view(sample_report(control=arm("bf16", status=Status.FAILED, reason="killed")))
    assert view.control == "Control bf16: failed: killed"


def test_controls_of_other_kernel_paths_have_rows_and_are_told() -> None:
    path = arm("bf16", name="bf16 (eager)", axes={"kld": kld_axis(0.001, 0.0001)})
    view = build_view(sample_report(controls=(path,)))
    assert [row.name for row in view.rows if row.role == "control"] == ["bf16", "bf16 (eager)"]
    first, second, last = view.control.split(". ")
    assert (first[:13], second[:21]) == ("Control bf16:", "Control bf16 (eager):")
    assert last == "The excess over the control is the paired difference to it"


def test_asked_and_ran_stand_side_by_side() -> None:
    table = build_view(sample_report()).tables[0]
    values = [dict(zip(table.columns, row, strict=True))["values"] for row in table.rows]
    assert values[0] == "f32"
    assert values[-1] == "nvfp4"
    packed = arm("fp8_e4m3", ran=RuntimeRecord(k_dtype="uint8", v_dtype="uint8"))
    assert runtime_table([packed]).rows[0][2:4] == ("fp8_e4m3 as uint8",) * 2


def test_layers_of_one_setting_share_a_row_that_says_where_their_scales_come_from() -> None:
    native = {"format": "auto", "dtype": "bfloat16", "k_scale": None, "v_scale": None, "scale_source": None}
    fp8 = {"format": "fp8_e4m3", "dtype": "uint8", "k_scale": 0.5, "v_scale": 1.0, "scale_source": "checkpoint"}
    rows = [{"layer": n, **(native if n in (0, 3) else fp8)} for n in range(4)]
    table = cache_layers_of([arm("mixed", ran=RuntimeRecord.model_validate({"cache_layers": rows}))])
    assert present(table).rows == (
        ("mixed", "layers 0, 3", "bfloat16", "–", "–"),
        ("mixed", "layers 1–2", "fp8_e4m3", "0.5–1", "checkpoint"),
    )
    for damaged in (None, 3, [1, {"layer": "x"}], [{"layer": 0, **native}]):
        assert cache_layers_of([arm("x", ran=RuntimeRecord.model_validate({"cache_layers": damaged}))]) is None


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "share", "–"),
        (0.0312, "nats", "0.0312"),
        (-0.0312, "nats", "−0.0312"),
        (0.999999, "share", "> 99.99%"),
        (-0.25, "share", "−25.00%"),
        (-3.21, "points", "−3.2"),
        (12345, "count", "12,345"),
        (17.5, "tokens", "17.5"),
        (-17.5, "tokens", "−17.5"),
        (0.0001, "p", "< 0.001"),
        (0.0312, "p", "0.0312"),
        (0.0, "p", "0"),
        (2.0, "", "2.00"),
        (1234.5, "tok/s", "1,234"),
        (0.0123, "s", "0.0123"),
        (46080, "bytes", "46,080"),
        (33333.3, "tokens", "33,333"),
    ],
)
def test_figures_are_written_by_their_unit(value: float | None, unit: str, text: str) -> None:
    assert format_figure(value, unit) == text


def test_intervals_of_figures_are_written_by_their_unit() -> None:
    assert [format_interval((-1.0, 3.0), unit) for unit in ("nats", "points")] == ["−1.0 to 3.0", "−1.0 to 3.0"]
    assert format_interval((60.0, 80.0), "points") == "60–80"
    assert format_interval((1000.0, None), "tokens") == "1,000–∞"
    assert format_interval((2**20, 2**21), "bytes", mib=True) == "1.00–2.00"
    assert format_interval(None, "share") == "–"


@pytest.mark.parametrize(
    ("name", "unit", "text"),
    [
        ("rate", "tok/s", "rate, tok/s"),
        ("KV bytes per token", "bytes", "KV bytes per token"),
        ("tokens to flip", "tokens", "tokens to flip"),
        ("same top token", "share", "same top token"),
    ],
)
def test_a_heading_names_the_unit_unless_the_values_or_the_name_do(name: str, unit: str, text: str) -> None:
    assert heading(name, unit) == text


def test_the_size_is_told_against_a_16_bit_cache_and_without_one_against_the_reference() -> None:
    assert [row.size.value for row in build_view(sample_report()).rows[:4]] == ["–", "–", "−25%", "−50%"]
    [_, *without] = build_view(sample_report(control=None)).rows  # half of the 32-bit reference
    assert without[0].size.value == "−25%"
    reference = arm("q8_0", ran=RuntimeRecord(k_dtype="q8_0", v_dtype="q8_0", cache_bytes_per_token=24480))
    candidates = (candidate("q4_0", 0.1, "FAIL", 12960, "x"),)
    view = build_view(sample_report(reference=reference, control=None, candidates=candidates))
    assert view.candidates[0].size.value == "−47%"


def test_the_weights_of_arms_are_told_by_size() -> None:
    def told(*sizes: int | None) -> str:
        records = [
            arm(kv, ran=RuntimeRecord(weight_bytes=size))
            for kv, size in zip(("f32", "bf16", "int4"), sizes, strict=True)
        ]
        return build_view(sample_report(reference=records[0], control=None, candidates=records[1:])).weights

    mib = 2**20
    assert told(None, None, None) == ""
    assert told(256 * mib, 256 * mib, 256 * mib) == "Weights, as stored: 256 MiB in each configuration"
    assert told(256 * mib, None, 256 * mib) == "Weights of f32, int4, as stored: 256 MiB"
    assert (
        told(256 * mib, 256 * mib, 87 * mib)
        == "Weights of f32, bf16, as stored: 256 MiB. Weights of int4, as stored: 87.0 MiB"
    )


def test_roundedweights_have_the_size_of_their_format_and_are_called_simulated() -> None:
    ran = RuntimeRecord(weight_bytes=256 * 2**20, simulated_weight_bytes=72 * 2**20)
    reference = arm("bf16", ran=RuntimeRecord(weight_bytes=256 * 2**20))
    view = build_view(sample_report(reference=reference, control=None, candidates=[arm("int4", ran=ran)]))
    assert view.weights == "Weights of bf16, as stored: 256 MiB. Weights of int4, simulated: 72.0 MiB"
    [table] = [table for table in view.tables if table.key == "ran"]
    assert [row[table.columns.index("weight bytes")] for row in table.rows] == ["268,435,456", "75,497,472 simulated"]


def test_the_weights_stand_beside_the_cache_in_every_face() -> None:
    ran = RuntimeRecord(cache_bytes_per_token=46080, weight_bytes=3 * 2**20)
    report = sample_report(reference=arm("f32", ran=ran))
    console = Console(file=io.StringIO(), width=100)
    render_text(report, console, details=True)
    for face in (console.file.getvalue(), report.to_markdown(), render_html(report)):  # type: ignore[attr-defined]
        assert "Weights of f32, as stored: 3.00 MiB" in face
    [ran_table] = [table for table in build_view(report).tables if table.key == "ran"]
    row = dict(zip(ran_table.columns, ran_table.rows[0], strict=True))
    assert (row["bytes/token"], row["weight bytes"]) == ("46,080", "3,145,728")
    assert report.to_pandas().set_index("role").loc["reference", "weight_bytes"] == 3 * 2**20


def section(report: Report, name: str) -> Section:
    return next(found for found in sections_of(report) if found.name == name)


def test_axes_of_control_and_floor_have_rows_too() -> None:
    axes = {"rniah": rniah_axis(0.1)}
    found = section(sample_report(control=arm("bf16", axes=axes), floor=axes), "rniah")
    [table] = found.tables
    assert table.columns == ("configuration", "score", "over control", "accuracy", "sign test", "items", "failed")
    assert [row[0] for row in table.rows] == ["control bf16", "k16v8", "fp8_e4m3", "run-to-run noise"]
    assert found.notes == ("int4[group=32,skip-layers=0,29]: not measurable: no informative cell",)
    assert [arm.id for arm, _ in found.curves[0].lines] == ["control", "candidate0", "candidate1", "floor"]


def test_plots_of_one_key_are_grouped_and_the_others_stand_with_their_arm() -> None:
    report = sample_report()
    assert [(group.key, len(group.lines)) for group in section(report, "kld").curves] == [
        ("position", 6),
        ("confidence", 6),
    ]
    [plad] = section(report, "plad").shown
    assert (plad.arm.name, len(plad.heatmaps), len(plad.tables), len(plad.texts)) == ("k16v8", 0, 1, 1)


def test_each_set_of_coordinates_has_a_table_and_what_never_differs_is_said_in_its_title() -> None:
    made = Definition("ln_ratio", "nats", "lower")
    found = Measurement(
        status=Status.OK,
        metrics=(made(0.5), *(made(n / 8192, cell={"context": n, "part": "all"}) for n in (512, 2048))),
        n_items=7,
    )
    whole, parts = section(sample_report(candidates=(arm("q4", axes={"x": found}),)), "x").tables
    assert (whole.title, whole.columns, whole.rows) == (
        "x",
        ("configuration", "ln ratio, nats", "items"),
        (("q4", "0.500", "7"),),
    )
    assert (parts.title, parts.columns) == ("x, by context (part all)", ("configuration", "context", "ln ratio, nats"))
    assert (parts.named, parts.rows) == (2, (("q4", "512", "0.0625"), ("q4", "2,048", "0.250")))


def test_a_bound_an_open_interval_and_an_excess_are_marked() -> None:
    report = sample_report(
        candidates=(arm("q4", axes={"kld": kld_axis(0, 0, control=0.01, bound=True)}),), control=None
    )
    [row] = [dict(zip(table.columns, table.rows[0], strict=True)) for table in section(report, "kld").tables]
    assert row["mean, nats"] == "≥ 0 (0–0)"
    assert row["tokens to flip"] == "> 1,000"
    assert row["over control, nats"] == "≥ −0.0100 (−0.0100 to −0.0100)"


FLOOR = "Run-to-run noise (reference against itself): "
HERE = " deterministic on this machine"


def floor_of(**axes: Measurement) -> str:
    return build_view(sample_report(floor=axes)).floor.removeprefix(FLOOR)


def test_what_repeats_is_counted() -> None:
    kld = kld_axis(0, 0, n_items=510)
    assert floor_of(trajectory=trajectory_axis(100, 0, n_items=3), kld=kld) == (
        f"trajectory (3 of 3 items) and kld (510 of 510 items) are{HERE}"
    )
    assert floor_of(kld=kld_axis(0, 0, n_items=510, n_failed=2)) == f"kld (508 of 510 items) is{HERE}"
    contexts = {n: (0.0, n, None) for n in (255, 1023)}
    assert floor_of(kld=kld_axis(0, 0, n_items=255, contexts=contexts)) == f"kld (1,278 of 1,278 items) is{HERE}"


def test_a_floor_of_any_axis_that_does_not_repeat_is_told_by_its_cost() -> None:
    greedy = trajectory_axis(95, 3, exact=0.5, n_items=8)
    apart = "trajectory: 4 of 8 items repeat, trajectory 95.0 (92–98)"
    same = Measurement(status=Status.IDENTICAL)
    other = Measurement(status=Status.OK, metrics=(Definition("score", "points")(98.0),))
    assert floor_of(rniah=same) == f"rniah is{HERE}"
    assert floor_of(rniah=same, plad=other) == f"rniah is{HERE}; plad 98.0"
    assert floor_of(perplexity=Measurement(status=Status.OK)) == "perplexity: measured"
    assert floor_of(trajectory=greedy, kld=kld_axis(0.001, 0.0005)) == (f"{apart}; kld: mean 0.00100 (0.00050–0.0015)")
    assert floor_of(kld=kld_axis(0, 0, n_items=510), trajectory=greedy) == (f"kld (510 of 510 items) is{HERE}; {apart}")


NO_JITTER = "Rounding noise was not measured"


@pytest.mark.parametrize(
    ("reasons", "told"),
    [
        (("not measured: engine llamacpp has no jitter",) * 2, f"{NO_JITTER}: engine llamacpp has no jitter"),
        ((None, "out of\nmemory"), f"{NO_JITTER} for b: out of memory"),
        (("too long", "out of memory"), f"{NO_JITTER} for a: too long. {NO_JITTER} for b: out of memory"),
        ((None, None), ""),
    ],
)
def test_a_noise_floor_that_was_not_measured_is_said_once_with_its_reason(
    reasons: tuple[str | None, ...], told: str
) -> None:
    arms = [
        candidate(name, 0.02, "PASS", 1, "x", floor=NoiseFloor(of=name, mean=None if reason else 0.01, reason=reason))
        for name, reason in zip("ab", reasons, strict=True)
    ]
    lost = arm("c", status=Status.FAILED, reason="no memory", floor=NoiseFloor(of="c", reason="no memory"))
    said = build_view(sample_report(candidates=(*arms, lost), floor={})).floor
    assert said.removeprefix(f"{FLOOR}not measured").removeprefix(". ") == told


def test_the_ranking_claims_equality_only_where_it_is_shown() -> None:
    def pair(better: str, worse: str, **found: bool) -> Comparison:
        return Comparison(axis="kld", better=better, worse=worse, difference=0.1, ci=(0.0, 0.2), **found)

    pairs = (pair("a", "b", differs=True), pair("b", "c", equivalent=True), pair("c", "d"))
    assert build_view(sample_report(comparisons=pairs)).ranking == (
        "Ranking by KLD (paired test): a < b ≈ c ? d (≈: equal within 10%; ?: no difference shown)"
    )
    both = (pair("a", "b", differs=True, equivalent=True),)  # a difference that is certain, and small
    assert build_view(sample_report(comparisons=both)).ranking == "Ranking by KLD (paired test): a < b"


def test_what_is_ruled_out_stands_below_no_verdict() -> None:
    row = candidate("q4", 0.07, "PASS", 1, "x", verdict=Verdict(at_best="DEGRADED", sentence="no verdict"))
    shown = build_view(sample_report(candidates=(row,))).candidates[0]
    assert (shown.mark, shown.why, shown.key) == ("no verdict", "at best degraded", "none")


SHIM = "ran with vllm modified: 1 file differs from the package, first a.py, shim patched (sha256 0123abcd)"


def printed(report: Report) -> str:
    file = io.StringIO()
    render_text(report, Console(file=file, width=200), details=True)
    return file.getvalue()


@pytest.mark.parametrize("face", [printed, render_html, render_markdown], ids=["text", "html", "markdown"])
def test_every_face_says_what_was_modified_and_what_an_engine_remarks_on_how_an_arm_ran(
    face: Callable[[Report], str],
) -> None:
    ran = {
        "provenance": {"torch": "stock", "vllm": "modified: 1 file differs from the package, first a.py"},
        "pythonpath": [{"folder": "patched", "sha256": "0123abcd4567"}],
        "remarks": ["FlashAttention 3 also quantized queries to FP8"],
    }
    shimmed = candidate("q4", 0.02, "PASS", 1, "safe", ran=RuntimeRecord.model_validate(ran))
    shown, plain = (
        face(sample_report(candidates=(arm,))) for arm in (shimmed, candidate("q4", 0.02, "PASS", 1, "safe"))
    )
    for mark in ("modified", SHIM):
        assert mark in shown.split('type="application/json"')[0]
    assert "ran with" not in plain
    assert "q4: FlashAttention 3 also quantized queries to FP8" in shown.split('type="application/json"')[0]
    assert list(sample_report(candidates=(shimmed,)).to_pandas()["modified"].dropna()) == [
        SHIM.removeprefix("ran with ").replace(", shim", "; shim")
    ]


@pytest.mark.parametrize("face", [printed, render_html, render_markdown], ids=["text", "html", "markdown"])
def test_every_face_shows_axes_and_benches_that_nobody_knows(face: Callable[[Report], str]) -> None:
    axis = Measurement(status=Status.OK, metrics=(Definition("tact", "share", "higher")(0.1234, (0.1, 0.2)),))
    bench = Measurement(
        status=Status.OK,
        metrics=tuple(Definition("pages", "req/s", "higher")(700.0 + n, cell={"readers": n}) for n in (1, 2)),
    )
    odd = candidate("q4", 0.02, "PASS", 1, "safe", axes={"manners": axis}, benches={"reading": bench})
    shown = face(sample_report(candidates=(odd,))).split('type="application/json"')[0]
    for mark in ("manners: tact", "12.34%", "reading:", "pages,", "readers", "701"):
        assert mark in shown


def test_folders_of_own_builds_stay_at_home() -> None:
    ran = RuntimeRecord.model_validate({"provenance": {"torch": "built from /home/somebody/torch@0123"}})
    assert ran.modified == ("torch built from torch@0123",)


def test_contexts_stand_beside_each_other() -> None:
    contexts = {512: (0.0073, 4080, 31), 2048: (0.0133, 4080, 6)}
    axes = {"kld": kld_axis(0.0133, 0.002, contexts=contexts)}
    view = build_view(sample_report(candidates=(candidate("q4", 0.0133, "PASS", 1, "x", axes=axes),), control=None))
    assert view.beside[0].columns == (
        "configuration",
        "512 tokens, 16 windows, 31 documents",
        "2,048 tokens, 16 windows, 6 documents",
    )
    assert view.beside[0].rows == (("q4", "0.00730 (0.0029–0.015)", "0.0133 (0.0053–0.027)"),)
    assert (
        "4,080 positions (16 windows, 31 documents) at 512 tokens, 4,080 positions (16 windows, 6 documents) at 2,048"
        in view.text
    )


def test_the_composite_is_shown_where_all_its_axes_ran_or_its_bands_were_asked_for() -> None:
    def last(settings: dict[str, str], band: str | None) -> str:
        whole = Composite.model_validate({"value": 88.1, "ci": (84.2, 91.0), "band": band})
        report = sample_report(settings=settings, candidates=(candidate("q4", 0.1, "FAIL", 1, "x", composite=whole),))
        return build_view(report).beside[-1].columns[-1]

    assert last({}, None) == last({"bands": "fidelab"}, None) == "trajectory"
    assert last({}, "PASS") == last({"bands": "refract"}, None) == "composite"


def test_what_holds_for_several_arms_is_said_once() -> None:
    axis = Measurement(status=Status.NOT_MEASURABLE, reason="the reference solves nothing")
    arms = tuple(arm(name, axes={"gsm8k": axis}) for name in ("q8_0", "q4_0"))
    failures = build_view(sample_report(candidates=arms, control=None)).failures
    assert failures == ("q8_0, q4_0: gsm8k not measurable: the reference solves nothing",)


def test_other_axes_are_summed_up_by_their_headlines_or_their_first_metric() -> None:
    score = Definition("score", "points", "higher")(90.0, (80.0, 95.0), headline=True)
    scored = Measurement(status=Status.OK, metrics=(Definition("cells", "count")(9), score), title="Is it so?")
    ratio = Definition("ln_ratio", "nats", "lower")
    unscored = Measurement(
        status=Status.OK,
        metrics=tuple(ratio(0.01, (0.005, 0.015), cell={"context": n, "part": 1}) for n in (512, 2048)),
    )
    lost = Measurement(status=Status.FAILED, reason="time-out")
    arms = (arm("q8_0", axes={"rniah": scored, "perplexity": unscored}), arm("q4_0", axes={"rniah": lost}))
    report = sample_report(candidates=arms, control=None)
    [table] = build_view(report).beside
    assert table.columns == ("configuration", "rniah", "perplexity: ln ratio, nats, context 512")
    assert table.rows == (("q8_0", "90.0 (80–95)", "0.0100 (0.0050–0.015)"), ("q4_0", "failed", "–"))
    titles = {found.name: found.title for found in sections_of(report)}
    assert (titles["rniah"], titles["perplexity"]) == ("Is it so?", "perplexity")
    alone = arm("q8_0", axes={"kld": kld_axis(0.1, 0.01)})  # without other axes there is no summary of them
    assert [table.key for table in build_view(sample_report(candidates=(alone,), control=None)).beside] == [
        "distribution"
    ]


def test_median_percentiles_and_maximum_of_the_kld_have_a_row_per_configuration() -> None:
    arms = (arm("q8_0", axes={"kld": kld_axis(0.03, 0.01)}), arm("q4_0", axes={"kld": kld_axis(0.3, 0.1)}))
    [table] = build_view(sample_report(candidates=arms, control=None)).beside
    assert table.columns == ("configuration", "median", "p90", "p95", "p99", "p99.9", "max")
    assert table.rows[0] == ("q8_0", "0.0100", "0.0600", "0.120", "0.270", "0.900", "3.00")
    assert [row[0] for row in table.rows] == ["q8_0", "q4_0"]
    assert "worst context" not in table.title


def test_the_distribution_of_several_contexts_names_the_worst_one_as_its_source() -> None:
    axes = {"kld": kld_axis(0.03, 0.01, contexts={512: (0.01, 900, 6), 2048: (0.03, 900, 6)})}
    found = build_view(sample_report(candidates=(arm("q8_0", axes=axes),), control=None)).beside
    [title] = [table.title for table in found if table.key == "distribution"]
    assert title.endswith("at the worst context")


def test_the_distribution_has_a_row_for_each_context_that_was_measured() -> None:
    kld = kld_axis(0.03, 0.01, contexts={512: (0.01, 900, 6), 2048: (0.03, 900, 6)})
    define = Definition("median", "nats", "lower")
    kld = kld.model_copy(
        update={"metrics": (*kld.metrics, *(define(n / 1e5, cell={"context": n}) for n in (512, 2048)))}
    )
    found = build_view(sample_report(candidates=(arm("q8_0", axes={"kld": kld}),), control=None)).beside
    [table] = [table for table in found if table.key == "distribution"]
    assert table.columns[:3] == ("configuration", "context", "median")
    assert [row[:3] for row in table.rows] == [("q8_0", "512", "0.00512"), ("q8_0", "2,048", "0.0205")]
    assert table.title == "Distribution of KLD over positions (nats)"


def test_a_kld_without_percentiles_has_no_table_of_them() -> None:
    bare = kld_axis(0.03, 0.01)
    bare = bare.model_copy(update={"metrics": tuple(m for m in bare.metrics if m.key in ("mean", "top1"))})
    assert build_view(sample_report(candidates=(arm("q8_0", axes={"kld": bare}),), control=None)).beside == ()


def test_arms_that_differ_in_weights_alone_are_plotted_over_the_size_of_their_weights() -> None:
    reference = arm("bf16", ran=RuntimeRecord(cache_bytes_per_token=100, weight_bytes=300 << 20))
    smaller = candidate("int4", 0.02, "PASS", 100, "s")
    assert smaller.ran is not None
    smaller = smaller.model_copy(update={"ran": smaller.ran.model_copy(update={"weight_bytes": 80 << 20})})
    view = build_view(sample_report(reference=reference, control=None, controls=(), candidates=(smaller,)))
    assert [(point.size, point.unit) for point in view.points] == [(80.0, "MiB of weights")]
    assert (present(view.reference).size, present(view.reference).unit) == (300.0, "MiB of weights")


def test_what_ran_says_in_how_many_layers_and_forwards_the_format_was_seen() -> None:
    def seen(observed: dict[str, tuple[int, int]] | None) -> str:
        table = runtime_table([arm("int8", ran=RuntimeRecord(observed=observed))])
        return table.rows[0][table.columns.index("format seen in")]

    every = {"layers": (30, 30), "prefills": (6, 41), "steps": (11, 1200)}
    assert seen(every) == "30 of 30 layers, 6 of 41 prefills, 11 of 1,200 decode steps"
    assert seen({"layers": (1, 16), "steps": (0, 0)}) == "1 of 16 layers"
    assert seen(None) == seen({}) == ABSENT
