"""``fidelab bench speculation`` on reports made by hand: four arms, one ratio, and what makes it none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fidelab.bench.base import CellResult, joined
from fidelab.bench.decode import ISOLATED, Decode
from fidelab.bench.load_figures import OUTPUT_RATE, load_at, load_metrics, serving_measurement
from fidelab.core import KVSpec, Status
from fidelab.results.measurement import Cell, Coordinates, Flag, Measurement
from fidelab.results.record import ArmRecord, Report
from fidelab.results.study import Study, StudyRow
from tests.run.harness import Done, cli, refused

RATES: Mapping[str, float] = {"plain": 40.0, "quantized": 50.0, "speculative": 80.0, "both": 90.0}
ARMS = tuple(RATES)
SPECULATED = {"drafted": 300, "accepted": 120, "drafts": 100, "acceptance_length": 2.2}


def said(kind: str, speculation: Mapping[str, float] | None = None) -> dict[str, Any]:
    """What a server tells of itself."""
    return {"kind": kind, "speculation": speculation}


def cell(
    rates: Sequence[float],
    server: Mapping[str, Any] | None,
    context: int = 256,
    output: int = 16,
    concurrency: int = 2,
    **changes: Any,
) -> CellResult:
    at = load_at("closed", context, output, concurrency)
    repeats = {OUTPUT_RATE.key: rates} if len(rates) > 1 else {}
    found = Cell(**{"status": Status.OK, "at": at, "facts": {"server": server}, **changes})
    return CellResult(found, load_metrics(at, {OUTPUT_RATE: rates[0] if rates else None}, repeats=repeats))


def arm(*cells: CellResult, name: str = "served") -> ArmRecord:
    return armed({"serving": serving_measurement(cells, {"target": "http://127.0.0.1:1", "model": "m"})}, name)


def armed(benches: dict[str, Measurement], name: str = "served") -> ArmRecord:
    kv = KVSpec.parse("server")
    return ArmRecord(status=Status.OK, name=name, engine="openai", model="m", kv=kv, benches=benches)


def write(folder: Path, first: ArmRecord, *others: ArmRecord, **protocol: object) -> Path:
    report = Report(
        run_id=folder.name,
        created=datetime(2026, 1, 1, tzinfo=UTC),
        fidelab_version="0",
        command="fidelab bench serve",
        comparability_key={"benches.serving": {"endpoint": "completions", **protocol}},
        reference=first,
        candidates=others,
    )
    folder.mkdir()
    report.write(folder / "report.json")
    return folder


def standard(name: str, *, repeats: int = 1, factor: float = 1.0, **changes: Any) -> CellResult:
    """A cell of one of the four arms, with the server's evidence that it speculated where it should."""
    rates = [factor * RATES[name] * (1 + 0.002 * i) for i in range(repeats)]
    server = said("vllm", SPECULATED if name in ("speculative", "both") else None)
    return cell(changes.pop("rates", rates), changes.pop("server", server), **changes)


def four(root: Path, **cells: Sequence[CellResult]) -> list[object]:
    """Four run folders, and the words that name them."""
    folders = {name: write(root / name, arm(*cells.get(name, [standard(name)]))) for name in ARMS}
    return [word for name, folder in folders.items() for word in (f"--{name}", folder)]


def run(root: Path, *words: object) -> Done:
    return cli("bench", "speculation", *words, cwd=root)


def study(root: Path, *words: object, code: int = 0) -> Study:
    done = run(root, *words, "--json")
    assert done.code == code, done.err
    return Study.model_validate_json(done.out)


def ratios(root: Path, *words: object, code: int = 0) -> list[StudyRow]:
    """The row of each load that has the ratio."""
    return [row for row in study(root, *words, code=code).rows if row.at["part"] == "together"]


def values(found: Study, key: str) -> dict[str, float]:
    """Arm → one of its metrics."""
    rows = {str(row.at["arm"]): row.value(key) for row in found.rows if row.at["part"] == "arm"}
    return {name: value for name, value in rows.items() if value is not None}


def test_four_runs_give_the_ratio(tmp_path: Path) -> None:
    found = study(tmp_path, *four(tmp_path))
    ratio = found.rows[-1]
    assert ratio.value("rho") == pytest.approx(90 * 40 / (50 * 80))
    assert (ratio.facts["together"], ratio.ci("rho")) == ("cannot tell", None)
    assert [flag.kind for flag in ratio.flags] == ["noise"]  # measured once
    assert values(found, "rate") == pytest.approx(RATES)
    assert values(found, "acceptance_length") == {"speculative": 2.2, "both": 2.2}
    assert values(found, "speedup") == pytest.approx({"quantized": 1.25, "speculative": 2.0, "both": 2.25})
    assert [ratio.at[name] for name in ("context", "output", "concurrency")] == [256, 16, 2]


