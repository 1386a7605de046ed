"""GSM8K: its prompts, its figures on captures made by hand, whole runs, and the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from fidelab.axes.base import AxisInputs, AxisScore
from fidelab.axes.gsm8k import GSM8K
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate, Tokens
from fidelab.core import canonical_json
from fidelab.core.errors import InputError
from fidelab.inputs.texts import Text
from fidelab.inputs.tokens import Tokenizer
from fidelab.metrics.intervals import wilson_interval
from fidelab.models import Model, resolve
from fidelab.results.measurement import Measurement
from fidelab.results.plots import TablePlot, Texts
from tests.axes.captures import BYTES, make_arm, make_capture
from tests.engines import tiny
from tests.run.harness import Done, run_fake

STOP = 0


def _problems(folder: Path, *numbers: int, question: str = "Problem {i:03}: what is {n}?") -> Path:
    file = folder / "problems.jsonl"
    lines = [
        json.dumps({"question": question.format(i=i, n=n), "answer": f"It is {n}.\n#### {n}"})
        for i, n in enumerate(numbers)
    ]
    file.write_text("\n".join(lines) + "\n")
    return file


def _probe(tmp_path: Path, limit: int | None = None, tokenizer: Tokenizer | None = None, **settings: Any) -> Generate:
    inputs = AxisInputs(tokenizer or Tokenizer.load(resolve("fake")), Text("t", "x", (), ""), (), limit)
    data = str(_problems(tmp_path, 7, 1200))
    found = GSM8K(GSM8K.Settings.model_validate({"data": data, **settings})).request(inputs)
    assert isinstance(found, Generate)
    return found


def test_prompts_hold_the_worked_examples_and_the_question(tmp_path: Path) -> None:
    request = _probe(tmp_path, shots=3)
    text = bytes(request.prompts[1]).decode()
    assert text.count("Question: ") == 4
    assert text.endswith("Question: Problem 001: what is 1200?\nAnswer:")


def test_a_limit_chooses_among_the_files_problems(tmp_path: Path) -> None:
    axis = GSM8K(GSM8K.Settings.model_validate({"data": str(_problems(tmp_path, *range(5))), "limit": 2}))
    assert axis.available(AxisInputs(Tokenizer.load(resolve("fake")), Text("t", "x", (), ""), (), None)) == 5


def test_chat_puts_the_examples_as_turns(tmp_path: Path) -> None:
    class Turns:
        def chat(self, messages: Sequence[Any], tools: Sequence[Any]) -> Tokens:
            assert not tools
            return tuple("".join(f"<{message['role']}>{message['content']}" for message in messages).encode())

    fake = Tokenizer.load(resolve("fake"))
    tokenizer = replace(fake, template="chat", backend=Turns())  # type: ignore[arg-type]
    request = _probe(tmp_path, tokenizer=tokenizer, shots=1, template="chat")
    text = bytes(request.prompts[0]).decode()
    assert text.startswith("<user>A bakery")
    assert text.endswith("#### 15<user>Problem 000: what is 7?")
    assert dict(request.settings)["template"] == "chat"


def test_a_prompt_beyond_the_models_limit_names_the_shots(tmp_path: Path) -> None:
    longest = max(map(len, _probe(tmp_path).prompts))
    with pytest.raises(InputError, match=rf"shots: 8 has {longest} tokens; .* use fewer axes\.gsm8k\.shots"):
        _probe(tmp_path, limit=longest + 255)
    assert _probe(tmp_path, limit=longest + 256)


def _capture(store: Path, name: str, request: Generate, answers: Sequence[str | Sequence[int] | None]) -> Capture:
    """Answers as text (with the stop behind it), as ids, or none: the item failed."""
    ids = [[*answer.encode(), STOP] if isinstance(answer, str) else answer or [] for answer in answers]
    failed = {item: "empty output" for item, tokens in enumerate(ids) if not tokens}
    return make_capture(store / name, request, ids, make_arm(name), pieces=BYTES, failed=failed)


def _pair(
    store: Path, gold: Sequence[str], ref: Sequence[Any], test: Sequence[Any], stop: int = STOP, opened: str = ""
) -> Pair:
    request = Generate(
        "gsm8k",
        tuple((1, i, *opened.encode()) for i in range(len(gold))),
        400,
        (stop,),
        settings=(("n_predict", 400), ("shots", 0), ("template", "raw")),
        rows=False,
        notes=tuple(canonical_json({"gold": number, "id": f"p{i}"}) for i, number in enumerate(gold)),
    )
    return Pair.match(_capture(store, "f32", request, ref), _capture(store, "int4", request, test))


def _score(store: Path, gold: Sequence[str], ref: Sequence[Any], test: Sequence[Any]) -> AxisScore:
    return GSM8K(GSM8K.Settings()).score(_pair(store, gold, ref, test), 0)


def _counts(tmp_path: Path, both: int, lost: int, gained: int, neither: int) -> AxisScore:
    """A score from the four counts of right answers."""
    right, wrong = "#### 1", "#### 2"
    ref = [right] * both + [right] * lost + [wrong] * gained + [wrong] * neither
    test = [right] * both + [wrong] * lost + [right] * gained + [wrong] * neither
    return _score(tmp_path, ["1"] * len(ref), ref, test)


def _metric(score: AxisScore, name: str) -> Any:
    return score.found.metric(name)


def test_accuracies_have_wilson_intervals_and_mcnemar_looks_only_at_what_was_lost_and_gained(tmp_path: Path) -> None:
    score = _counts(tmp_path, both=20, lost=6, gained=2, neither=12)
    own, reference = _metric(score, "accuracy"), _metric(score, "reference_accuracy")
    assert (own.value, reference.value) == (22 / 40, 26 / 40)
    assert (own.ci, reference.ci) == (wilson_interval(22, 40), wilson_interval(26, 40))
    assert score.found.value("score") == pytest.approx(55.0)
    assert score.found.ci("score") == pytest.approx([100 * end for end in wilson_interval(22, 40)])
    found = [_metric(score, name).value for name in ("lost", "gained", "right_in_the_reference")]
    assert found == [6, 2, 26]
    assert _metric(score, "mcnemar_p").value == pytest.approx(stats.binomtest(2, 8).pvalue)


def test_a_clear_loss_costs_the_verdict_a_band(tmp_path: Path) -> None:
    score = _counts(tmp_path, both=30, lost=10, gained=0, neither=10)
    [sentence] = score.found.downgrades
    assert sentence.startswith("GSM8K accuracy falls by 20.0 points (95%: ")
    assert _metric(score, "difference").ci[1] < -5


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (2, 0), (10, 8), (0, 10)])
def test_what_may_be_chance_costs_nothing(lost: int, gained: int, tmp_path: Path) -> None:
    assert _counts(tmp_path, both=30, lost=lost, gained=gained, neither=20 - lost - gained).found.downgrades == ()


def test_a_reference_below_five_percent_is_not_measurable(tmp_path: Path) -> None:
    score = _counts(tmp_path, both=0, lost=1, gained=3, neither=20)
    assert score.not_measurable == "the reference solves 1 of 24 problems; below 5% a loss cannot be seen"
    assert (score.found.value("score"), score.found.ci("score"), score.found.downgrades) == (None, None, ())


def test_answers_are_compared_as_numbers_and_what_follows_a_question_of_its_own_is_none(tmp_path: Path) -> None:
    score = _score(tmp_path / "a", ["1200", "5"], ["#### 1,200", "so $5.00."], ["1200.0 km", "#### 6"])
    assert (_metric(score, "reference_accuracy").value, _metric(score, "accuracy").value) == (1.0, 0.5)
    ref, test = " 4\n\nQuestion: more?\nAnswer: 9", "I see.\nQuestion: what is 2 + 2?\nAnswer: 4"
    score = _score(tmp_path / "b", ["4"], [ref], [test])
    assert (_metric(score, "reference_accuracy").value, _metric(score, "accuracy").value) == (1.0, 0.0)
    assert _metric(score, "no_number").value == 1


def test_neither_the_stop_token_nor_reasoning_that_the_prompt_begins_is_an_answer(tmp_path: Path) -> None:
    answer = [*b"#### 4", ord("7")]  # a stop that reads as a digit
    stopped = _pair(tmp_path / "a", ["4"], [answer], ["#### 4"], stop=ord("7"))
    opened = _pair(tmp_path / "b", ["7"], ["So 7"], ["So 7"], opened="<think>\n")
    for pair, right in ((stopped, 1.0), (opened, 0.0)):
        assert _metric(GSM8K(GSM8K.Settings()).score(pair, 0), "reference_accuracy").value == right


def test_a_number_in_the_reasoning_alone_is_wrong_and_counted(tmp_path: Path) -> None:
    ref = ["<think>5, no</think>#### 7"] * 2
    score = _score(tmp_path, ["7", "7"], ref, ["<think>it is 7</think>I do not know.", "<think>It is 7, or"])
    assert (_metric(score, "reference_accuracy").value, _metric(score, "accuracy").value) == (1.0, 0.0)
    assert (_metric(score, "no_number").value, _metric(score, "numbers_in_the_reasoning_alone").value) == (2, 2)
    [texts] = [plot for plot in score.found.plots if isinstance(plot, Texts)]
    assert texts.pairs[1].candidate == "<think>It is 7, or"


def test_a_reference_that_never_ends_its_reasoning_is_told_to_write_longer(tmp_path: Path) -> None:
    score = _score(tmp_path, ["7"] * 2, ["<think>It is 7, or"] * 2, ["#### 7"] * 2)
    assert score.not_measurable.endswith(
        "2 of its answers have numbers only in their reasoning: raise axes.gsm8k.n_predict"
    )


def test_failed_items_are_counted_and_in_no_figure(tmp_path: Path) -> None:
    score = _score(tmp_path, ["1"] * 3, ["#### 1", "#### 1", None], ["#### 1", None, "#### 1"])
    assert (score.measurement().n_items, score.measurement().n_failed) == (3, 2)
    assert (_metric(score, "accuracy").value, _metric(score, "lost").value) == (1.0, 0)
    [table] = [plot for plot in score.found.plots if isinstance(plot, TablePlot)]
    assert [row[-1] for row in table.rows] == ["both right", "failed", "failed"]
    assert not score.identical


def test_a_candidate_without_any_answer_does_not_make_the_reference_unmeasurable(tmp_path: Path) -> None:
    score = _score(tmp_path, ["1"] * 3, ["#### 1"] * 3, [None] * 3)
    assert score.not_measurable == ""
    assert not score.usable.any()
    assert _metric(score, "accuracy").value is None


def test_identical_means_equal_ids_not_equal_numbers(tmp_path: Path) -> None:
    same = ["so #### 1", "#### 2"]
    assert _score(tmp_path / "a", ["1", "1"], same, same).identical
    assert not _score(tmp_path / "b", ["1", "1"], same, ["#### 1", "#### 2"]).identical


def test_the_table_has_a_row_per_problem_and_the_texts_those_lost(tmp_path: Path) -> None:
    ref = [f"{i} it is.\n#### {i}" for i in range(12)]
    test = [f"{i} it is.\n#### {i if i < 2 else 99}" for i in range(12)]
    table, texts = _score(tmp_path, [str(i) for i in range(12)], ref, test).found.plots
    assert isinstance(table, TablePlot)
    assert table.rows[1] == ("p1", "1", "1", "1", "both right")
    assert table.rows[2] == ("p2", "2", "2", "99", "lost")
    assert len(table.rows) == 12
    assert isinstance(texts, Texts)
    assert (texts.title, len(texts.pairs)) == ("Problems lost (first 8 of 10)", 8)
    assert [pair.label for pair in texts.pairs][:2] == ["problem p2", "problem p3"]
    assert (texts.pairs[0].reference, texts.pairs[0].candidate) == ("2 it is.\n#### 2", "2 it is.\n#### 99")
    assert texts.pairs[0].note == "right: 2, candidate: 99"


def test_length_counts_own_words_where_both_give_the_same_number(tmp_path: Path) -> None:
    """Other numbers, answers without one, what follows a question of its own, and answers cut at the budget do not."""
    ref = ["aa #### 1", "b #### 2", "cc #### 3\n\nQuestion: more #### 5", "x" * 394 + "#### 4", "#### 5"]
    test = ["aaaa bbbb #### 1", "b #### 9", "ccc #### 3", "#### 4", "none"]
    cut = [*ref[:3], list(ref[3].encode()), ref[4]]
    found = _score(tmp_path, ["1", "2", "3", "4", "5"], cut, test).found.metric("length_at_equal_answer")
    assert found is not None
    own = len(ref[0]) + 1 + len("cc #### 3\n\n")  # and the stop, where it came
    assert found.value == pytest.approx((len(test[0]) + 1 + len(test[2]) + 1) / own, abs=0.06)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Forty problems that the reference answers right; one candidate forgets half of them, one writes nothing."""
    cwd = tmp_path_factory.mktemp("gsm8k")
    numbers = [17 * i for i in range(40)]
    _problems(cwd, *numbers)
    answers = [[f"Problem {i:03}:", f" It is {n}.\n#### {n}"] for i, n in enumerate(numbers)]
    (cwd / "answers.json").write_text(json.dumps(answers))
    axes = {"gsm8k": {"data": "problems.jsonl", "shots": 1, "n_predict": 32}, "kld": {"windows": 8, "n_ctx": 16}}
    candidates = ["exact", "forget[every=2]", "forget[every=20]", "missing"]
    return run_fake(cwd, axes, candidates, engine_args={"answers": "answers.json"})


