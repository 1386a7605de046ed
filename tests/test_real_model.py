"""The main job on a real language model: what a user is promised, seen happen."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fidelab.core import Status
from fidelab.models import Model
from fidelab.results.record import ArmRecord, Report
from fidelab.results.store import RunFolder
from fidelab.run.api import compare
from fidelab.run.pipeline import rescore
from tests.present import present

pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.processes]

KV_HEADS, HEAD_DIM, LAYERS = 3, 64, 30
AXES: dict[str, dict[str, Any]] = {
    "kld": {"windows": 6, "n_ctx": 512},
    "trajectory": {"limit": 3, "n_predict": 12},
    "perplexity": {"contexts": [256], "windows": 8},
}


@dataclass(frozen=True)
class Run:
    """A finished run on the embedded model."""

    report: Report
    folder: RunFolder
    captures: Path

    def arm(self, name: str) -> ArmRecord:
        """A candidate by name."""
        return next(arm for arm in self.report.candidates if arm.name == name)

    def kld(self, name: str) -> float:
        """Mean KL of a candidate, nats."""
        return present(self.arm(name).axes["kld"].value("mean"))


@pytest.fixture(scope="module")
def run(smollm2: Model, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """f32 against itself and five formats: 6 windows `half`, 3 prompts."""
    output = tmp_path_factory.mktemp("runs")
    report = compare(
        "smollm2-135m",
        reference="f32",
        candidates=["f32", "k16v8", "fp8_e4m3", "q8_0", "int4"],
        axes=AXES,
        dtype="float32",
        output_dir=str(output),
    )
    folder = RunFolder.open(output / report.run_id)
    return Run(report, folder, output / "captures")


def test_the_reference_format_as_candidate_is_identical_from_two_captures(run: Run) -> None:
    arm = run.arm("f32")
    assert arm.status is Status.IDENTICAL
    kld, trajectory = arm.axes["kld"], arm.axes["trajectory"]
    assert (kld.value("mean"), kld.value("max"), trajectory.value("score")) == (0.0, 0.0, 100.0)
    outcomes = {record["role"]: record for record in run.folder.read_outcomes()["arms"]}
    first, second = outcomes["reference"]["captures"], outcomes["candidate:f32"]["captures"]
    assert set(first.values()).isdisjoint(second.values())


def test_coarser_formats_cost_more_by_paired_differences(run: Run) -> None:
    order = [run.report.comparisons[0].better, *(c.worse for c in run.report.comparisons)]
    assert order.index("q8_0") < order.index("fp8_e4m3") < order.index("int4")
    assert order.index("k16v8") < order.index("fp8_e4m3")
    assert all(c.differs for c in run.report.comparisons if c.worse in ("fp8_e4m3", "int4"))


@pytest.mark.parametrize(("name", "seen"), [("q8_0", 0.0003), ("k16v8", 0.0007), ("fp8_e4m3", 0.0065), ("int4", 0.109)])
def test_mean_kl_is_of_the_size_seen_elsewhere(run: Run, name: str, seen: float) -> None:
    assert seen / 2 < run.kld(name) < seen * 2


def test_the_reference_reads_the_package_own_text_as_plain_prose(run: Run) -> None:
    value = present(run.arm("f32").axes["perplexity"].value("reference_ppl"))
    assert 15 < value < 120  # news to it, yet prose: random words have tens of thousands, repetition about 1


def test_int4_reads_worse_than_k16v8(run: Run) -> None:
    worse, better = (run.arm(name).axes["perplexity"].ci("ln_ratio") for name in ("int4", "k16v8"))
    assert present(better)[1] < present(worse)[0]


def test_the_16_bit_control_costs_next_to_nothing(run: Run) -> None:
    assert run.report.control is not None
    mean = present(run.report.control.axes["kld"].value("mean"))
    assert 0 < mean < 1e-4


def test_the_floor_of_a_deterministic_engine_is_zero(run: Run) -> None:
    floor = run.report.floor
    assert (floor["kld"].value("max"), floor["trajectory"].value("score")) == (0.0, 100.0)


@pytest.mark.parametrize(
    ("name", "bytes_per_pair"),
    [("f32", 8 * 64), ("k16v8", 3 * 64), ("fp8_e4m3", 2 * 64), ("q8_0", 4 * 34), ("int4", 2 * (32 + 4))],
)
def test_the_cache_holds_what_the_format_says(run: Run, name: str, bytes_per_pair: int) -> None:
    ran = present(run.arm(name).ran)
    assert ran.cache_bytes_per_token == LAYERS * KV_HEADS * bytes_per_pair


def test_verdicts_follow_the_upper_bound(run: Run) -> None:
    bands = {arm.name: arm.verdict.band for arm in run.report.candidates if arm.verdict}
    assert bands["q8_0"] == bands["k16v8"] == bands["fp8_e4m3"] == "EXCELLENT"
    int4 = present(run.arm("int4").verdict)
    assert (int4.band or int4.at_worst) in ("DEGRADED", "FAIL")  # six windows may not tell which


def test_sentinel_windows_replay_the_live_logits(run: Run) -> None:
    manifests = list(run.captures.glob("*-hf-f32-*/kld-*-r0/manifest.json"))
    assert len(manifests) == 2  # the reference, and the twin of the candidate that is like it
    for manifest in manifests:
        facts = json.loads(manifest.read_text())["facts"]
        assert facts["sentinel_cosine"] >= 0.9999
        assert facts["sentinel_kl"] <= 1e-8


@pytest.mark.parametrize(("name", "low", "high"), [("f32", 0, 1e-8), ("q8_0", 3e-5, 5e-4), ("int4", 0.02, 0.08)])
def test_last_bits_move_a_coarse_cache_and_leave_an_exact_one(run: Run, name: str, low: float, high: float) -> None:
    floor = present(run.arm(name).floor)
    assert floor.mean is not None
    assert low <= floor.mean <= high
    assert floor.n_positions == 2 * 255  # a quarter of six windows


def test_rescoring_gives_the_same_report(run: Run) -> None:
    before = run.folder.report.read_bytes()
    report, _ = rescore(run.folder.path)
    assert report.to_json().encode() == before


def test_positions_hold_every_scored_row_of_every_arm(run: Run) -> None:
    table = pq.read_table(run.folder.positions).to_pandas()
    assert (table.groupby("arm", observed=True).size() == 6 * 255).all()
    means = table.groupby("arm", observed=True)["kl"].mean()
    assert means["int4"] == pytest.approx(run.kld("int4"), rel=1e-12)


def test_the_next_run_finds_the_reference_again(run: Run) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.captures.rglob("manifest.json")}
    settings: dict[str, Any] = {"axes": AXES, "dtype": "float32", "output_dir": str(run.captures.parent)}
    again = compare("smollm2-135m", reference="f32", candidates=["q8_0"], **settings)
    assert {path: path.stat().st_mtime_ns for path in run.captures.rglob("manifest.json")} == before
    assert again.candidates[0].axes["kld"].value("mean") == run.kld("q8_0")
