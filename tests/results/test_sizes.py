"""Sizes by which configurations are compared: which length counts, what a saving refers to, and its words."""

from __future__ import annotations

from typing import Any

import pytest

from fidelab.core import KVSpec, Status
from fidelab.core.sequence import SequenceBytes, StoreBytes
from fidelab.results.measurement import Measurement
from fidelab.results.recommend import recommend
from fidelab.results.record import ArmRecord, RuntimeRecord
from fidelab.results.sizes import Sizes, encoded_90_at, encoded_share, reach
from fidelab.results.verdict import judge
from tests.present import present
from tests.results import test_recommend as sample

NATIVE, INT4 = 1000.0, 281.25  # bytes per token


def arm(name: str, *, n_ctx: int = 128, **ran: Any) -> ArmRecord:
    kld = Measurement(status=Status.OK, facts={"n_ctx": n_ctx})
    runtime = RuntimeRecord.model_validate({"k_dtype": name, "v_dtype": name, **ran})
    spec = KVSpec.parse("bf16" if name == "bf16" else "int4")
    return ArmRecord(name=name, engine="hf", model="m", kv=spec, status=Status.OK, ran=runtime, axes={"kld": kld})


def excepted(name: str, tail: int, n_ctx: int = 128, **more: Any) -> ArmRecord:
    store = StoreBytes(INT4, NATIVE, tail=tail)
    return arm(name, n_ctx=n_ctx, cache_bytes_per_token=INT4, sequence=SequenceBytes((store,)), **more)


def sizes(*candidates: ArmRecord) -> Sizes:
    return Sizes.of(arm("bf16", cache_bytes_per_token=NATIVE), candidates)


def test_exact_tokens_count_as_what_they_hold_at_the_measured_length() -> None:
    found = sizes(excepted("int4[tail=96]", 96), arm("int4", cache_bytes_per_token=INT4))
    assert found.saving("int4[tail=96]") == pytest.approx(0.25 * (1 - INT4 / NATIVE))
    assert found.saving("int4") == 1 - INT4 / NATIVE
    assert found.sizes["int4[tail=96]"] > found.sizes["int4"]


def test_the_longest_context_of_any_candidate_counts() -> None:
    short, long = excepted("a", 96), excepted("b", 96, n_ctx=512)
    facts = {"n_ctx": 64, "contexts": [{"n_ctx": 64}, {"n_ctx": 2048}, {"n_ctx": 512}]}
    two = long.model_copy(update={"axes": {"kld": Measurement(status=Status.OK, facts=facts)}})
    assert [reach([short]), reach([short, long]), reach([two, short]), reach([])] == [128, 512, 2048, None]
    assert sizes(short, two).n_ctx == 2048


def test_weights_and_cache_are_added_at_the_longest_context() -> None:
    facts = {"n_ctx": 64, "contexts": [{"n_ctx": 64}, {"n_ctx": 2048}]}
    candidate = excepted("int4", 0, weight_bytes=3_000_000)
    candidate = candidate.model_copy(update={"axes": {"kld": Measurement(status=Status.OK, facts=facts)}})
    found = Sizes.of(arm("bf16", cache_bytes_per_token=NATIVE, weight_bytes=9_000_000), [candidate])
    assert (found.what, found.base) == ("total", 9_000_000 + 2048 * NATIVE)
    assert found.sizes["int4"] == 3_000_000 + 2048 * INT4
    assert found.describe("int4").endswith("of weights and cache at 2,048 tokens)")


def test_a_saving_that_depends_on_the_length_names_it_and_others_do_not() -> None:
    found = sizes(excepted("int4[tail=96]", 96), excepted("int4[tail=1]", 1), arm("int4", cache_bytes_per_token=INT4))
    assert found.describe("int4[tail=96]") == "18% smaller KV cache than bf16 at 128 tokens"
    assert found.describe("int4[tail=1]") == "71% smaller KV cache than bf16"
    assert found.describe("int4") == "72% smaller KV cache than bf16"
    assert found.by_length == {"int4[tail=96]"}


def test_recurrent_states_belong_to_a_sequence_and_are_not_halved_with_a_32_bit_cache() -> None:
    state = {"state_bytes_per_sequence": 64_000}
    reference = arm("f32", cache_bytes_per_token=2 * NATIVE, **state)
    found = Sizes.of(reference, [arm("int4", cache_bytes_per_token=INT4, **state)])
    assert (found.base_name, found.base) == ("16 bits", (128 * NATIVE + 64_000) / 128)
    assert found.saving("int4") == 1 - (128 * INT4 + 64_000) / (128 * NATIVE + 64_000)
    assert found.describe("int4") == "48% smaller KV cache than 16 bits at 128 tokens"


def test_without_a_context_one_more_token_counts() -> None:
    none = excepted("int4[tail=96]", 96).model_copy(update={"axes": {}})
    found = sizes(none)
    assert (found.n_ctx, found.sizes) == (None, {"int4[tail=96]": INT4})
    assert found.describe("int4[tail=96]") == "72% smaller KV cache than bf16"


def test_a_smaller_candidate_is_not_struck_by_one_whose_exact_tokens_make_it_larger() -> None:
    tail = sample.arm("int4[tail=96]", 281.25, 0.0001)
    store = StoreBytes(281.25, 1000, tail=400)
    ran = present(tail.ran).model_copy(update={"sequence": SequenceBytes((store,))})
    report = sample.report(tail.model_copy(update={"ran": ran}), sample.arm("int4", 281.25, 0.02))
    found = present(recommend(report))
    assert found.dominated == ()
    assert "as small" not in found.model_dump_json()
    equal = present(recommend(sample.report(tail, sample.arm("int4", 281.25, 0.02))))
    assert [one.arm for one in equal.dominated] == ["int4"]


def with_share(share: float | None, context: int | None = None, **found: Any) -> ArmRecord:
    one = sample.arm("int4[tail=96]", 500, 0.0006)
    known = {"encoded_share": share, "encoded_90_at": context}
    facts = {**one.axes["kld"].facts, **{name: value for name, value in known.items() if value is not None}}
    return one.model_copy(update={"axes": {"kld": one.axes["kld"].model_copy(update={"facts": facts, **found})}})


def test_the_share_encoded_is_read_from_the_facts_of_the_kld() -> None:
    assert (encoded_share(with_share(0.25, 1332)), encoded_90_at(with_share(0.25, 1332))) == (0.25, 1332)
    assert (encoded_share(with_share(None)), encoded_90_at(with_share(None))) == (None, None)
    nothing = with_share(0.25).model_copy(update={"axes": {}})
    assert (encoded_share(nothing), encoded_90_at(nothing)) == (None, None)


def test_below_half_of_the_tokens_encoded_there_is_no_verdict_and_the_reason_says_so() -> None:
    found = judge(with_share(0.25))
    assert (found.band, found.because) == (None, ("only 25% of tokens were encoded",))
    assert found.sentence.startswith("no verdict: only 25% of tokens were encoded")
    assert judge(with_share(0.5)).band == judge(with_share(None)).band == "EXCELLENT"


def test_failed_positions_are_judged_however_little_was_encoded() -> None:
    few, none = (judge(with_share(share, n_failed=50)) for share in (0.25, None))
    assert (few.band, few.because) == (none.band, none.because)
    assert few.band in ("DEGRADED", "FAIL")
