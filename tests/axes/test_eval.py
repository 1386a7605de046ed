"""Short questions as a test: its prompts, its figures on captures made by hand, and a whole run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from scipy import stats

from fidelab.axes.base import AxisInputs, AxisScore
from fidelab.axes.eval import TEXT_KINDS, Eval
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate, Tokens
from fidelab.core import canonical_json
from fidelab.core.errors import CaptureError, InputError
from fidelab.inputs.questions.load import load_questions, retrieval_questions
from fidelab.inputs.questions.question import Question
from fidelab.inputs.texts import Text
from fidelab.inputs.tokens import Tokenizer
from fidelab.metrics.intervals import wilson_interval
from fidelab.models import resolve
from fidelab.results.measurement import Measurement
from fidelab.results.plots import TablePlot, Texts
from tests.axes.captures import BYTES, make_arm, make_capture
from tests.run.harness import Done, run_fake

STOP = 0
QUESTIONS = {question.id: question for question in load_questions()}


class Turns:
    """A chat template that shows roles and offered tools; ``refuses``: a role that it does not know."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses

    def chat(self, messages: Sequence[Any], tools: Sequence[Any]) -> Tokens:
        if self.refuses in [message["role"] for message in messages]:
            raise InputError("the chat template refuses the prompt")
        names = "".join(f"[{tool['function']['name']}]" for tool in tools)
        return tuple((names + "".join(f"<{one['role']}>{one['content']}" for one in messages)).encode())


def _asked(positions: int | None = None, backend: Turns | None = None, **settings: Any) -> Generate:
    tokenizer = Tokenizer.load(resolve("fake"))
    if backend is not None:
        tokenizer = replace(tokenizer, template="chat", backend=backend)  # type: ignore[arg-type]
    inputs = AxisInputs(tokenizer, Text("t", "x", (), ""), (), positions)
    found = Eval(Eval.Settings.model_validate(settings)).request(inputs)
    assert isinstance(found, Generate)
    return found


def _ids(request: Generate) -> list[str]:
    return [json.loads(note)["id"] for note in request.notes]


def test_every_question_of_text_is_asked_with_its_tools_through_the_chat_template() -> None:
    request = _asked(backend=Turns())
    asked = dict(zip(_ids(request), (bytes(prompt).decode() for prompt in request.prompts), strict=True))
    expected = {question.id for question in load_questions() if question.kind != "images"}
    assert set(asked) == expected | {"retrieval-1", "retrieval-2"}
    assert asked["tools-1"] == "[get_weather][set_timer]<user>How will the weather be in Oslo tomorrow?"
    assert asked["instructions-3"].startswith("<system>You answer each question with exactly one word.<user>")
    assert dict(request.settings) == {"n_predict": 150, "template": "chat"}
    assert max(question.max_tokens for question in load_questions()) <= request.max_tokens


def test_a_system_message_that_a_template_refuses_begins_the_question() -> None:
    request = _asked(backend=Turns(refuses="system"), kinds=["instructions"])
    text = bytes(request.prompts[_ids(request).index("instructions-10")]).decode()
    assert text == f"<user>{QUESTIONS['instructions-10'].messages[0]['content']}\n\nHow much is 2 plus 3?"


def test_plain_text_offers_no_tools_so_their_questions_are_left_out() -> None:
    assert not [name for name in _ids(_asked()) if name.startswith("tools-")]
    with pytest.raises(InputError, match=r"no question of kind tools can be asked: use other axes\.eval\.kinds"):
        _asked(kinds=["tools"])


def test_kinds_and_a_limit_choose_the_first_questions_of_each_kind() -> None:
    assert _ids(_asked(kinds=["sql", "arithmetic"], limit=2)) == ["arithmetic-1", "arithmetic-2", "sql-1", "sql-2"]
    inputs = AxisInputs(Tokenizer.load(resolve("fake")), Text("t", "x", (), ""), (), None)
    assert Eval(Eval.Settings.model_validate({"kinds": ["sql", "json"]})).available(inputs) == 6


def test_long_texts_are_asked_up_to_the_setting_and_as_many_as_the_model_can_read() -> None:
    settings: dict[str, Any] = {"kinds": ["retrieval"], "retrieval": 3000}
    assert _ids(_asked(**settings)) == [question.id for question in retrieval_questions([1024, 2048])]
    longest = max(len(question.messages[0]["content"]) for question in retrieval_questions([1024]))
    assert _ids(_asked(longest + 150, **settings)) == ["retrieval-1", "retrieval-2"]


def test_a_short_question_beyond_the_models_limit_is_refused() -> None:
    with pytest.raises(InputError, match=r"question arithmetic-1 has \d+ tokens; .* use a smaller axes\.eval\.n_pred"):
        _asked(20)


