"""GSM8K problems, worked examples, and answers read from text."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fidelab.core.errors import InputError, UnavailableError
from fidelab.inputs.gsm8k import Problem, ask, extract_answer, load_problems, load_shots, truncate_answer
from fidelab.models import hub

OFFICIAL = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_test.jsonl"


def _file(tmp_path: Path, content: str) -> str:
    file = tmp_path / "p.jsonl"
    file.write_text(content, encoding="utf-8")
    return str(file)


def _line(question: str = "How many?", answer: str = "Two.\n#### 2", **more: object) -> str:
    return json.dumps({"question": question, "answer": answer, **more}) + "\n"


ANSWERS = [
    ("He has 3 + 4 = 7 left.\n#### 7", "7"),
    ("####18", "18"),
    ("#### $1,234.50.", "1234.5"),
    ("#### -5", "-5"),
    ("#### -$5", "-5"),
    ("#### $-5", "-5"),
    ("#### \u22125", "-5"),  # minus sign
    ("#### **18** eggs", "18"),
    ("####\n\n18", "18"),
    ("#### 18\n\n#### 19", "18"),
    ("#### Step 1: add\nThat gives 12, so 5 are left.", "5"),
    ("#### Step 1: add\n#### 5\nnot 6", "5"),
    ("The answer is 18.", "18"),
    ("The answer is 18.00", "18"),
    ("It costs $.75", "0.75"),
    ("That is 25%.", "25"),
    ("16-3", "3"),
    ("10 - 3 = 7.", "7"),
    ("x=-3", "-3"),
    ("between 5\u201310 kg", "10"),  # en dash
    ("- 5 apples", "5"),
    ("#### 3/4", "0.75"),
    ("12/4", "3"),
    ("12,000,000 people", "12000000"),
    ("1,00,000 rupees", "100000"),
    ("3,4", "3.4"),  # a comma between two numbers without a blank is one of a decimal
    ("#### 2,5", "2.5"),
    ("#### 0,500 kg", "0.5"),
    ("#### 1.000.000", "1000000"),
    ("1.000", "1"),
    ("1.234,5", "1234.5"),
    ("1 234,56 €", "1234.56"),
    ("1,00,000.5", "100000.5"),
    ("#### 1 1/2", "1.5"),
    ("#### - 1 1/2 cups", "-1.5"),
    ("It is 2 and 3/4 hours.", "2.75"),
    ("1½ cups", "1.5"),
    ("¼", "0.25"),
    (r"\frac{3}{4}", "0.75"),
    ("1, 2, 3", "3"),
    ("1.5e3 grams", "1500"),
    ("1e999999", "999999"),
    ("$1{,}000$", "1000"),
    (r"\boxed{42}", "42"),
    ("\uff11\uff18", "18"),  # full-width digits
    ("<<16-3-4=9>>9 duck eggs", "9"),
    ("9" * 5000, "9" * 5000),
    ("#### - 7", "-7"),
    ("#### **- $7**", "-7"),
    ("#### \u2212 7", "-7"),
    ("####\n- 7 eggs", "7"),  # a list
    ("#### $ 7", "7"),
    ("#### \u20117", "-7"),  # non-breaking hyphen
    ("It is \u20107.", "-7"),
    ("16\u20113", "3"),
    ("#### 1 000", "1000"),
    ("12\u00a0345\u202f678.5", "12345678.5"),
    ("It is 1\u2009000 km.", "1000"),
    ("3 4", "4"),
    ("3 0004", "4"),
    ("2024 100", "100"),
    ("0 100", "100"),
    ("7\n000 100", "100"),
]


@pytest.mark.parametrize(("text", "number"), ANSWERS, ids=[text[:20] for text, _ in ANSWERS])
def test_number_of_an_answer(text: str, number: str) -> None:
    assert extract_answer(text) == Decimal(number)


UNREADABLE = ["3/0", "1.2.3", "#### 1,23,4", "1,2,3", "1.000.00", "1,234.567.890", "#### 1 3/2", "1 1/0"]


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_number_whose_notation_is_of_no_number_is_not_read_in_part(text: str) -> None:
    assert extract_answer(text) is None


def written(whole: int, decimals: str, thousands: str, point: str) -> str:
    """A number in one notation, by hand."""
    digits = str(whole)
    groups: list[str] = []
    while thousands and len(digits) > 3:
        digits, group = digits[:-3], digits[-3:]
        groups.insert(0, group)
    return thousands.join([digits, *groups]) + (point + decimals if decimals else "")


NOTATIONS = [("", "."), (",", "."), (" ", "."), ("", ","), (".", ","), (" ", ","), ("\u00a0", ",")]


@pytest.mark.parametrize(("thousands", "point"), NOTATIONS)
@pytest.mark.parametrize("form", ["#### {}", "#### ${}.", "That is {} in all.", "#### -{}"])
def test_both_notations_of_a_number_are_read_alike(thousands: str, point: str, form: str) -> None:
    draw = random.Random(0)
    for _ in range(200):
        whole = draw.randrange(10 ** draw.randrange(1, 10))
        decimals = "".join(draw.choices("0123456789", k=draw.choice((0, 1, 2, 4))))
        if thousands == "." and not decimals and 1000 <= whole < 1_000_000:
            continue  # 1.234 is read as a decimal
        sign = -1 if "-" in form else 1
        text = form.format(written(whole, decimals, thousands, point))
        assert extract_answer(text) == sign * Decimal(f"{whole}.{decimals or 0}"), text


def test_mixed_numbers_are_the_sum_of_their_terms() -> None:
    draw = random.Random(0)
    for _ in range(200):
        whole, under = draw.randrange(1000), draw.randrange(2, 100)
        over = draw.randrange(1, under)
        expected = whole + Decimal(over) / under
        for text in (f"#### {whole} {over}/{under}", f"so {whole} and {over}/{under} are left"):
            assert extract_answer(text) == expected
        assert extract_answer(f"#### {over}/{under}") == Decimal(over) / under


@pytest.mark.parametrize("text", ["", "####", "I do not know.", "a,b - $ %", "one half"])
def test_text_without_a_number_has_no_answer(text: str) -> None:
    assert extract_answer(text) is None


def test_equality_is_numeric() -> None:
    assert extract_answer("#### 18.00") == extract_answer("so $18 it is") == Decimal(18)


def test_a_question_of_the_models_own_ends_its_answer() -> None:
    text = " 2 + 2 = 4.\n#### 4\n\nQuestion: How many days has 1 week?\nAnswer: 7"
    assert truncate_answer(text) == " 2 + 2 = 4.\n#### 4\n\n"
    assert truncate_answer("The Question: is easy") == "The Question: is easy"


def test_problems_are_read_with_their_gold_numbers(tmp_path: Path) -> None:
    source = _file(tmp_path, "\ufeff" + _line() + "\n" + _line(" Next? ", "x\n#### 1,200 ", id="b"))
    first, second = load_problems(source)
    assert first == Problem("1", "How many?", "Two.\n#### 2", Decimal(2))
    assert (second.id, second.question, second.gold) == ("b", "Next?", Decimal(1200))
    assert load_problems(source, limit=1) == (first,)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2: write an object with text in 'question' and 'answer'"),
        ('{"question": "a"}', "line 2: write an object"),
        ('{"question": "a", "answer": 3}', "line 2: write an object"),
        ('{"question": " ", "answer": "#### 3"}', "line 2: write an object"),
        ('{"question": "a", "answer": "3"}', "line 2: 'answer' must end in #### and a number"),
        ('{"question": "a", "answer": "#### three"}', "line 2: 'answer' must end"),
        ('{"question": "a", "answer": "#### 3 or 4"}', "line 2: 'answer' must end"),
    ],
)
def test_bad_line_is_named_with_its_file(line: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"p\.jsonl, {says}") as caught:
        load_problems(_file(tmp_path, _line() + line + "\n"))
    assert "\n" not in str(caught.value)


def test_a_missing_file_names_what_there_is_and_one_without_problems_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no GSM8K problems at '.*none\.jsonl': write gsm8k or the path"):
        load_problems(str(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="there is none"):
        load_problems(_file(tmp_path, "\n\n"))


def test_the_hubs_rows_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test.parquet"
    rows = [json.loads(_line(f"How many of {i}?", f"#### {i}")) for i in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), file)
    asked: list[tuple[str, str]] = []

    def fetch(repo: str, name: str) -> Path:
        asked.append((repo, name))
        return file

    monkeypatch.setattr(hub, "dataset_file", fetch)
    assert [(p.id, p.gold) for p in load_problems("gsm8k", 2)] == [("1", Decimal(0)), ("2", Decimal(1))]
    assert asked == [("openai/gsm8k", "main/test-00000-of-00001.parquet")]


def test_without_the_hub_the_error_names_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(repo: str, name: str) -> Path:
        raise UnavailableError(f"cannot fetch {repo}")

    monkeypatch.setattr(hub, "dataset_file", fail)
    with pytest.raises(UnavailableError, match=r"cannot fetch openai/gsm8k.*axes\.gsm8k\.data"):
        load_problems("gsm8k")


@pytest.mark.skipif(not OFFICIAL.is_file(), reason="the official test set lies beside the project on some machines")
def test_every_gold_answer_of_the_official_test_set_is_read() -> None:
    problems = load_problems(str(OFFICIAL))
    assert len(problems) == 1319
    assert all(extract_answer(problem.answer) == problem.gold for problem in problems)
    assert all(problem.gold == problem.gold.to_integral_value() for problem in problems)
    assert {shot.question for shot in load_shots(8)}.isdisjoint(problem.question for problem in problems)


def test_every_step_of_the_worked_examples_is_right() -> None:
    shots = load_shots(8)
    assert len(shots) == 8
    for shot in shots:
        steps = re.findall(r"(\d[\d +*/-]*) = (\d+)", shot.answer)
        assert len(steps) >= 3
        for left, right in steps:
            assert eval(left) == int(right), shot.id  # arithmetic of the package's own file
        assert Decimal(steps[-1][1]) == shot.gold


def test_raw_prompts_go_on_after_answer_chat_prompts_are_turns_and_neither_holds_the_gold_answer() -> None:
    problem = Problem("p", "How many?", "secret #### 987654", Decimal(987654))
    [message] = ask(problem, load_shots(2), "raw")
    text = message["content"]
    assert text.endswith("\n\nQuestion: How many?\nAnswer:")
    assert text.count("Question: ") == 3
    assert "#### 15\n\nQuestion: A ferry" in text
    messages = ask(problem, load_shots(2), "chat")
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2 + ["user"]
    assert messages[-1]["content"] == "How many?"
    assert messages[1]["content"].endswith("#### 15")
    for template in ("raw", "chat"):
        assert "987654" not in json.dumps(ask(problem, load_shots(8), template))
