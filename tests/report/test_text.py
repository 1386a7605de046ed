"""The terminal report fits its width and takes nothing from outside as markup."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from markupsafe import escape
from rich.cells import cell_len
from rich.console import Console

from fidelab.core import Status
from fidelab.report.html import render_html
from fidelab.report.text import render_text, wrap_name
from fidelab.results.decision_record import Recommendation
from fidelab.results.measurement import Definition, Measurement
from fidelab.results.record import Report, Verdict
from tests.report.sample import HOSTILE, arm, broken, candidate, kld_axis, sample_report
from tests.report.sample_axes import rniah_axis


def printed(report: Report, width: int = 100, folder: Path | None = None, details: bool = False) -> str:
    file = io.StringIO()
    render_text(report, Console(file=file, width=width), folder=folder, details=details)
    return file.getvalue()


ADVICE = Recommendation(
    kind="use",
    arm="k16v8",
    confidence="confirmed",
    text="Use k16v8: 25% smaller KV cache than bf16",
    evidence=("KLD 0.0007 · same top token 99.9%", "confirmed: KLD below 0.01"),
    untested=("more than 512 tokens", "speed"),
    command="vllm serve m --kv-cache-dtype k16v8",
    risks=("0.071% of top tokens change",),
    others=("fp8_e4m3: more than twice its KLD", "int4[group=32,skip-layers=0,29]: verdict FAIL"),
)


def widest(text: str) -> int:
    return max(cell_len(line) for line in text.splitlines())


LONG = "llamacpp:flash-attn=on,cache-type-k=q4_0,cache-type-v=q4_0,threads=16"


def test_the_first_screen_is_header_answer_table_reasons_and_what_to_type_next() -> None:
    lines = printed(sample_report(recommendation=ADVICE), 80, Path("runs/x")).splitlines()
    assert lines[0] == "SmolLM2-135M-Instruct · Transformers · reference f32 · 512 tokens · 31 documents"
    at = lines.index("Use k16v8  25% smaller KV cache than bf16")
    assert [line.strip() for line in lines[at + 1 : at + 4]] == [
        "KLD 0.0007 · same top token 99.9%",
        "confirmed: KLD below 0.01",
        "not tested: more than 512 tokens, speed",
    ]
    [heading] = [line for line in lines if line.split()[:3] == ["KV", "cache", "verdict"]]
    assert heading.split()[3:] == ["KLD", "95%", "interval", "token", "flips", "size"]
    assert lines[lines.index(heading) - 1].split() == ["same", "top", "confident"]
    [chosen] = [line for line in lines if line.startswith(" *")]
    assert chosen.split() == ["*", "k16v8", "excellent", "0.000712", "0.00057–0.00085", "99.93%", "0.018%", "−25%"]
    reasons = [line.strip() for line in lines if line.startswith("   ") and ": " in line]
    assert "fp8_e4m3: more than twice its KLD" in reasons
    assert not any("verdict FAIL" in line for line in reasons)  # its row says so
    assert [line.split()[0] for line in lines[-3:]] == ["Next", "Report", "More"]
    assert lines[-3].endswith(ADVICE.command or "")
    for word in ("noise", "ontrol", "excess", "Risk"):
        assert word not in "\n".join(lines[at:]).partition("Other tests")[0]


def test_details_hold_everything_else() -> None:
    text = printed(sample_report(recommendation=ADVICE), 100, details=True)
    for word in ("Run-to-run noise", "Control bf16", "excess over the", "Risk: 0.071% of top tokens change"):
        assert word in text


def test_a_verdict_that_more_data_may_change_is_marked_and_explained() -> None:
    judged = Verdict(band="FAIL", at_best="PASS", preliminary=True, sentence="x")
    text = printed(sample_report(candidates=(arm("q4", axes={"kld": kld_axis(0.2, 0.1)}, verdict=judged),)), 80)
    assert " fail? " in text
    assert "q4: inconclusive between pass and fail; preliminary, too few documents" in text


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("width", [40, 80, 100, 160])
@pytest.mark.parametrize(
    "report",
    [
        sample_report(),
        sample_report(candidates=(candidate("q4", 0.000123456, "FAIL", 1234567, HOSTILE, name=LONG),)),
        sample_report(run_id=HOSTILE, candidates=(broken("q4", Status.FAILED, "x" * 300),)),
        sample_report(candidates=(), control=None),
    ],
    ids=["sample", "long", "hostile", "empty"],
)
def test_no_line_exceeds_the_width(report: Report, width: int, details: bool) -> None:
    assert widest(printed(report, width, details=details)) <= width


def test_the_command_of_an_arms_server_is_one_line_and_what_is_in_no_arm_is_said() -> None:
    command = f"vllm serve m --kv-cache-dtype fp8 --x '<a b>' {'--long-option-name value ' * 5}".strip()
    ignored = {"--port 1": "only concerns serving", "--host h": "only concerns serving", "image": "not used"}
    report = sample_report(candidates=(arm("fp8", serve_command=command),), settings={"serve": {"ignored": ignored}})
    text = printed(report, 80, details=True)
    assert f" fp8: {command}" in " ".join(text.replace("\\\n", " ").split())
    said = "Ignored flags of the pasted command: --port 1, --host h (only concerns serving); image (not used)"
    assert said in " ".join(text.split())
    page = render_html(report)
    assert f'<pre id="serve1">{escape(command)}</pre>' in page
    assert said in page
    assert "Commands to serve" not in printed(sample_report(), details=True)


@pytest.mark.parametrize("width", [80, 100])
def test_numbers_are_never_cut(width: int) -> None:
    text = printed(sample_report(), width, details=True)
    assert "…" not in text
    for number in ("0.000712", "0.00057–0.00085", "+0.000682", "99.93%", "0.018%", "92,160", "70.3", "58–82"):
        assert number in text


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("n", [1, 50])
def test_no_table_breaks_a_word_or_a_number_with_one_configuration_or_fifty(n: int, width: int) -> None:
    names = [f"int4[group={8 * i}]" for i in range(1, n + 1)]
    measured = [candidate(name, 0.0005, "PASS", 40_001, "x") for name in names]
    first, whole = (printed(sample_report(candidates=tuple(measured)), width, details=yes) for yes in (False, True))
    assert max(widest(first), widest(whole)) <= width
    for name in names:
        assert re.search(rf"^ +{re.escape(name)} +pass +0\.000500 ", first, re.MULTILINE), name
    words = set(whole.split())
    assert {*names, "configuration", "(0.00040–0.00060)", "(0.010–0.017%)", "40,001"} <= words
    assert not words & {")", "configurati", "referen", "ce"}


def test_a_narrow_terminal_says_what_is_left_out() -> None:
    said = "95% interval, same top token, confident flips and size are left out"
    assert said in " ".join(printed(sample_report(), 40).split())
    assert "left out" not in printed(sample_report(), 80)


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_terminal_is_too_narrow_for_the_kld(width: int) -> None:
    wide = candidate("q4", 0.000123456, "FAIL", 123456789, "x", name=LONG)
    text = printed(sample_report(candidates=(wide,)), width)
    assert "0.000123" in text
    assert widest(text) <= width


def test_figures_that_no_arm_has_get_no_column() -> None:
    text = printed(sample_report(control=None, candidates=(arm("q4", ran=None, axes={"kld": kld_axis(0.02, 0.001)}),)))
    heading = text.partition("verdict")[2].partition("q4")[0]
    assert "flips" in heading
    assert "size" not in heading


def test_an_axis_that_nobody_was_measured_on_has_no_column() -> None:
    lost = Measurement(status=Status.FAILED, reason="time-out")
    axes = {"kld": kld_axis(0.02, 0.001), "rniah": rniah_axis(0.5), "plad": lost}
    text = printed(sample_report(control=None, candidates=(arm("q4", axes=axes),)))
    assert "plad failed: time-out" in text
    assert "plad" not in text.partition("Other tests")[2]


def test_another_axis_says_what_was_lost_beside_what_the_reference_does() -> None:
    axes = {"kld": kld_axis(0.02, 0.001), "rniah": rniah_axis(0.5)}
    text = printed(sample_report(candidates=(arm("q4", axes=axes),)), 80).partition("Other tests")[2]
    assert "lost 8 of 16" in text
    assert "finds 16 of 18" in text
    assert "(50.0, 40–100)" in text
    assert "rniah, 18" in text


def test_what_one_line_has_no_room_for_stands_below_after_the_same_names() -> None:
    axes = {
        f"axis number {n}": Measurement(status=Status.OK, metrics=(Definition("score", "points")(n),))
        for n in range(20)
    }
    text = printed(sample_report(candidates=(arm("q4", axes=axes),), control=None), 60)
    assert widest(text) <= 60
    assert text.partition("Other tests")[2].count("\n q4") > 1
    assert all(f" {n}.0" in text for n in range(20))


def test_failed_items_come_before_the_table() -> None:
    text = printed(sample_report())
    assert text.index("12 of 8,160 items failed") < text.index("verdict")


def test_each_candidate_has_its_sentence() -> None:
    text = printed(sample_report(), details=True)
    assert "k16v8: safe, KLD 0.000712. The top token changes at 0.071% of positions." in text
    assert "q8_0: not running: out of memory: lower the context" in text


def test_a_folder_is_never_broken() -> None:
    folder = Path("runs") / ("x" * 200)
    assert str(folder) in printed(sample_report(), 80, folder)


def test_outside_text_is_not_markup() -> None:
    text = printed(sample_report(candidates=(broken("q4", Status.FAILED, "[bold]see[/bold] [link=x]"),)))
    assert "[bold]see[/bold] [link=x]" in text


def test_colour_in_a_terminal() -> None:
    file = io.StringIO()
    render_text(sample_report(), Console(file=file, width=100, force_terminal=True, color_system="standard"))
    assert "\x1b[" in file.getvalue()


def test_no_color_leaves_no_colour_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    file = io.StringIO()
    render_text(sample_report(), Console(file=file, width=100, force_terminal=True, color_system="standard"))
    assert set(re.findall(r"\x1b\[([0-9;]*)m", file.getvalue())) <= {"1", "0"}  # bold is not a colour


def test_a_terminal_without_unicode_gets_ascii() -> None:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii") as file:
        render_text(sample_report(), Console(file=file, width=100))
        file.flush()
        assert b"0.00057-0.00085" in raw.getvalue()


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("q8_0", ["q8_0"]),
        ("int4[group=32,skip-layers=0,29]", ["int4[group=32,", "skip-layers=0,29]"]),
        ("x" * 20, ["x" * 17, "xxx"]),
    ],
)
def test_long_names_break_at_separators(name: str, lines: list[str]) -> None:
    assert wrap_name(name, 17).split("\n") == lines
