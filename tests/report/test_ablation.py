"""What an ablation says in words, and how its grid is laid out."""

from __future__ import annotations

from typing import Any

import pytest

from fidelab.report.ablation import ablation_of
from fidelab.report.html import render_html
from fidelab.report.markdown import render_markdown
from fidelab.results.ablation_record import (
    Ablation,
    AblationCell,
    AblationOutcome,
    FactorEffect,
    JointLossRecord,
    LevelShift,
    sentence_of,
)
from fidelab.results.record import Report
from tests.report.sample import HOSTILE, sample_report

KV = {"low": "bf16", "high": "int8"}
ATTENTION = {"low": "sdpa", "high": "fidelab"}


def shift(levels: dict[str, str], mean: float, *, moves: bool = True, **context: Any) -> LevelShift:
    half = abs(mean) / 10
    return LevelShift(**levels, mean=mean, ci=(mean - half, mean + half), moves=moves, context=context or None)


def effect(factor: str, reach: Any, mean: LevelShift, *shifts: LevelShift, **more: Any) -> FactorEffect:
    return FactorEffect(factor=factor, reach=reach, mean=mean, shifts=shifts, **more)


def outcome(*effects: FactorEffect, **changes: Any) -> AblationOutcome:
    fields = {"name": "kld", "unit": "nats", "floor": 0.001, "floor_from": "rounding in bfloat16", "effects": effects}
    return AblationOutcome.model_validate({**fields, **changes})


def still(factor: str, most: float | None) -> FactorEffect:
    return effect(factor, "none", shift(ATTENTION, 0.0, moves=False), most=most)


FLOOR = "floor 0.00100 nats: rounding in bfloat16"
EVERYWHERE = effect(
    "kv",
    "everywhere",
    shift(KV, 0.01),
    shift(KV, 0.009, attention="sdpa"),
    shift(KV, 0.011, attention="fidelab"),
)


def test_what_holds_everywhere_is_said_by_its_mean_and_the_rest_by_its_bound() -> None:
    assert sentence_of(outcome(still("dequant", 0.0004), EVERYWHERE)) == (
        "kv moves KLD: bf16 → int8 +0.0100 nats (95%: +0.00900 to +0.0110), everywhere; "
        f"dequant does not: at most 0.000400 ({FLOOR})"
    )


def test_what_is_seen_in_the_mean_alone_is_said_to_be_so() -> None:
    shifts = (EVERYWHERE.shifts[0].model_copy(update={"moves": False}), EVERYWHERE.shifts[1])
    assert ", on average (" in sentence_of(outcome(EVERYWHERE.model_copy(update={"shifts": shifts})))


def test_what_is_more_with_one_level_says_with_which() -> None:
    said = sentence_of(outcome(EVERYWHERE.model_copy(update={"depends": True})))
    assert ", everywhere, most with attention=fidelab (+0.0110)" in said


def test_a_factor_without_a_tight_bound_is_not_cleared() -> None:
    said = sentence_of(outcome(EVERYWHERE, still("dequant", 0.02)))
    assert f"no shift by dequant can be told from chance: at most 0.0200 ({FLOOR})" in said


def test_where_nothing_moves_every_factor_has_its_bound() -> None:
    assert sentence_of(outcome(still("kv", 0.0002), still("attention", 0.0))) == (
        f"no factor moves KLD beyond the floor (kv at most 0.000200, attention at most 0; {FLOOR})"
    )


@pytest.mark.parametrize(("most", "bound"), [(0.3, "at most 0.300"), (None, "without an interval")])
def test_where_nothing_can_be_told_from_chance_no_factor_is_cleared(most: float | None, bound: str) -> None:
    assert sentence_of(outcome(still("kv", 0.0002), still("attention", most), n_clusters=2)) == (
        f"no factor's shift of KLD can be told from chance (kv at most 0.000200, attention {bound}; "
        f"2 clusters, more windows tell more; {FLOOR})"
    )


def test_a_shift_in_some_contexts_names_their_levels() -> None:
    shifts = [shift(ATTENTION, mean, moves=mean > 0.001, kv=kv) for kv, mean in (("bf16", 0.0), ("int8", 0.02))]
    some = effect("attention", "some", shift(ATTENTION, 0.01), *shifts, only={"kv": ("int8",)}, depends=True)
    said = sentence_of(outcome(some, EVERYWHERE))
    assert said.startswith("attention moves KLD only with kv=int8: sdpa → fidelab +0.0200 nats (95%: ")
    assert "kv moves KLD: bf16 → int8" in said


def test_contexts_that_no_levels_name_are_listed() -> None:
    contexts = [("bf16", "fused", True), ("bf16", "unpack", False), ("int8", "fused", False), ("int8", "unpack", True)]
    shifts = [shift(ATTENTION, 0.01, moves=moves, kv=kv, dequant=how) for kv, how, moves in contexts]
    said = sentence_of(outcome(effect("attention", "some", shift(ATTENTION, 0.01), *shifts, depends=True)))
    assert "only with kv=bf16, dequant=fused; kv=int8, dequant=unpack: sdpa → fidelab" in said


def test_a_pair_without_main_effects_is_named_once() -> None:
    def some(
        factor: str, levels: dict[str, str], other: str, sleeps_when_idle: str, loud: str, mean: float
    ) -> FactorEffect:
        def context(level: str) -> dict[str, Any]:
            return {other: level}

        shifts = [shift(levels, 0.0, moves=False, **context(sleeps_when_idle)), shift(levels, mean, **context(loud))]
        return effect(factor, "some", shift(levels, mean / 2), *shifts, only={other: (loud,)}, depends=True)

    attention = some("attention", ATTENTION, "kv", "bf16", "int8", 0.021)
    kv = some("kv", KV, "attention", "sdpa", "fidelab", 0.02)
    assert sentence_of(outcome(attention, kv)) == (
        "attention=fidelab with kv=int8 moves KLD: +0.0200 nats (95%: +0.0180 to +0.0220), none of them alone "
        f"({FLOOR})"
    )
    elsewhere = kv.model_copy(update={"only": {"attention": ("sdpa",)}})
    assert "none of them alone" not in sentence_of(outcome(attention, elsewhere))


