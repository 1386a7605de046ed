"""What two reports must agree on, and what is told beside."""

from __future__ import annotations

from typing import Any

import pytest

from fidelab.core import Status
from fidelab.core.errors import MismatchError
from fidelab.results.comparability import describe_difference
from fidelab.results.compare import compare
from fidelab.results.diff_record import Thresholds
from fidelab.results.measurement import Definition, Measurement
from fidelab.results.record import Composite, Report
from fidelab.results.table import tabulate
from tests.report.sample import arm, candidate, kld_axis, sample_report
from tests.results.diff_sample import COMPOSITE, KEY, benches, measured, one, run


def keyed(**key: Any) -> Report:
    return run(benches(), comparability_key=key)


def refused(was: Report, now: Report) -> dict[str, tuple[str, ...]]:
    return {refusal.field: refusal.groups for refusal in compare(was, now).refused}


def test_a_mismatch_names_the_field_and_both_values_and_the_others_go_on() -> None:
    diff = compare(run(), run(comparability_key={**KEY, "kld": {"items": "9f2c", "settings": {"n_ctx": 4096}}}))
    [found] = diff.refused
    assert (found.field, found.baseline, found.now) == ("kld.settings.n_ctx", 512, 4096)
    assert set(found.groups) == {"kld", "composite"}  # which rests on it
    assert found.n_metrics == len([key for key in tabulate(run()).metrics if key.group in found.groups])
    assert {change.group for change in diff.changes} == {"trajectory", "cache"}
    assert "kld" in diff.undecided()[0]
    loose = diff.model_copy(update={"thresholds": Thresholds(allow_missing=True)})
    assert loose.undecided() == []


def test_a_key_of_a_bench_concerns_this_bench_alone() -> None:
    was = keyed(**{"benches.decode": {"device": "cpu", "threads": 2}})
    now = keyed(**{"benches.decode": {"device": "cuda:0", "threads": 2}})
    assert refused(was, now) == {"benches.decode.device": ("benches.decode",)}


def test_a_key_of_a_part_concerns_its_axis() -> None:
    assert refused(run(), run(comparability_key={**KEY, "trajectory.raw": {"n_predict": 32}})) == {
        "trajectory.raw.n_predict": ("trajectory", "composite")
    }


def test_a_key_that_only_one_side_has_is_a_mismatch() -> None:
    assert set(refused(keyed(**{"benches.memory": {"device": "cpu"}}), keyed())) == {"benches.memory.device"}


def test_a_key_that_names_no_axis_concerns_all_axes_and_no_bench() -> None:
    [groups] = refused(keyed(protocol="half"), keyed(protocol="full")).values()
    assert set(groups) == {"kld", "trajectory", "composite"}


def test_an_axis_that_neither_side_measured_hinders_no_other() -> None:
    failed = Measurement(status=Status.NOT_MEASURABLE, reason="no data set")
    axes = {"kld": kld_axis(0.01, 0.001), "gsm8k": failed}
    was, now = (
        run(
            candidates=(candidate("fp8_e4m3", 0.03, "PASS", 1, "safe", axes=axes, composite=None),),
            comparability_key={**KEY, "gsm8k": {"items": items}},
        )
        for items in ("a", "b")
    )
    assert refused(was, now) == {}


def test_fidelity_to_another_reference_is_not_compared() -> None:
    was, now = run(benches()), run(benches(), reference=arm("bf16"))
    assert set(refused(was, now)["reference.kv"]) == {"kld", "trajectory", "composite"}


def test_floors_over_other_shares_of_the_items_are_not_compared() -> None:
    was, now = (run(settings={"floor": share}) for share in (0.25, 1.0))
    [found] = compare(was, now).refused
    assert (found.field, found.baseline, found.now) == ("floor", 0.25, 1.0)
    assert found.n_metrics == len([key for key in tabulate(was).metrics if key.role == "floor"])


def test_an_excess_over_another_control_is_not_compared() -> None:
    other = compare(run(), run(control=arm("f16", axes={"kld": kld_axis(0.00003, 0.000004)})))
    assert {refusal.field: set(refusal.groups) for refusal in other.refused} == {"control.kv": {"kld", "trajectory"}}
    assert one(other, "kld", "mean").outcome == "unchanged"


