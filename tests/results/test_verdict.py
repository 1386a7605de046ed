"""The verdict on an arm by its record, and the sentence that says what to do, in every case."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from fidelab.core import KVSpec, Status
from fidelab.results.measurement import Definition, Measurement
from fidelab.results.record import ArmRecord, NoiseFloor, Report, RuntimeRecord, Verdict
from fidelab.results.verdict import is_native, judge, judged

MEAN, TOP1 = Definition("mean", "nats", "lower"), Definition("top1", "share", "higher")
FLIPS, CUT = Definition("confident_flips", "share", "lower"), Definition("cut", "share")
COARSE = (0.712, (0.356, 0.8))
SHOWN = RuntimeRecord.model_validate({"proof": dict.fromkeys(("received", "stored", "named"), "shown")})


def record(
    kv: str = "fp8_e4m3",
    kld: float | None = None,
    ci: tuple[float, float] | None = None,
    *,
    topk: bool = False,
    n_failed: int = 0,
    clusters: tuple[int | None, str] = (None, ""),
    lost: tuple[str, ...] = (),
    shares: dict[Definition, float] | None = None,
    floor: float | None = None,
    **fields: Any,
) -> ArmRecord:
    """An arm with a KLD over 8,160 positions; ``lost``: what another axis says it loses."""
    measured = Measurement(
        status=Status.OK,
        metrics=(
            *([] if kld is None else [MEAN(kld, ci, bound=topk)]),
            *(definition(value) for definition, value in (shares or {}).items()),
        ),
        n_items=8160,
        n_failed=n_failed,
        n_clusters=clusters[0],
        cluster=clusters[1],
        facts={"estimator": "topk" if topk else "hidden"},
    )
    axes = {"kld": measured, "rniah": Measurement(status=Status.OK, downgrades=lost)}
    given = {"name": kv, "engine": "hf", "model": "m", "status": Status.OK, "wider_keys": "k16v8", "axes": axes}
    floors = {"floor": NoiseFloor(of=kv, mean=floor)} if floor is not None else {}
    return ArmRecord(**{**given, "kv": KVSpec.parse(kv), **floors, **fields})


def verdict(arm: ArmRecord, *others: ArmRecord, n_ctx: int | None = None, state: int = 0) -> Verdict:
    """Of the first candidate of a run; ``state``: bytes of the recurrent state per sequence, with one per token."""
    ran = {"cache_bytes_per_token": 1, **({"state_bytes_per_sequence": state} if state else {})}
    report = Report(
        run_id="run",
        created=datetime(2026, 1, 1, tzinfo=UTC),
        fidelab_version="0",
        command="fidelab",
        settings={"axes": {"kld": {"n_ctx": n_ctx}}},
        reference=record("bf16", ran=RuntimeRecord.model_validate(ran)),
        control=next((other for other in others if other.name == arm.control), None),
        candidates=(arm, *(other for other in others if other.name != arm.control)),
    )
    found = judged(report).candidates[0].verdict
    assert found is not None
    return found


CASES: list[tuple[ArmRecord, dict[str, Any], str]] = [
    (record(status=Status.FAILED, reason="out of\nmemory"), {}, "not running: out of memory"),
    (record(status=Status.NOT_SUPPORTED, reason="hf has: bf16"), {}, "not supported: hf has: bf16"),
    (record(status=Status.NOT_ENGAGED, reason="the cache holds bf16"), {}, "format not applied: the cache holds bf16"),
    (
        record(status=Status.NOT_ENGAGED, reason="K is bfloat16", forced=True),
        {},
        "do not use, something else ran: K is bfloat16",
    ),
    (
        record(status=Status.IDENTICAL, kld=0.0, ci=(0.0, 0.0), ran=SHOWN),
        {},
        "safe, the format ran and its output is identical to the reference's",
    ),
    (
        record(status=Status.IDENTICAL, kld=0.0, ci=(0.0, 0.0), ran=SHOWN),
        {"n_ctx": 2048, "state": 19738},
        "safe, the format ran and its output is identical to the reference's. Keys and values are 9% of what a "
        "sequence of 2,048 tokens keeps in this model, the rest is recurrent state.",
    ),
    (
        record(status=Status.IDENTICAL, kld=0.0, ci=(0.0, 0.0), ran=SHOWN),
        {"n_ctx": 2048, "state": 2048},
        "safe, the format ran and its output is identical to the reference's. Tested up to 2,048 tokens.",
    ),
    (record(), {}, "no verdict: full-vocabulary KLD was not measured"),
    (record(reason="KLD failed: time-out"), {}, "no verdict: KLD failed: time-out"),
    (record(kld=0.002, topk=True), {}, "no verdict: only a lower bound could be measured (KLD ≥ 0.00200)"),
    (record(kld=0.02, topk=True), {}, "no verdict, at best PASS: only a lower bound could be measured (KLD ≥ 0.0200)"),
    (record(kld=0.512, topk=True), {}, "do not use, KLD at least 0.512. Try k16v8."),
    (
        record(kld=0.07),
        {"n_ctx": 512},
        "no verdict, at best DEGRADED: too little text for an interval (KLD 0.0700), use more windows",
    ),
    (
        record("bf16/fp8_e4m3", 3.47, shares={TOP1: 0.087, FLIPS: 0.84}),
        {"n_ctx": 512},
        "do not use, KLD 3.47 (no interval). Quantizing the values causes the loss, try wider values.",
    ),
    (
        record("int4", *COARSE, floor=0.0451, wider_keys=None),  # an engine with one format for keys and values
        {},
        "do not use, KLD 0.712 (0.36–0.80). Try a wider format.",
    ),
    (
        record(kld=0.00552, ci=(0.005, 0.0061), shares={TOP1: 18 / 19, FLIPS: 1 / 60}),
        {"n_ctx": 2048},
        "safe, KLD 0.00552 (0.0050–0.0061). The top token changes at 5.26% of positions, 1.67% beyond a near tie.",
    ),
    (
        record(kld=1e-9, ci=(0.0, 2e-9), shares={TOP1: 1.0, FLIPS: 0.0}),
        {},
        "safe, KLD below 0.0001 (below 0.0001). No top token changes.",
    ),
    (
        record(kld=0.02, ci=(0.015, 0.025), shares={TOP1: 0.8, FLIPS: 0.0}),
        {},
        "safe, KLD 0.0200 (0.015–0.025). The top token changes at 20.0% of positions, only at near ties.",
    ),
    (record("int4", *COARSE), {}, "do not use, KLD 0.712 (0.36–0.80). Try k16v8."),
    (record(kld=0.07, ci=(0.06, 0.09)), {}, "use with care, KLD 0.0700 (0.060–0.090). Try k16v8."),
    (
        record("int4/bf16", *COARSE),
        {},
        "do not use, KLD 0.712 (0.36–0.80). Quantizing the keys causes the loss, try k16v8.",
    ),
    (record("q4_0", *COARSE, wider_keys="f16/q8_0"), {}, "do not use, KLD 0.712 (0.36–0.80). Try f16/q8_0."),
    (
        record("bf16/int2", 0.4, (0.2, 0.5)),
        {},
        "do not use, KLD 0.400 (0.20–0.50). Quantizing the values causes the loss, try wider values.",
    ),
    (record("bf16/f16", 0.06, (0.055, 0.07)), {}, "use with care, KLD 0.0600 (0.055–0.070)"),
    (
        record(kld=0.001, ci=(0.0005, 0.002), n_failed=12),
        {},
        "use with care, 12 of 8,160 positions returned NaN or infinity. KLD 0.00100 (0.00050–0.0020).",
    ),
    (record(n_failed=8160), {}, "do not use, 8,160 of 8,160 positions returned NaN or infinity"),
    (
        record(kld=0.001, ci=(0.0005, 0.002), lost=("needles lost: 40 points",)),
        {},
        "use with care, needles lost: 40 points. KLD 0.00100 (0.00050–0.0020).",
    ),
    (
        record(kld=0.04, ci=(0.02, 0.045), lost=("R-NIAH is 12 points lower",)),
        {},
        "use with care, R-NIAH is 12 points lower. KLD 0.0400 (0.020–0.045).",
    ),
]


@pytest.mark.parametrize(("arm", "run", "said"), CASES)
def test_the_sentence_says_what_to_do(arm: ArmRecord, run: dict[str, Any], said: str) -> None:
    assert verdict(arm, **run).sentence == said


@pytest.mark.parametrize(
    ("kld", "ci", "control", "said"),
    [
        (0.0312, (0.0156, 0.04), 0.0156, "safe, KLD 0.0312 (0.016–0.040)"),
        (
            0.0312,
            (0.0156, 0.04),
            0.016,
            "safe, KLD 0.0312 (0.016–0.040). Most of the loss comes from the kernel, not the format (control ctl: KLD "
            "0.0160).",
        ),
        (
            *COARSE,
            0.5,
            "do not use, KLD 0.712 (0.36–0.80). Most of the loss comes from the kernel, not the format (control ctl: "
            "KLD 0.500), try another attention backend.",
        ),
    ],
)
def test_a_cost_that_is_mostly_the_controls_is_blamed_on_the_kernel(
    kld: float, ci: tuple[float, float], control: float, said: str
) -> None:
    assert verdict(record("int4", kld, ci, control="ctl"), record("bf16", control, name="ctl")).sentence == said


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            record("bf16/int4", 0.02, (0.015, 0.025)),
            "do not use, KLD 0.712 (0.36–0.80). Quantizing the keys causes the loss, try bf16/int4 (KLD 0.0200).",
        ),
        (
            record("bf16/int4", 0.3, (0.25, 0.4)),
            "do not use, KLD 0.712 (0.36–0.80). Native keys alone do not fix it (bf16/int4: KLD 0.300), try wider "
            "values too.",
        ),
        (record("bf16/int8", 0.02, (0.015, 0.025)), "do not use, KLD 0.712 (0.36–0.80). Try k16v8."),
    ],
)
def test_an_arm_of_the_run_with_native_keys_says_whether_keys_are_to_blame(other: ArmRecord, said: str) -> None:
    assert verdict(record("int4", *COARSE), other).sentence == said


def test_formats_that_are_not_stated_are_not_blamed() -> None:
    arm = record("int4", *COARSE).model_copy(update={"kv": None})
    assert judge(arm).sentence == "do not use, KLD 0.712 (0.36–0.80)"


def test_imported_figures_without_an_interval_say_why() -> None:
    found = judge(record(kld=0.07), reason="the file holds no windows")
    assert (found.band, found.at_best, found.because) == (None, "DEGRADED", ("the file holds no windows",))
    assert found.sentence == "no verdict, at best DEGRADED: the file holds no windows"


def test_an_interval_too_wide_for_a_verdict_cannot_tell_and_names_all_that_is_possible() -> None:
    found = verdict(record(kld=0.003, ci=(0.001, 0.3), clusters=(4, "document")), n_ctx=512)
    assert (found.band, found.at_best, found.at_worst, found.preliminary) == (None, "EXCELLENT", "FAIL", True)
    assert found.sentence == "cannot tell: excellent to fail, use more windows. KLD 0.00300 (0.0010–0.30, 4 documents)."
    assert found.notes == ("A verdict takes 6 documents or more", "Tested up to 512 tokens")
    degraded = verdict(record(kld=0.09, ci=(0.06, 0.12), clusters=(13, "document")))
    assert (degraded.at_best, degraded.at_worst) == ("DEGRADED", "FAIL")
    assert degraded.sentence.startswith("cannot tell: degraded to fail")
    assert verdict(record(kld=0.1, ci=(0.06, 0.12))).band == "FAIL"


def test_native_formats_are_known_by_all_their_names_and_coarse_ones_are_not_native() -> None:
    native = ("bf16", "f16", "F32", "fp16", "float32", "bfloat16", "auto", "native")
    coarse = ("fp8_e4m3", "q8_0", "int4", "fp8", "f16x", "turbo3")
    assert [name for name in (*native, *coarse) if is_native(name)] == [*native]


def test_a_preliminary_verdict_says_so_and_what_it_takes() -> None:
    found = verdict(record("int4", *COARSE, clusters=(2, "document"), wider_keys=None).model_copy(update={"kv": None}))
    assert found.sentence.startswith("do not use (preliminary), KLD 0.712 (0.36–0.80, 2 documents). ")
    assert found.sentence.endswith("A verdict takes 6 documents or more.")


def test_an_interval_that_crosses_a_band_is_said_to() -> None:
    found = verdict(record(kld=0.04, ci=(0.005, 0.045), clusters=(12, "block")))
    assert found.sentence == (
        "safe, KLD 0.0400 (0.0050–0.045, 12 blocks). Inconclusive between EXCELLENT and PASS, use more windows."
    )
    assert "nconclusive" not in verdict(record("int4", *COARSE)).model_dump_json()


def test_probability_that_is_cut_off_with_ids_of_one_side_alone_is_told_from_a_thousandth_on() -> None:
    told = "KLD leaves out 2.14% of the probability, of tokens that one vocabulary lacks"
    assert told in verdict(record("int4", *COARSE, shares={CUT: 0.0214})).notes
    assert "vocabulary" not in verdict(record("int4", *COARSE, shares={CUT: 0.0009})).model_dump_json()


def test_what_two_clauses_have_no_room_for_is_noted() -> None:
    shares = {TOP1: 0.8, FLIPS: 0.0}
    found = verdict(record("int4", 0.07, (0.04, 0.09), shares=shares, floor=7.9e-5), n_ctx=2048)
    assert found.sentence == "use with care, KLD 0.0700 (0.040–0.090). Try k16v8."
    assert found.notes == (
        "Inconclusive between PASS and DEGRADED, use more windows",
        "The top token changes at 20.0% of positions, only at near ties",
        "Rounding noise 0.0001",
        "Tested up to 2,048 tokens",
    )


@pytest.mark.parametrize(
    ("ci", "said"), [((1.8e-5, 0.00013), "0.00002–0.00013"), ((1.8e-5, 2.7e-5), "below 0.0001"), ((0.0, 0.0), "0")]
)
def test_an_interval_in_a_sentence_has_no_exponent(ci: tuple[float, float], said: str) -> None:
    assert verdict(record(kld=ci[1], ci=ci)).sentence.endswith(f"({said})")


def test_where_weights_are_rounded_too_no_other_cache_format_is_advised() -> None:
    ran = RuntimeRecord(simulated_weight_bytes=1000)
    said = verdict(record("int4", *COARSE, ran=ran)).sentence
    assert "k16v8" not in said
    assert "Measure weights and cache apart (--vary weights=native,… --vary kv=…)." in said
    assert "--vary" not in verdict(record("bf16", *COARSE, ran=ran)).sentence


@pytest.mark.parametrize(
    "proof",
    [
        None,
        {},
        dict.fromkeys(("received", "stored", "named"), "open: answered by other-8b"),
        {"received": "open: the kernel is unknown", "stored": "shown", "named": "shown"},
        "shown",
    ],
)
def test_an_identical_output_without_whole_proof_is_not_called_that_of_the_format(proof: Any) -> None:
    ran = RuntimeRecord.model_validate({} if proof is None else {"proof": proof})
    arm = record(status=Status.IDENTICAL, kld=0.0, ci=(0.0, 0.0), ran=ran)
    sentence = verdict(arm, n_ctx=2048).sentence
    assert sentence == "identical output, not proven that the format ran. Tested up to 2,048 tokens."


@pytest.mark.parametrize(
    ("control", "said"),
    [
        (0.0001, ""),
        (0.0015, "Most of the loss comes from the kernel, not the format (control bf16: KLD 0.00150)"),
        (0.003, "The control loses as much (bf16: KLD 0.00300): the kernel's noise hides what the format costs"),
    ],
)
def test_a_control_that_costs_as_much_as_its_candidate_hides_the_loss_and_explains_none(
    control: float, said: str
) -> None:
    arm = record("fp8_e4m3", 0.002, (0.0018, 0.0022), control="bf16")
    found = verdict(arm, record("bf16", control, (control, control)))
    told = f"{found.sentence} {' '.join(found.notes)}"
    assert ("kernel" in told) is bool(said)
    assert said in told