def test_repeats_give_an_interval(tmp_path: Path) -> None:
    (found,) = ratios(tmp_path, *four(tmp_path, **{name: [standard(name, repeats=3)] for name in ARMS}))
    low, high = found.ci("rho") or (0.0, 0.0)
    assert found.value("rho") == pytest.approx(0.9)
    assert 0.85 < low < 0.9 < high < 0.95
    assert found.facts["together"] == "cannot tell"
    assert found.flags == ()


def test_each_shared_cell_has_a_ratio_of_its_own(tmp_path: Path) -> None:
    cells = {name: [standard(name), standard(name, concurrency=4, repeats=3)] for name in ARMS}
    cells["both"] = [standard("both", concurrency=4, factor=0.5, repeats=3), standard("both")]
    one, two = ratios(tmp_path, *four(tmp_path, **cells))
    assert [row.at["concurrency"] for row in (one, two)] == [2, 4]
    assert [row.value("rho") for row in (one, two)] == pytest.approx([0.9, 0.45])
    assert two.facts["together"] == "sub-multiplicative"


def test_the_table_has_the_rates_the_ratio_and_where_they_are_from(tmp_path: Path) -> None:
    done = run(tmp_path, *four(tmp_path))
    assert (done.code, done.err) == (0, "")
    for word in ("40.0", "50.0", "80.0", "90.0", "1.25", "2.00", "2.25", "0.900", "2.20", "cannot tell"):
        assert word in done.out
    for name in ARMS:
        assert f"{name}: {tmp_path / name}" in done.out.replace("\n", "")


def test_arms_of_one_report_are_named_behind_a_colon(tmp_path: Path) -> None:
    arms = [arm(standard(name), name=f"{name}[kv:8]") for name in ARMS]
    folder = write(tmp_path / "all", *arms)
    words = [word for name in ARMS for word in (f"--{name}", f"{folder / 'report.json'}:{name}[kv:8]")]
    assert ratios(tmp_path, *words)[0].value("rho") == pytest.approx(0.9)
    words = [word for name in ARMS for word in (f"--{name}", f"{folder}:{name}[kv:8]")]
    assert ratios(tmp_path, *words)[0].value("rho") == pytest.approx(0.9)
    assert (
        "several configurations (plain[kv:8], quantized[kv:8], speculative[kv:8], both[kv:8]); "
        f"add one as {folder}:plain" in refused(run(tmp_path, *words[:-1], folder))
    )


@pytest.mark.parametrize(
    ("name", "server", "why"),
    [
        ("speculative", None, "no server reported its counters, so nothing shows that it speculated"),
        ("both", said("vllm"), "its server has no speculation counters, so nothing shows that it speculated"),
        (
            "speculative",
            said("vllm", {"drafted": 50, "accepted": 0}),
            "it did not speculate: 50 draft tokens, none accepted",
        ),
        ("plain", None, "no server reported its counters, so nothing shows that it did not speculate"),
        (
            "quantized",
            said("llama.cpp"),
            "its server has no speculation counters, so nothing shows that it did not speculate",
        ),
        ("plain", said("vllm", SPECULATED), "it was to run without speculation and speculated: 300 draft tokens"),
    ],
)
def test_without_evidence_there_is_no_ratio(
    tmp_path: Path, name: str, server: Mapping[str, Any] | None, why: str
) -> None:
    words = four(tmp_path, **{name: [standard(name, server=server)]})
    (found,) = ratios(tmp_path, *words, code=3)
    assert (found.metrics, found.facts["together"], found.status) == ((), "cannot tell", "not_measurable")
    assert found.flags == (Flag(kind="not-engaged", text=f"{name}: {why}"),)
    done = run(tmp_path, *words)
    assert done.code == 3
    assert "fidelab: 1 of 1 cells have no ratio" in done.err
    assert "0.900" not in done.out
    assert f"not measurable: {name}: {why}" in " ".join(done.out.split())


def test_counters_that_stand_still_show_that_an_arm_did_not_speculate(tmp_path: Path) -> None:
    server = said("sglang", {"drafted": 0, "accepted": 0})
    (found,) = ratios(tmp_path, *four(tmp_path, plain=[standard("plain", server=server)]))
    assert found.value("rho") == pytest.approx(0.9)


