"""What axes find besides the KLD lowers the verdict, and says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fidelab.config.experiment import validate
from fidelab.core import Arm, FormatSpec, KVSpec, Status
from fidelab.engines.base import Engine
from fidelab.inputs.needles import draw_needles
from fidelab.results.engagement import select_runtime_info
from fidelab.results.outcomes import ArmResult
from fidelab.results.store import RunFolder
from fidelab.scoring.pairing import Scorer, _exact_tokens, _is_lossy
from tests.run.harness import Done, axis_of, compare, run_fake


@pytest.fixture(scope="module")
def contradicted(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """``tilt`` moves mass to the lower half of the ids, where all the bytes of the text are: perplexity improves."""
    axes = {"kld": {"windows": 40, "n_ctx": 16}, "perplexity": {"contexts": [16], "windows": 40}}
    candidates = ["tilt[q=0.66]", "tilt[q=0.34]", "tilt[q=0.55]"]
    return run_fake(tmp_path_factory.mktemp("contradicted"), axes, candidates, floor=0.0)


def test_a_better_perplexity_under_a_small_kld_costs_nothing_and_notes_name_the_longest_context(
    contradicted: Done,
) -> None:
    arm = contradicted.arm("tilt[q=0.55]")
    assert (axis_of(arm, "kld").value("mean") or 1) < 0.01
    assert arm["verdict"]["band"] == "EXCELLENT"
    assert arm["verdict"]["notes"][-1] == "Tested up to 16 tokens"


@pytest.mark.parametrize("n_ctx", [16, [16, 32]], ids=["one context", "several"])
def test_a_loss_that_is_mostly_the_controls_is_said_to_be_the_kernels(n_ctx: int | list[int], tmp_path: Path) -> None:
    axes = {"kld": {"windows": 20, "n_ctx": n_ctx}}
    arm = run_fake(tmp_path, axes, ["tilt[q=0.66]"], control="tilt[q=0.64]", floor=0.0).arm("tilt[q=0.66]")
    verdict = " ".join([arm["verdict"]["sentence"], *arm["verdict"]["notes"]])
    assert "Most of the loss comes from the kernel, not the format (control tilt[q=0.64]: KLD 0.0" in verdict


def test_lost_needles_cost_a_band_although_no_distribution_moved(tmp_path: Path) -> None:
    lines = [f"The rare paint color is {needles.codes[0]}." for needles in draw_needles(3, 1, 0, 0)]
    answers = [[line, line.removeprefix("The rare paint color is")] for line in lines]
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    axes = {"kld": {"windows": 40, "n_ctx": 16}, "rniah": {"lengths": [600, 700]}}
    given = {"answers": str(tmp_path / "answers.json")}
    done = run_fake(tmp_path, axes, ["forget[every=1]", "exact"], engine_args=given, floor=0.0)
    forgetful, same = done.arm("forget[every=1]"), done.arm("exact")
    assert axis_of(forgetful, "kld").status == axis_of(same, "kld").status == "identical"
    assert (forgetful["verdict"]["band"], same["verdict"]["band"]) == ("PASS", "EXCELLENT")
    assert any("needle" in fact.lower() or "niah" in fact.lower() for fact in forgetful["verdict"]["because"])


def test_an_axis_that_cannot_be_measured_is_not_in_the_composite(tmp_path: Path) -> None:
    axes = {"kld": {"windows": 40, "n_ctx": 16}, "rniah": {"lengths": [600]}}
    arm = run_fake(tmp_path, axes, ["tilt"], floor=0.0).arm("tilt")
    assert (arm["status"], axis_of(arm, "rniah").status) == ("ok", "not_measurable")
    assert arm["composite"]["value"] == pytest.approx(axis_of(arm, "kld").value("score"))
    assert arm["composite"]["axes"] == ["kld"]


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One window: a mean KL and no interval of it."""
    formats = [f"tilt[q={q}]" for q in (0.51, 0.6, 0.66, 0.02)]  # 0.0002, 0.0204, 0.0541 and 1.27 nats
    return compare(tmp_path_factory.mktemp("short"), *formats, windows=1, flags=("--control", "none", "--details"))


def test_without_an_interval_the_mean_says_what_the_verdict_is_at_best(short: Done) -> None:
    arms = [short.arm(f"tilt[q={q}]") for q in (0.51, 0.6, 0.66, 0.02)]
    assert {axis_of(arm, "kld").ci("mean") for arm in arms} == {None}
    assert [(arm["verdict"]["band"], arm["verdict"]["at_best"]) for arm in arms] == [
        (None, None),
        (None, "PASS"),
        (None, "DEGRADED"),
        ("FAIL", None),
    ]
    assert "KLD 1.27 (no interval, 1 block)" in arms[-1]["verdict"]["sentence"]
    for word in ("at best pass", "at best degraded", "fail"):
        assert word in " ".join(short.out.split())
    assert [(pair["differs"], pair["equivalent"]) for pair in short.report["comparisons"]] == [(False, False)] * 3
    line = next(line for line in short.out.splitlines() if line.startswith("Ranking by KLD"))
    assert not {*"≈<"} & {*line}  # no order is claimed


def test_equal_arms_are_shown_to_be_equal(tmp_path: Path) -> None:
    done = compare(tmp_path, "tilt[q=0.6]", "tilt[q=0.4]", flags=("--control", "none", "--details"))
    [pair] = done.report["comparisons"]  # by symmetry of the closed form both cost 0.0204 nats at every position
    assert (pair["differs"], pair["equivalent"]) == (False, True)
    assert "≈" in done.out