@pytest.mark.parametrize(
    ("kinds", "said"), [(["poems"], "unknown kind 'poems'"), (["images"], "needs a server"), ([], "at least 1")]
)
def test_kinds_that_cannot_be_asked_are_refused(kinds: list[str], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Eval.Settings.model_validate({"kinds": kinds})


# --------------------------------------------------------------------------------------------------- captures by hand


def _note(question: Question) -> str:
    tools = {"tools": list(question.tools)} if question.tools else {}
    return canonical_json({"id": question.id, "kind": question.kind, "check": dict(question.check), **tools})


def _capture(store: Path, name: str, request: Generate, answers: Sequence[str | None]) -> Capture:
    """Answers as text, with the stop after it, or none: the item failed."""
    ids = [[] if answer is None else [*answer.encode(), STOP] for answer in answers]
    failed = {item: "empty output" for item, tokens in enumerate(ids) if not tokens}
    return make_capture(store / name, request, ids, make_arm(name), pieces=BYTES, failed=failed)


def _request(notes: Sequence[str]) -> Generate:
    settings = (("n_predict", 400), ("template", "raw"))
    prompts = tuple((1, item + 1) for item in range(len(notes)))
    return Generate("eval", prompts, 400, (STOP,), settings=settings, rows=False, notes=tuple(notes))


def _score(store: Path, names: Sequence[str], ref: Sequence[str | None], test: Sequence[str | None]) -> AxisScore:
    request = _request([_note(QUESTIONS[name]) for name in names])
    pair = Pair.match(_capture(store, "f32", request, ref), _capture(store, "int4", request, test))
    return Eval(Eval.Settings()).score(pair, 0)


def _counts(store: Path, both: int, lost: int, gained: int, neither: int) -> AxisScore:
    """A score from the four counts of right answers."""
    ref = ["391"] * (both + lost) + ["x"] * (gained + neither)
    test = ["391"] * both + ["x"] * lost + ["391"] * gained + ["x"] * neither
    return _score(store, ["arithmetic-1"] * len(ref), ref, test)


def _value(score: AxisScore, name: str) -> Any:
    return score.found.value(name)


def test_accuracies_have_wilson_intervals_and_mcnemar_looks_only_at_what_was_lost_and_gained(tmp_path: Path) -> None:
    score = _counts(tmp_path, both=20, lost=6, gained=2, neither=12)
    assert (_value(score, "accuracy"), _value(score, "reference_accuracy")) == (22 / 40, 26 / 40)
    assert score.found.ci("accuracy", {}) == wilson_interval(22, 40)
    assert score.found.ci("reference_accuracy") == wilson_interval(26, 40)
    assert _value(score, "score") == pytest.approx(55.0)
    assert [_value(score, name) for name in ("lost", "gained", "right_in_the_reference")] == [6, 2, 26]
    assert _value(score, "mcnemar_p") == pytest.approx(stats.binomtest(2, 8).pvalue)
    assert _value(score, "difference") == pytest.approx(-10.0)
    assert (score.found.summary, score.found.reference_summary) == ("lost 6 of 26, gained 2", "answers 26 of 40")


def test_each_kind_has_an_accuracy_of_its_own(tmp_path: Path) -> None:
    names = ["arithmetic-1", "arithmetic-2", "sql-1", "tools-1"]
    right = [QUESTIONS[name].answer for name in names]
    score = _score(tmp_path, names, right, [right[0], "1", "DROP TABLE books", right[3]])
    found = {kind: score.found.metric("accuracy", {"kind": kind}) for kind in ("arithmetic", "sql", "tools", "json")}
    assert {kind: metric and metric.value for kind, metric in found.items()} == {
        "arithmetic": 0.5,
        "sql": 0.0,
        "tools": 1.0,
        "json": None,
    }
    assert score.found.ci("accuracy", {"kind": "arithmetic"}) == wilson_interval(1, 2)


def test_a_clear_loss_lowers_the_verdict_and_chance_does_not(tmp_path: Path) -> None:
    [sentence] = _counts(tmp_path / "a", both=30, lost=10, gained=0, neither=10).found.downgrades
    assert sentence.startswith("eval accuracy falls by 20.0 points (95%: ")
    assert _counts(tmp_path / "b", both=30, lost=2, gained=0, neither=18).found.downgrades == ()


def test_a_reference_below_five_percent_is_not_measurable(tmp_path: Path) -> None:
    score = _counts(tmp_path, both=0, lost=1, gained=3, neither=20)
    assert score.not_measurable == "the reference answers 1 of 24 questions; below 5% a loss cannot be seen"
    assert (_value(score, "score"), score.found.downgrades) == (None, ())


def test_reasoning_is_removed_and_an_answer_that_ends_within_it_is_wrong_and_counted(tmp_path: Path) -> None:
    names = ["arithmetic-1"] * 2
    score = _score(tmp_path / "a", names, ["<think>5</think>391"] * 2, ["<think>381</think>391", "<think>391, so"])
    assert (_value(score, "reference_accuracy"), _value(score, "accuracy")) == (1.0, 0.5)
    assert _value(score, "reasoning_alone") == 1
    cut = _score(tmp_path / "b", names, ["<think>391"] * 2, ["391"] * 2)
    assert cut.not_measurable.endswith("2 of its answers end before their reasoning does: raise axes.eval.n_predict")


def test_failed_items_are_counted_and_in_no_figure(tmp_path: Path) -> None:
    score = _score(tmp_path, ["arithmetic-1"] * 3, ["391", "391", None], ["391", None, "391"])
    assert (score.measurement().n_items, score.measurement().n_failed) == (3, 2)
    assert (_value(score, "accuracy"), _value(score, "lost")) == (1.0, 0)
    assert not score.identical


def test_identical_means_equal_ids_not_equal_grades(tmp_path: Path) -> None:
    names = ["arithmetic-1", "arithmetic-2"]
    assert _score(tmp_path / "a", names, ["391", "4"], ["391", "4"]).identical
    assert not _score(tmp_path / "b", names, ["391", "4"], ["391.", "4"]).identical


def test_the_table_names_the_fault_of_each_wrong_answer_and_texts_show_those_lost(tmp_path: Path) -> None:
    names = ["arithmetic-1", "reasoning-4", "tools-1", "sql-1"]
    right = [QUESTIONS[name].answer for name in names]
    wrong = [
        "It is 381.",
        "Yes and no",
        '<tool_call>{"name": "get_weather", "arguments": {"place": "Oslo"}}</tool_call>',
    ]
    table, texts = _score(tmp_path, names, right, [*wrong, right[3]]).found.plots
    assert isinstance(table, TablePlot)
    assert table.rows == (
        ("arithmetic-1", "right", "expected 391, found 381", "lost"),
        ("reasoning-4", "right", "the answer has no, too", "lost"),
        ("tools-1", "right", 'argument "place" is not in the schema; missing "city", "day"', "lost"),
    )
    assert isinstance(texts, Texts)
    assert texts.title == "Questions lost (3)"
    first = texts.pairs[0]
    assert (first.label, first.reference, first.candidate) == ("question arithmetic-1", "391", "It is 381.")
    assert first.note == "expected 391, found 381"


@pytest.mark.parametrize(
    "note",
    [
        *("{}", "[]", "3", '{"id": "a", "kind": "b", "check": {"guess": 1}}'),
        '{"id": "a", "kind": "b", "check": {"json": {"$ref": "file:///etc/passwd"}}}',
        '{"id": "a", "kind": "b", "check": {"call": "none"}, "tools": [{"function": {"name": "x"}}]}',
    ],
)
def test_saved_outputs_whose_notes_are_not_questions_are_refused(note: str, tmp_path: Path) -> None:
    request = _request([note])
    pair = Pair.match(_capture(tmp_path, "f32", request, ["1"]), _capture(tmp_path, "int4", request, ["1"]))
    with pytest.raises(CaptureError, match="the note of item 0 is not a question"):
        Eval(Eval.Settings()).score(pair, 0)


# -------------------------------------------------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A reference that answers every question right; one candidate forgets half of them."""
    cwd = tmp_path_factory.mktemp("eval")
    asked = [*load_questions(), *retrieval_questions([1024])]
    answers = [["\n\n".join(one["content"] for one in question.messages), question.answer] for question in asked]
    (cwd / "answers.json").write_text(json.dumps(answers))
    axes = {"eval": {"n_predict": 160}, "kld": {"windows": 8, "n_ctx": 16}}
    return run_fake(cwd, axes, ["exact", "forget[every=2]"], engine_args={"answers": "answers.json"})


def _axis(done: Done, name: str) -> Measurement:
    return done.axis(name, "eval")


def test_a_run_answers_every_question_of_text_and_names_those_that_a_candidate_loses(done: Done) -> None:
    assert done.code == 0, done.err
    exact, half = _axis(done, "exact"), _axis(done, "forget[every=2]")
    n = sum(question.kind not in ("images", "tools") for question in load_questions()) + 2
    assert (exact.status, exact.value("score"), exact.n_items, exact.n_failed) == ("identical", 100.0, n, 0)
    assert half.value("lost") == -(-n // 2)
    assert half.value("accuracy", {"kind": "retrieval"}) == 0.5
    assert {metric.cell["kind"] for metric in half.metrics if metric.cell} == set(TEXT_KINDS) - {"tools"}
    verdict = done.arm("forget[every=2]")["verdict"]
    assert any("eval accuracy falls by 50.9 points" in fact for fact in verdict["because"]), verdict["because"]