def test_opposite_shifts_are_both_told() -> None:
    shifts = [shift(ATTENTION, mean, kv=kv) for kv, mean in (("bf16", -0.01), ("int8", 0.02))]
    said = sentence_of(outcome(effect("attention", "opposed", shift(ATTENTION, 0.005), *shifts)))
    assert "either way: sdpa → fidelab +0.0200 nats (95%: +0.0180 to +0.0220) with kv=int8, but" in said
    assert "−0.0100 nats (95%: −0.0110 to −0.00900) with kv=bf16" in said


def test_what_cannot_be_placed_says_so() -> None:
    shifts = [shift(ATTENTION, 0.01, moves=kv == "int8", kv=kv) for kv in ("bf16", "int8")]
    unclear = effect("attention", "unclear", shift(ATTENTION, 0.01, moves=False), *shifts, only={"kv": ("int8",)})
    assert "with kv=int8; where else cannot be told" in sentence_of(outcome(unclear))


def test_a_factor_that_could_not_be_compared_is_told_apart() -> None:
    lacking = FactorEffect(factor="engine", reach="unmeasured")
    assert (
        sentence_of(outcome(lacking)) == "nothing can be said about KLD; engine: no two cells that differ in it alone"
    )
    assert sentence_of(outcome(EVERYWHERE, lacking)).endswith("; engine: no two cells that differ in it alone")


@pytest.mark.parametrize(("mean", "said"), [(670.4, "670 tokens earlier (95%: 603 to 737)"), (-670.4, "tokens later")])
def test_onsets_are_earlier_or_later(mean: float, said: str) -> None:
    tokens = {"name": "degeneration", "unit": "tokens", "floor": 32.0, "floor_from": "the axis"}
    found = sentence_of(outcome(effect("kv", "everywhere", shift(KV, mean), shift(KV, mean)), **tokens))
    assert found.startswith("kv moves the onset of degeneration: bf16 → int8 ")
    assert said in found
    assert found.endswith("(floor 32 tokens: the axis)")


def matrix(factors: dict[str, tuple[str, ...]], cells: tuple[AblationCell, ...], **fixed: str) -> Report:
    found = outcome(still("kv", 0.0), cells=cells, sentence="said")
    return sample_report(ablation=Ablation(factors=factors, fixed=fixed, outcomes=(found,)))


def cell(value: float | None, **levels: str) -> AblationCell:
    return AblationCell(arm="x", levels=levels, value=value, reason=None if value is not None else "refused")


def test_two_factors_are_rows_and_columns() -> None:
    cells = tuple(
        cell(v, a=a, kv=kv) for a, kv, v in (("s", "x", 0.0), ("s", "y", 0.01), ("f", "x", None), ("f", "y", 1.0))
    )
    [found] = ablation_of(matrix({"a": ("s", "f"), "kv": ("x", "y")}, cells, dequant="unpack"))
    assert found.table.title == "Ablation: mean KLD, nats; dequant=unpack"
    assert found.table.columns == ("a, kv →", "x", "y")
    assert found.table.rows == (("s", "0", "0.0100"), ("f", "–", "1.00"))


def test_one_factor_is_a_list() -> None:
    [found] = ablation_of(matrix({"kv": ("x", "y")}, (cell(0.0, kv="x"), cell(0.5, kv="y"))))
    assert (found.table.columns, found.table.named) == (("kv", "KLD"), 1)
    assert found.table.rows == (("x", "0"), ("y", "0.500"))


def test_hostile_levels_add_no_markup_to_page_and_card() -> None:
    report = matrix({HOSTILE: ("x", HOSTILE)}, (cell(0.0, **{HOSTILE: "x"}), cell(0.5, **{HOSTILE: HOSTILE})))
    assert "<script>alert" not in render_html(report)
    card = render_markdown(report)
    [table] = [
        part for part in card.split("\n\n") if part.startswith("| ") and "KLD |\n" in part and "verdict" not in part
    ]
    assert [line.count("|") - line.count("\\|") for line in table.splitlines()] == [3] * 4


@pytest.mark.parametrize(
    ("adds", "said"),
    [
        ("sum", "losses add"),
        ("more", "losses are more than their sum"),
        ("less", "losses are less than their sum"),
        ("unclear", "whether losses add cannot be told"),
    ],
)
def test_the_sentence_says_whether_losses_add_with_the_interval_of_their_excess(adds: Any, said: str) -> None:
    weights = {"low": "native", "high": "int4"}
    moving = [effect("weights", "everywhere", shift(weights, 0.05)), effect("kv", "everywhere", shift(KV, 0.01))]
    joint = JointLossRecord(
        levels={"weights": "int4", "kv": "int8"},
        alone={"weights": 0.05, "kv": 0.01},
        together=0.062,
        excess=0.002,
        ci=(-0.001, 0.005),
        adds=adds,
    )
    told = sentence_of(outcome(*moving, joint=(joint,)))
    assert told.endswith(
        f"; {said}: weights=int4 0.0500 + kv=int8 0.0100, together 0.0620, a difference of +0.00200 nats "
        "(95%: −0.00100 to +0.00500)"
    )
    assert "losses" not in sentence_of(outcome(moving[0], still("kv", 0.0001), joint=(joint,)))