def test_a_cell_without_a_ratio_leaves_the_others_theirs(tmp_path: Path) -> None:
    cells = {name: [standard(name), standard(name, concurrency=4)] for name in ARMS}
    cells["both"][1] = standard("both", concurrency=4, server=None)
    one, two = ratios(tmp_path, *four(tmp_path, **cells), code=3)
    assert [row.value("rho") is None for row in (one, two)] == [False, True]


def test_an_invalid_cell_gives_no_ratio_and_says_why(tmp_path: Path) -> None:
    flag = Flag(kind="depth", text="the server counted other lengths")
    words = four(tmp_path, quantized=[standard("quantized", valid=False, flags=(flag,))])
    (found,) = ratios(tmp_path, *words, code=3)
    assert found.value("rho") is None
    assert found.flags == (Flag(kind="depth", text="quantized: the server counted other lengths"),)


def test_a_failed_cell_says_its_reason(tmp_path: Path) -> None:
    failed = standard("both", status=Status.FAILED, reason="all requests timed out", rates=())
    found = study(tmp_path, *four(tmp_path, both=[failed]), code=3)
    assert "both" not in values(found, "rate")
    assert found.rows[-1].flags == (Flag(kind="errors", text="both: all requests timed out"),)


def test_what_makes_a_valid_figure_doubtful_is_carried_on(tmp_path: Path) -> None:
    flag = Flag(kind="lag", text="the client was late")
    (found,) = ratios(tmp_path, *four(tmp_path, both=[standard("both", flags=(flag,))]))
    assert Flag(kind="lag", text="both: the client was late") in found.flags


def test_decode_benches_have_rates_and_no_evidence(tmp_path: Path) -> None:
    words: list[object] = []
    for name, rate in RATES.items():
        at: Coordinates = {"depth": 512, "batch": 4}
        speed = CellResult(Cell(status=Status.OK, at=at, facts={"n": 32}), (ISOLATED.repeated((rate, rate), cell=at),))
        words += [f"--{name}", write(tmp_path / name, armed({"decode": joined([speed], Decode.title)}))]
    found = study(tmp_path, *words, code=3)
    ratio = found.rows[-1]
    assert values(found, "rate") == pytest.approx(RATES)
    assert ratio.at == {"depth": 512, "output": 32, "batch": 4, "part": "together"}
    assert {flag.kind for flag in ratio.flags} == {"not-engaged"}


@pytest.mark.parametrize(
    ("cells", "line"),
    [
        ([standard("both", context=512)], ("both (", "context 256, output 16", "as plain has")),
        ([standard("both"), standard("both", output=32)], ("plain (", "context 256, output 32", "as both has")),
    ],
)
def test_arms_that_were_not_measured_alike_are_refused_by_name(
    cells: list[CellResult], line: tuple[str, str, str], tmp_path: Path
) -> None:
    said = refused(run(tmp_path, *four(tmp_path, both=cells)))
    arm, at, other = line
    assert arm in said
    assert f"has no cell with {at}, arrival closed, concurrency 2, {other}" in said


def test_arms_measured_by_another_protocol_are_refused(tmp_path: Path) -> None:
    words = four(tmp_path)
    other = write(tmp_path / "other", arm(standard("both")), endpoint="chat")
    assert (
        "plain was measured with endpoint completions, both with chat: measure all four with the same settings"
        in refused(run(tmp_path, *words[:-1], other))
    )


def test_a_quantized_models_own_tokenizer_is_not_another_protocol(tmp_path: Path) -> None:
    words = four(tmp_path)
    other = write(tmp_path / "other", arm(standard("both")), tokenizer="m-awq", goodput={"ttft": 5})
    assert ratios(tmp_path, *words[:-1], other)[0].value("rho") == pytest.approx(0.9)


def test_the_same_arm_twice_is_refused(tmp_path: Path) -> None:
    words = four(tmp_path)
    assert "--speculative and --both are the same configuration" in refused(run(tmp_path, *words[:-1], words[-3]))


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("nowhere", "--both nowhere: there is no report; name a run's folder or its report.json"),
        ("empty", "--both empty: there is no report"),
        ("bare", "--both bare: no configuration has the benches serving or decode"),
        ("plain:q8", "--both plain:q8: no configuration 'q8' with benches; available: served"),
        ("cellless", "--both cellless: served has no cells: the server was not there"),
    ],
)
def test_bad_runs_are_one_line(tmp_path: Path, where: str, why: str) -> None:
    words = four(tmp_path)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "bare", armed({}))
    failed = Measurement(status=Status.FAILED, reason="the server was not there")
    write(tmp_path / "cellless", armed({"serving": failed}))
    assert why in refused(run(tmp_path, *words[:-1], where))