def test_a_format_that_must_cost_something_and_costs_exactly_nothing_is_not_engaged(tmp_path: Path) -> None:
    done = compare(tmp_path, "tilt[q=0.5]", "exact", "fork[at=3,every=2]", flags=["--no-floor"], windows=8, limit=2)
    arm = done.arm("tilt[q=0.5]")  # the reference's own distribution under another name
    assert (arm["status"], arm["verdict"]["band"]) == ("not_engaged", None)
    assert arm["reason"] == (
        "tilt[q=0.5] and exact keep different numbers, but their KL is exactly 0 everywhere: "
        "one of them did not reach attention"
    )
    assert {axis["status"] for axis in arm["axes"].values()} == {"not_engaged"}
    assert (done.arm("exact")["status"], done.arm("fork[at=3,every=2]")["status"]) == ("identical", "ok")


@pytest.mark.parametrize(
    ("kv", "dtype", "lossless"),
    [
        *(("bf16", "bfloat16", True), ("bf16", "float32", False), ("bf16", "float16", False)),
        *(("f32", "bfloat16", True), ("f16", "bfloat16", None), ("f16", "float32", False)),
        *(("auto", "float32", True), ("float16", "float16", True)),
        *(("fp8_e4m3", "bfloat16", False), ("bf16/int8", "bfloat16", False), ("q4_0", "float16", False)),
        *(("nvfp4", "bfloat16", False), ("iq4_nl", "float32", False), ("somebody's", "bfloat16", None)),
    ],
)
def test_a_format_loses_nothing_where_it_has_the_digits_and_the_range_of_the_compute_type(
    kv: str, dtype: str, lossless: bool | None
) -> None:
    formats = [FormatSpec(name) for name in kv.split("/")]
    spec = KVSpec(kv, formats[0], formats[-1])
    assert Engine.lossless(Arm(kv, "any", "m", "/m", "0" * 8, spec, dtype, "cpu", 1)) is lossless


@pytest.mark.parametrize(("changed", "status"), [(0.0, "identical"), (0.3, "not_engaged"), (None, "not_engaged")])
def test_float16_in_a_bfloat16_model_is_identical_where_attention_was_seen_to_get_what_came(
    changed: float | None, status: str, tmp_path: Path
) -> None:
    """Where the definition leaves it open, what the engine saw decides."""
    done = compare(tmp_path, "exact", flags=["--no-floor"], windows=4, limit=1)
    results = [ArmResult.from_record(x, done.folder) for x in RunFolder.open(done.folder).read_outcomes()["arms"]]
    arms = {"reference": ("bf16", None), "candidate:exact": ("f16", changed)}
    made = [
        replace(
            result,
            arm=replace(result.arm, engine="hf", kv=KVSpec.parse(kv), dtype="bfloat16"),
            ran={"k_format": kv, "v_format": kv, "k_changed": seen, "v_changed": seen, "cache_bytes_per_token": None},
        )
        for result in results
        for kv, seen in [arms[result.role]]
    ]
    experiment = validate({"model": "fake", "engine": "fake", "candidates": ["exact"], "axes": {"kld": {}}}, "test")
    scorer = Scorer(experiment, made, {})
    assert scorer.measure(made[1]).status == status


@pytest.mark.parametrize(
    ("shares", "told"), [((0.3, 0.0), 0.3), ((0.0, 0.0), 0.0), ((None, 0.0), 0.0), ((0.2, 0.3), 0.3)]
)
def test_numbers_that_were_changed_in_any_capture_count_as_changed(
    shares: tuple[float | None, ...], told: float
) -> None:
    arm = Arm("f16", "hf", "m", "/m", "0" * 8, KVSpec.parse("f16"), "bfloat16", "cpu", 1)
    rans = [{"k_format": "f16", "v_format": "f16", "k_changed": share, "v_changed": 0.0} for share in shares]
    found = select_runtime_info(arm, rans)
    assert found is not None
    assert found["k_changed"] == told


@pytest.mark.parametrize(
    ("kv", "tokens"),
    [
        ("int4", 2),
        ("int4[group=64]", 2),
        ("bf16/int4[sinks=4]", 6),
        ("int4[sinks=4,tail=64]", 70),
        ("uint4[axis=channel]", 34),
        ("uint4[axis=channel,group=64,tail=32]", 98),
    ],
)
def test_rows_count_from_the_token_on_behind_which_a_format_leaves_none_as_it_is(kv: str, tokens: int) -> None:
    arm = Arm("x", "hf", "m", "/m", "0" * 8, KVSpec.parse(kv), "bfloat16", "cpu", 1)
    assert _exact_tokens(ArmResult("candidate:x", arm, Status.OK)) == tokens


@pytest.mark.parametrize(
    ("kv", "changed", "much"),
    [("int4", 0.9, True), ("int4", None, True), ("int4", 0.001, False), ("bf16", 0.0, False), ("f16", 0.9, False)],
)
def test_equal_rows_are_evidence_where_a_format_that_loses_changes_a_hundredth_of_the_numbers(
    kv: str, changed: float | None, much: bool
) -> None:
    arm = Arm("x", "hf", "m", "/m", "0" * 8, KVSpec.parse(kv), "bfloat16", "cpu", 1)
    ran = {} if changed is None else {"k_changed": changed, "v_changed": changed}
    assert _is_lossy(ArmResult("candidate:x", arm, Status.OK, ran=ran)) is much
