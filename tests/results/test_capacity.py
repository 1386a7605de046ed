"""GiB at a context and users that fit: closed forms, edges, and the lines of the answer."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from fidelab.core import KVSpec, Status
from fidelab.core.amounts import parse_tokens
from fidelab.core.errors import UsageError
from fidelab.core.fit import sequences_that_fit, tokens_that_fit
from fidelab.core.sequence import SequenceBytes, StoreBytes
from fidelab.report.capacity import gib_estimate, gib_heading, memory_lines
from fidelab.results.capacity import asked_again, check_context, with_capacity
from fidelab.results.capacity_record import CapacityQuestion
from fidelab.results.decision_record import Recommendation
from fidelab.results.record import ArmRecord, Report, RuntimeRecord
from tests.present import present

GIB = 2**30
LAYERS, HEADS, DIM = 32, 8, 128  # of the shape of an 8B model
F16, Q8_0 = LAYERS * HEADS * DIM * 2 * 2, LAYERS * HEADS * DIM * 2 * 34 / 32  # bytes per token
WEIGHTS = 4.5 * GIB
CONTEXT = 32 * 1024


def arm(name: str, token: float | None, weights: float | None = WEIGHTS, **more: Any) -> ArmRecord:
    ran = RuntimeRecord.model_validate(
        {
            "k_dtype": name,
            "v_dtype": name,
            "cache_bytes_per_token": token,
            "weight_bytes": None if weights is None else int(weights),
            **more,
        }
    )
    return ArmRecord(
        name=name, engine=more.get("engine", "e"), model="m", kv=KVSpec.parse(name), status=Status.OK, ran=ran
    )


def report(*candidates: ArmRecord, reference: ArmRecord | None = None, chosen: str | None = "q8_0") -> Report:
    found = Recommendation(kind="use" if chosen else "reference", arm=chosen, text=f"Use {chosen}")
    return Report(
        run_id="r",
        created=datetime(2026, 1, 1, tzinfo=UTC),
        fidelab_version="0",
        command="fidelab compare",
        reference=reference or arm("f16", F16),
        candidates=candidates or (arm("q8_0", Q8_0),),
        recommendation=found,
    )


def question(memory: float | None = None, **more: Any) -> CapacityQuestion:
    fields = {"n_ctx": CONTEXT, "memory_bytes": memory, "memory_of": "24 GiB" if memory else "", **more}
    return CapacityQuestion.model_validate(fields)


def test_bytes_are_those_of_heads_times_dimensions_times_tokens() -> None:
    found = with_capacity(report(), question())
    before, after = present(present(found.capacity).before), present(found.candidates[0].capacity)
    assert before.cache_bytes == 2 * LAYERS * HEADS * DIM * 2 * CONTEXT == 4 * GIB
    assert after.cache_bytes == 2 * LAYERS * HEADS * DIM // 32 * 34 * CONTEXT
    assert after.total_bytes == WEIGHTS + after.cache_bytes
    assert memory_lines(found) == ("KV cache at 32k tokens: 4.00 → 2.12 GiB (−47%), model + cache 8.50 → 6.62 GiB",)


def test_users_and_tokens_are_what_is_left_next_to_the_weights() -> None:
    found = with_capacity(report(), question(24 * GIB, limit=131_072))
    before, after = present(present(found.capacity).before), present(found.candidates[0].capacity)
    assert (before.users, after.users) == (4, 9)  # 19.5 GiB over 4 and 2.125
    assert before.tokens == (24 * GIB - int(WEIGHTS)) // F16
    assert memory_lines(found)[1] == "fits 24 GiB: at most 4 → 9 users of 32k"  # one user has room for the limit


def test_a_user_more_needs_all_bytes_of_its_cache() -> None:
    assert sequences_that_fit(10, 5, 10) == 0
    assert [sequences_that_fit(10, 5, memory) for memory in (9, 14.999, 15, 20)] == [0, 0, 1, 2]
    assert sequences_that_fit(10, 0, 10) is None  # no cache, no limit
    assert [tokens_that_fit(10, lambda n: 5.0 * n, memory) for memory in (9, 14, 15, 24)] == [0, 0, 1, 2]
    assert tokens_that_fit(10, lambda n: 5.0 * n, 40, sequences=3) == 2
    assert tokens_that_fit(10, lambda n: 5.0 * min(n, 4), 40) is None


@pytest.mark.parametrize(("memory", "tokens"), [(5, "; 7,710 tokens fit"), (4, "")])
def test_what_does_not_fit_says_what_it_needs_and_what_there_is(memory: int, tokens: str) -> None:
    found = with_capacity(report(), question(memory * GIB, memory_of=f"{memory} GiB"))
    line = f"does not fit {memory} GiB: one user of 32k needs 6.62 GiB, has {memory}.00 GiB{tokens}"
    assert memory_lines(found)[1] == line


def test_a_cache_that_makes_one_user_fit_is_shown_as_from_none() -> None:
    found = with_capacity(report(), question(7 * GIB, limit=CONTEXT, memory_of="7 GiB"))
    assert memory_lines(found)[1] == "fits 7 GiB: at most 0 → 1 user of 32k, one user up to 20,480 → 32,768 tokens"


def test_unknown_bytes_are_silent_and_unknown_weights_leave_the_cache() -> None:
    nothing = with_capacity(report(arm("q8_0", None)), question(24 * GIB))
    assert (memory_lines(nothing), gib_estimate(nothing.candidates[0], nothing).absent) == ((), True)
    server = with_capacity(
        report(arm("q8_0", Q8_0, weights=None), reference=arm("f16", F16, weights=None)), question(24 * GIB)
    )
    assert memory_lines(server) == ("KV cache at 32k tokens: 4.00 → 2.12 GiB (−47%)",)
    assert (gib_heading(server), gib_estimate(server.candidates[0], server).value) == ("cache GiB at 32k", "2.12")


def test_a_32_bit_reference_counts_as_16_bits_for_users_too() -> None:
    found = with_capacity(report(reference=arm("f32", 2 * F16)), question(24 * GIB))
    capacity = present(found.capacity)
    assert (capacity.baseline, present(capacity.before).users) == ("16 bits", 4)
    assert "(−47% against 16 bits)" in memory_lines(found)[0]


def test_an_engine_that_computes_a_format_says_that_it_does_not_store_it() -> None:
    found = with_capacity(report(), question(computed=("e",)))
    assert "(size of the format, which engine e does not store)" in memory_lines(found)[0]


def test_weights_that_dominate_are_pointed_out_unless_several_users_fit() -> None:
    small = question(n_ctx=4096)
    line = "The cache is 10% of what you load. Smaller weights save more: --candidate model=…"
    assert line in memory_lines(with_capacity(report(), small))
    assert line not in memory_lines(with_capacity(report(), small.model_copy(update={"memory_bytes": 24 * GIB})))
    assert line not in memory_lines(with_capacity(report(), question()))
    smaller = report(arm("q8_0", Q8_0, weights=2 * GIB))
    assert line not in memory_lines(with_capacity(smaller, small))


def test_a_share_that_the_server_reserves_and_several_devices_are_named() -> None:
    asked = question(2 * 24 * GIB * 0.9, devices=2, reserved_share=0.9, memory_of="RTX-4090", limit=CONTEXT)
    line = memory_lines(with_capacity(report(), asked))[1]
    assert line.startswith("fits 2 × RTX-4090 (43.2 GiB, 90% of it): at most")


def test_windows_and_states_are_counted_once() -> None:
    stores = (StoreBytes(100.0, window=512), StoreBytes(50.0))
    hybrid = arm("q8_0", 150.0, sequence=SequenceBytes(stores, state=7000.0))
    found = with_capacity(report(hybrid), question(WEIGHTS + 10 * (100 * 512 + 50 * CONTEXT + 7000)))
    capacity = present(found.candidates[0].capacity)
    assert (capacity.cache_bytes, capacity.users) == (100 * 512 + 50 * CONTEXT + 7000, 10)


def test_a_context_beyond_the_limit_is_refused_with_the_limit() -> None:
    with pytest.raises(UsageError, match=r"--context 8,193: the model has a limit of 8,192 tokens; use --context 8192"):
        check_context(8193, 8192)
    check_context(8192, 8192)
    check_context(10**9, None)


def test_a_finished_report_can_be_asked_for_another_context_and_device() -> None:
    first = with_capacity(report(), question(limit=65_536, reserved_share=0.5))
    again = asked_again(first, 65_536, (24 * GIB, "RTX-4090"))
    capacity = present(again.capacity)
    assert (capacity.n_ctx, capacity.n_ctx_from, capacity.memory_bytes) == (65_536, "option", 12 * GIB)
    with pytest.raises(UsageError, match="limit of 65,536 tokens"):
        asked_again(first, 65_537, None)
    with pytest.raises(UsageError, match="need the bytes of the caches"):
        asked_again(report(arm("q8_0", None), reference=arm("f16", None)), 1024, None)


@pytest.mark.parametrize(("text", "tokens"), [("32k", 32_768), ("32768", 32_768), ("32,768", 32_768), ("1M", 2**20)])
def test_lengths_are_read_as_people_write_them(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "0", "k", "-1", "1.0001k", "32 GiB"])
def test_what_is_not_a_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a length; write tokens such as 32768 or 32k"):
        parse_tokens(text)