def _axis(done: Done, name: str) -> Measurement:
    return done.axis(name, "gsm8k")


def test_a_candidate_that_answers_as_the_reference_is_identical_and_one_that_writes_nothing_failed(done: Done) -> None:
    axis = _axis(done, "exact")
    assert (axis.status, axis.value("score"), axis.n_items, axis.n_failed) == ("identical", 100.0, 40, 0)
    assert (_axis(done, "missing").status, _axis(done, "missing").n_failed) == ("failed", 40)
    assert done.arm("missing")["verdict"]["band"] == "FAIL"


def test_a_clear_loss_lowers_the_verdict_and_an_unclear_one_does_not(done: Done) -> None:
    bands = {name: done.arm(name)["verdict"]["band"] for name in ("forget[every=2]", "forget[every=20]")}
    assert bands == {"forget[every=2]": "PASS", "forget[every=20]": "EXCELLENT"}  # equal distributions
    assert any(
        "GSM8K accuracy falls by 50.0 points" in fact for fact in done.arm("forget[every=2]")["verdict"]["because"]
    )


def test_bad_problems_exit_2_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    run = run_fake(tmp_path, {"gsm8k": {"data": "bad.jsonl"}}, ["exact"])
    assert run.code == 2
    assert "bad.jsonl, line 1: 'answer' must end in #### and a number" in run.err


