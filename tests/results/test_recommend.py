"""The recommendation follows from the record: limits, certificates, arms that others beat."""

from __future__ import annotations

import pytest

from fidelab.core import KVSpec, Status
from fidelab.results.decision_record import Certificate, CertificateClaim, CertificateState, Dominance
from fidelab.results.recommend import recommend
from fidelab.results.record import ArmRecord, Report, RuntimeRecord, Verdict
from tests.report.sample import kld_axis
from tests.report.sample import sample_report as whole_report


def arm(name: str, size: float, mean: float, state: CertificateState = "holds") -> ArmRecord:
    claim = CertificateClaim(
        name="accuracy loss",
        unit="share",
        margin=0.01,
        estimate=0.001,
        ci=(-0.002, 0.004 if state == "holds" else 0.03),
        state=state,
        detectable=0.005 if state == "holds" else 0.04,
        clusters=8,
        clusters_needed=40,
    )
    return ArmRecord(
        status=Status.OK,
        name=name,
        engine="vllm",
        model="m",
        kv=KVSpec.parse(name),
        serve_command=f"vllm serve m --kv-cache-dtype {name}",
        ran=RuntimeRecord(k_dtype=name, v_dtype=name, cache_bytes_per_token=size),
        axes={"kld": kld_axis(mean, mean / 10)},
        verdict=Verdict(band="EXCELLENT" if mean < 0.009 else "PASS" if mean < 0.045 else "FAIL", sentence="s"),
        certificates={"kld": Certificate(state=state, level=0.05, claims=(claim,))},
    )


def report(*arms: ArmRecord) -> Report:
    reference = arm("bf16", 1000, 0.0).model_copy(update={"axes": {}, "verdict": None, "certificates": {}})
    return whole_report().model_copy(
        update={
            "reference": reference,
            "control": None,
            "controls": (),
            "candidates": arms,
            "comparisons": (),
            "attribution": (),
        }
    )


BIG, SMALL, TINY = arm("big", 750, 0.0005), arm("small", 500, 0.0008), arm("tiny", 250, 0.02, "underpowered")


def test_without_limits_it_is_the_smallest_arm_whose_certificate_holds() -> None:
    found = recommend(report(BIG, SMALL, TINY))
    assert found is not None
    assert (found.arm, found.basis, found.saving) == ("small", "certificate", 0.5)
    assert found.command == "vllm serve m --kv-cache-dtype small"
    assert found.more == "to decide with probability 0.8: tiny about 40 clusters instead of 8 (accuracy loss)"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_kld": 0.05}, "tiny"),
        ({"max_kld": 0.001}, "small"),
        ({"max_kld": 0.0006}, "big"),
        ({"max_kld": 0.0001}, None),
        ({"max_flips": 0.002}, "small"),
        ({"min_saving": 0.6}, None),
        ({"max_kld": 0.05, "min_saving": 0.6}, "tiny"),
    ],
)
def test_limits_choose_the_smallest_arm_that_meets_them(limits: dict[str, float], expected: str | None) -> None:
    found = recommend(report(BIG, SMALL, TINY), **limits)
    assert found is not None
    assert found.arm == expected
    assert set(found.limits) == set(limits)


def test_an_emulated_format_is_ranked_by_what_it_would_take_packed() -> None:
    ran = RuntimeRecord.model_validate(
        {"cache_bytes_per_token": 1000.0, "emulated": True, "packed_bytes_per_token": 400.0}
    )
    int3 = SMALL.model_copy(update={"name": "int3", "ran": ran})
    assert (found := recommend(report(BIG, int3, SMALL))) is not None
    assert (found.arm, found.saving) == ("int3", 0.6)
    assert any("no engine stores it" in risk for risk in found.risks)


def test_nothing_is_recommended_where_the_data_cannot_tell_and_it_says_so() -> None:
    found = recommend(report(TINY))
    assert found is not None
    assert found.arm is None
    assert found.command is None
    assert found.text == "no candidate is certified; of tiny the data cannot tell"
    assert "40 clusters instead of 8" in found.more


def test_an_arm_that_another_one_beats_is_said_so_and_a_tie_is_a_tie() -> None:
    worse, tied = (
        BIG.model_copy(
            update={
                "name": name,
                "dominated": Dominance(by="small", difference=0.0002, ci=(low, 3e-4), differs=differs),
            }
        )
        for name, low, differs in (("worse", 1e-4, True), ("tied", -1e-4, False))
    )
    found = recommend(report(worse, tied, SMALL))
    assert found is not None
    assert found.arm == "small"
    assert [line.partition(" here")[0] for line in found.others] == [
        "worse: larger and worse than small",
        "tied: larger and tied in KLD with small",
    ]


def test_a_verdict_that_other_axes_lowered_is_not_recommended() -> None:
    verdict = Verdict(band="PASS", by_kld=False, sentence="s", because=("lost 9 of 36",))
    lowered = SMALL.model_copy(update={"verdict": verdict})
    found = recommend(report(BIG, lowered))
    assert found is not None
    assert found.arm == "big"
    assert "small: verdict PASS: lost 9 of 36" in found.others


@pytest.mark.parametrize("limit", [{"max_kld": 0.2}, {"max_flips": 0.5}])
def test_a_limit_goes_over_the_klds_band_and_over_no_failed_position_or_garbage(limit: dict[str, float]) -> None:
    assert TINY.verdict is not None
    assert (by_kld := recommend(report(TINY), **limit)) is not None
    assert by_kld.arm == "tiny"
    for band in ("FAIL", "DEGRADED", "PASS"):
        broken = TINY.verdict.model_copy(
            update={"band": band, "by_kld": False, "because": ("3 of 9 positions failed",)}
        )
        assert (found := recommend(report(TINY.model_copy(update={"verdict": broken})), **limit)) is not None
        assert found.arm is None
        assert f"tiny: verdict {band}: 3 of 9 positions failed" in found.others


def test_reports_without_certificates_get_an_answer_to_limits() -> None:
    old = SMALL.model_copy(update={"certificates": {}})
    assert (found := recommend(report(old), max_kld=0.01)) is not None
    assert found.arm == "small"
    assert (nothing := recommend(report(old))) is not None
    assert nothing.arm is None
