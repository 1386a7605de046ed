"""Answers → measurements, in closed form."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from pydantic import ValidationError

from fidelab.bench.base import Answers, BenchInputs, Facts, Question
from fidelab.bench.decode import Decode, DecodeSettings
from fidelab.bench.memory import Memory, MemorySettings
from fidelab.bench.prefill import PrefillBench, PrefillSettings
from fidelab.bench.startup import COLD, WARM, Startup, StartupSettings
from fidelab.captures.requests import Tokens
from fidelab.core import Status
from fidelab.results.plots import Bars, Curve


def prompts(length: int, count: int, seed: int) -> tuple[Tokens, ...]:
    return tuple((number, *(seed,) * (length - 1)) for number in range(count))


INPUTS = BenchInputs(prompts, max_positions=1000)


def answer(question: Question, *times: list[float], **fields: object) -> Answers:
    return Answers(question, np.array(times), **fields)  # type: ignore[arg-type]


def by_part(questions: tuple[Question, ...], times: Mapping[str, list[list[float]]]) -> dict[str, Answers]:
    return {question.part: answer(question, *times[question.part]) for question in questions}


def test_the_prefill_rate_counts_the_tokens_of_the_whole_batch() -> None:
    bench = PrefillBench(PrefillSettings.model_validate({"lengths": "100", "batch": "4"}))
    record = bench.record(by_part(bench.questions(INPUTS), {"100.b4": [[2.0], [2.0], [4.0]]}), Facts())
    [rate], [cell] = record.metrics, record.cells
    assert rate.repeats == (200.0, 200.0, 100.0)
    assert (rate.name, rate.cell, rate.value, rate.unit, rate.better) == (
        *("rate", {"tokens": 100, "batch": 4}, 200.0),
        *("tok/s", "higher"),
    )
    assert [flag.kind for flag in cell.flags] == ["unsteady"]


def test_decoding_is_rated_isolated_and_by_subtraction_over_the_batch() -> None:
    bench = Decode(DecodeSettings(depths=(64,), n=2, batch=(3,)))
    times = {"64.b3.alone": [[1.0], [1.02], [1.0]], "64.b3": [[1.0, 1.5, 2.0]] * 3}
    record = bench.record(by_part(bench.questions(INPUTS), times), Facts())
    isolated, subtracted = record.metrics
    assert (isolated.name, isolated.repeats) == ("isolated", (6.0, 6.0, 6.0))  # 3 sequences, 2 tokens in 1 s
    assert (subtracted.name, subtracted.repeats) == ("by subtraction", (6.0, 6.0, 6.0))  # 2 s whole − 1 s median alone
    assert subtracted.optional
    assert not isolated.optional
    [cell] = record.cells
    assert cell.at == isolated.cell == {"depth": 64, "batch": 3}
    assert cell.facts["n"] == 2
    assert not cell.flags


def test_a_subtraction_that_leaves_nothing_is_flagged_and_gives_no_figure() -> None:
    bench = Decode(DecodeSettings(depths=(64,), n=2))
    times = {"64.b1.alone": [[3.0]] * 3, "64.b1": [[1.0, 1.5, 2.0]] * 3}
    record = bench.record(by_part(bench.questions(INPUTS), times), Facts())
    assert record.metric("by_subtraction") is None
    assert [flag.kind for flag in record.cells[0].flags] == ["noise"]


def test_a_subtraction_of_scattered_prefills_is_flagged_with_its_figure() -> None:
    bench = Decode(DecodeSettings(depths=(64,), n=2))
    times = {"64.b1.alone": [[1.0], [1.0], [1.2]], "64.b1": [[1.0, 1.5, 2.0]] * 3}
    record = bench.record(by_part(bench.questions(INPUTS), times), Facts())
    [cell] = record.cells
    assert record.value("by_subtraction") is not None
    assert [flag.kind for flag in cell.flags] == ["noise"]
    assert "0.2 s apart, and 1 s are what is left" in cell.flags[0].text


def test_repeats_over_several_loads_are_said_to_be() -> None:
    bench = PrefillBench(PrefillSettings(lengths=(8,)))
    [cell] = bench.record(by_part(bench.questions(INPUTS), {"8.b1": [[1.0]] * 3}), Facts(loads=3)).cells
    assert [flag.kind for flag in cell.flags] == ["loads"]


def test_a_length_beyond_the_models_positions_is_its_own_affair() -> None:
    bench = PrefillBench(PrefillSettings(lengths=(8, 2000)))
    good, bad = bench.questions(INPUTS)
    answers = {
        good.part: answer(good, [1.0]),
        bad.part: Answers(bad, None, status=Status.NOT_SUPPORTED, reason=bad.impossible),
    }
    record = bench.record(answers, Facts())
    assert record.status is Status.OK
    assert [cell.status for cell in record.cells] == [Status.OK, Status.NOT_SUPPORTED]
    assert record.cells[1].reason == "2000 tokens are beyond the model's 1000 positions"


def test_a_failed_cell_makes_the_bench_failed_and_keeps_the_other() -> None:
    bench = PrefillBench(PrefillSettings(lengths=(8, 16)))
    good, bad = bench.questions(INPUTS)
    answers = {good.part: answer(good, [1.0]), bad.part: Answers(bad, None, status=Status.FAILED, reason="out of room")}
    record = bench.record(answers, Facts())
    assert (record.status, record.reason) == (Status.FAILED, "out of room")
    assert record.value("rate", {"tokens": 8, "batch": 1}) == 8.0


def test_start_up_adds_its_parts_and_tells_cold_from_warm() -> None:
    bench = Startup(StartupSettings(repeats=3, cold=1))
    [question] = bench.questions(INPUTS)
    warm = {"import": 1.0, "weights": 2.0, "first token": 0.5}
    starts = [(COLD, {"import": 1.0, "weights": 6.0, "first token": 0.5}), *[(WARM, warm)] * 3]
    record = bench.record({"first": answer(question, [0.5])}, Facts(starts=starts))
    cold, warming = record.metric("total", {"start": COLD}), record.metric("total", {"start": WARM})
    assert cold is not None
    assert warming is not None
    assert cold.repeats == (7.5,)
    assert warming.value == 3.5
    names = [metric.name for metric in record.metrics if metric.cell == {"start": WARM}]
    assert names == ["total", "import", "weights", "first token"]
    assert record.headlines == (warming,)
    assert not record.flags
    [bars] = record.plots
    assert isinstance(bars, Bars)
    assert (bars.labels, bars.parts["weights"], bars.totals) == ((COLD, WARM), (6.0, 2.0), (7.5, 3.5))


def test_a_cold_start_that_could_not_be_arranged_is_flagged() -> None:
    bench = Startup(StartupSettings(repeats=3, cold=1))
    [question] = bench.questions(INPUTS)
    record = bench.record({"first": answer(question, [0.5])}, Facts(starts=[(WARM, {"import": 1.0})] * 3))
    assert record.metric("total", {"start": COLD}) is None
    assert [flag.kind for flag in record.flags] == ["cache"]


def test_memory_multiplies_measured_bytes_and_keeps_each_peak() -> None:
    bench = Memory(MemorySettings(lengths=(100, 10), batch=(2,)))
    questions = bench.questions(INPUTS)
    assert [question.tokens for question in questions] == [10, 100]  # a peak that went before would hide a lower one
    peaks = {10: 500.0, 100: 900.0}
    answers = {
        q.part: answer(q, [1.0], ran={"cache_bytes_per_token": 48.0, "peak_host_bytes": peaks[q.tokens]})
        for q in questions
    }
    record = bench.record(answers, Facts(weights_bytes=7))
    points = [(record.value("kv", at), record.value("peak_host", at)) for at in record.shapes() if at]
    assert points == [(960, 500), (9600, 900)]
    whole = {metric.name: metric for metric in record.metrics if not metric.cell}
    assert (whole["KV bytes per token"].value, whole["weights"].value, whole["peak host"].value) == (48, 7, 900)
    assert [name for name, metric in whole.items() if metric.exact] == ["KV bytes per token", "weights"]
    assert [metric.name for metric in record.headlines] == ["KV bytes per token", "peak host"]


def test_a_pool_is_not_a_cost_and_its_tokens_are_a_gain() -> None:
    bench = Memory(MemorySettings(lengths=(10,)))
    [question] = bench.questions(INPUTS)
    ran = {"cache_bytes": 2**30, "cache_tokens": 1000}
    record = bench.record({question.part: answer(question, [1.0], ran=ran)}, Facts())
    pool, tokens = record.metrics
    assert (pool.name, pool.better, pool.unit) == ("pool", None, "bytes")
    assert (tokens.name, tokens.better, tokens.allowance) == ("pool tokens", "higher", "memory")


def test_speeds_are_plotted_against_the_length_and_headed_by_the_longest_of_the_smallest_batch() -> None:
    bench = PrefillBench(PrefillSettings(lengths=(10, 1000), batch=(1, 4)))
    times = {f"{n}.b{batch}": [[0.5], [1.0], [2.0]] for n in (10, 1000) for batch in (1, 4)}
    record = bench.record(by_part(bench.questions(INPUTS), times), Facts())
    assert [metric.cell for metric in record.headlines] == [{"tokens": 1000, "batch": 1}]
    one, four = record.plots
    assert isinstance(one, Curve)
    assert isinstance(four, Curve)
    assert (one.key, one.series, four.series, one.log_x) == ("prefill", "batch 1", "batch 4", True)
    assert (one.x, one.y, one.low, one.high) == ((10, 1000), (10, 1000), (5, 500), (20, 2000))


def test_every_answer_has_prompts_of_its_own() -> None:
    bench = Decode(DecodeSettings(depths=(16,), n=2, batch=(2,), repeats=3, max_warmup=2))
    whole = next(q for q in bench.questions(INPUTS) if q.n)
    requests = [whole.request(number) for number in (-2, -1, 0, 1, 2)]
    asked = [prompt for request in requests for prompt in request.prompts]
    assert len(set(asked)) == len(asked) == 10
    assert all(len(request.groups()) == 1 and len(prompt) == 16 for request in requests for prompt in request.prompts)


def test_at_depth_0_a_prompt_has_one_token() -> None:
    bench = Decode(DecodeSettings(depths=(0,), n=2))
    question = bench.questions(INPUTS)[0]
    assert question.tokens == 0
    assert [len(prompt) for prompt in question.request(0).prompts] == [1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lengths": "12,x"}, r"lengths\.1\n.*valid integer"),
        ({"lengths": ()}, r"lengths\n.*at least 1 item"),
        ({"batch": (0,)}, r"batch\.0\n.*greater than or equal to 1"),
        ({"lenghts": (1,)}, r"lenghts\n.*not permitted"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        PrefillSettings.model_validate(values)