def test_composites_of_other_axes_are_not_compared() -> None:
    both, alone = (
        candidate("fp8_e4m3", 0.0312, "PASS", 23040, "safe", composite=Composite(value=88.1, axes=axes))
        for axes in (("kld", "trajectory"), ("kld",))
    )
    assert refused(run(candidates=(both,)), run(candidates=(alone,))) == {"composite.axes": ("composite",)}


def test_where_nothing_can_be_compared_words_say_what_differs() -> None:
    other = {name: {"items": "other"} for name in ("kld", "trajectory")}
    was, now = ({"text": text, "axes": {"kld": {"windows": n}}} for text, n in (("default", 32), ("own.txt", 8)))
    there = run(settings=now, comparability_key=other, reference=arm("f32", model="another-model", engine="vllm"))
    with pytest.raises(MismatchError) as caught:
        compare(run(settings=was), there)
    said = str(caught.value).removeprefix("nothing can be compared: ").split("; ")
    assert said[:4] == [
        "the model was SmolLM2-135M-Instruct in the baseline and is another-model now",
        "the engine was hf in the baseline and is vllm now",
        "the text was default in the baseline and is own.txt now",
        "kld: windows was 32 in the baseline and is 8 now (and 4 more)",
    ]


@pytest.mark.parametrize(
    ("field", "values", "said"),
    [
        ("kld.vocabulary", ("9f", "a0"), "kld: the tokenizers differ"),
        ("perplexity.2048.items", ("9f", "a0"), "perplexity.2048: other questions were asked ("),
        ("trajectory.settings.n_predict", (8, 64), "trajectory: n_predict was 8 in the baseline and is 64 now"),
        ("reference.kv", ("f32/f32", "bf16/bf16"), "the reference's KV cache was f32/f32 in the baseline and is bf16"),
        ("composite.axes", (["kld"], None), 'what the composite is made of was ["kld"] in the baseline and is not rec'),
    ],
)
def test_a_difference_is_said_in_words(field: str, values: tuple[Any, Any], said: str) -> None:
    assert describe_difference(field, *values).startswith(said)


def test_figures_without_a_better_side_and_bytes_per_token_are_no_comparison() -> None:
    pool = {"memory": measured(Definition("pool", "bytes")(1000))}
    other = {name: {"items": "other"} for name in ("kld", "trajectory")}
    with pytest.raises(MismatchError, match="nothing can be compared"):
        compare(run(pool), run(pool, comparability_key=other))


def test_where_no_arm_is_in_both_their_names_are_said() -> None:
    def of(name: str, reference: str) -> Report:
        arms = {"candidates": (candidate(name, 0.1, "FAIL", 1, "no"),), "reference": arm(reference), "control": None}
        return sample_report(**arms, floor={}, comparability_key={})

    with pytest.raises(MismatchError, match=r"is in both; the baseline has f32, fp8_e4m3, the run bf16, int4"):
        compare(of("fp8_e4m3", "f32"), of("int4", "bf16"))


def test_versions_and_what_ran_are_told_beside() -> None:
    ran = {"k_dtype": "fp8_e4m3", "attention": "flash", "versions": {"torch": "3.0"}, "peak_host_bytes": 5}
    found = [candidate("fp8_e4m3", 0.0312, "PASS", 23040, "safe", ran=ran, engine="vllm", composite=COMPOSITE)]
    diff = compare(run(), run(candidates=found, environment={"device": {"name": "gpu", "driver": "570"}}))
    told = {(difference.where, difference.field): difference.now for difference in diff.beside}
    assert told["fp8_e4m3", "engine"] == "vllm"
    assert told["fp8_e4m3", "attention"] == "flash"
    assert told["fp8_e4m3", "versions.torch"] == "3.0"
    assert told["environment", "device.driver"] == "570"
    assert not any("peak" in field for _, field in told)
    assert diff.refused == ()


def test_of_several_controls_the_one_that_a_candidate_names_counts() -> None:
    others = {"axes": {"kld": kld_axis(0.00003, 0.000004)}}
    first, named = arm("f16", name="first", **others), arm("bf16", name="named", **others)
    judged = run().candidates[0].model_copy(update={"control": "named"})
    both = run(control=named, controls=(first, named), candidates=(judged,))
    assert refused(both, run(control=named, controls=(named,), candidates=(judged,))) == {}