@pytest.fixture
def _same_torch_afterwards() -> Iterator[None]:
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)


@pytest.mark.full
@pytest.mark.model
@pytest.mark.usefixtures("_same_torch_afterwards")
def test_the_embedded_model_answers_what_it_only_has_to_copy(smollm2: Model, tmp_path: Path) -> None:
    numbers = (10, 14, 20, 35)
    data = _problems(tmp_path, *numbers, question="Anna has {n} apples. How many apples does Anna have?")
    axis = GSM8K(GSM8K.Settings.model_validate({"data": str(data), "shots": 2, "n_predict": 16}))
    tokenizer = Tokenizer.load(smollm2)
    request = axis.request(AxisInputs(tokenizer, Text("t", "x", (), ""), (), smollm2.max_positions))
    assert isinstance(request, Generate)
    engine, sink = tiny.opened(smollm2.path), tiny.Answers()
    answer = engine.answer(request, sink)
    answers, estimator = list(sink.items.values()), str(answer.estimator)
    capture = make_capture(
        tmp_path / "c", request, answers, tiny.arm(smollm2.path), pieces=tokenizer.pieces(), estimator=estimator
    )
    score = axis.score(Pair.match(capture, capture), 0)
    [table] = [plot for plot in score.found.plots if isinstance(plot, TablePlot)]
    assert [Decimal(str(row[1])) for row in table.rows] == list(numbers)
    assert [row[4] for row in table.rows] == ["both right"] * 4
    assert score.identical
