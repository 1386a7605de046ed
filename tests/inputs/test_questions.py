"""Short questions: their data file, their graders, calls of tools, and the process that runs a model's SQL."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fidelab.core.errors import InputError
from fidelab.inputs.files import DATA
from fidelab.inputs.questions import sandbox
from fidelab.inputs.questions.calls import MAX_CHARS, read_reply
from fidelab.inputs.questions.graders import CONSTRAINTS, grade, validate_check, validate_schema
from fidelab.inputs.questions.load import LENGTHS, load_questions, read_questions, retrieval_questions
from fidelab.inputs.questions.question import KINDS, Call, Grade, Question, Reply
from fidelab.inputs.questions.sandbox import QueryError, rows_of

ALL = (*load_questions(), *retrieval_questions())
BY_ID = {question.id: question for question in ALL}
HOSTILE = {
    "empty": "",
    "spaces": " \n\t ",
    "zero bytes": "\0" * 50,
    "half a pair": "\ud800\udfff\ud800 391",
    "escaped half": '{"name": "\\ud800", "arguments": {"city": "\\udfff"}}',
    "deep lists": "[" * 100_000,
    "deep objects": '{"a":' * 50_000,
    "closed deep lists": "[" * 9000 + "]" * 9000,
    "long number": "9" * 200_000,
    "long fraction": f"1/{'3' * 30_000}",
    "long power": "1e" + "9" * 1000,
    "not finite": '{"name": NaN, "age": Infinity, "city": -Infinity}',
    "many fences": "```" * 30_000,
    "many calls": "<tool_call>" * 20_000,
    "many markers": '[TOOL_CALLS] [{"name": "a", "arguments": {}}]' * 2000,
    "many boxes": "\\boxed{" * 20_000,
    "many numbers": "1 " * 100_000,
    "many dots": "1." * 100_000,
    "other digits": "٣٩١ ३९१ ²",
    "directions": "\u202e391\u202c \u200b",
    "no object": '<tool_call>{"name": 3, "arguments": []}</tool_call>',
    "null": "null",
    "a call without arguments": '{"name": "get_weather", "arguments": "{\\"city\\": "}',
}


def reply_to(question: Question, text: str) -> Reply:
    return read_reply(text) if question.tools else Reply(text)


def graded(check: dict[str, Any], text: str) -> Grade:
    return grade(Question("x-1", "reasoning", (), 8, validate_check(check), text), Reply(text))


def fault(check: dict[str, Any], text: str) -> str:
    found = graded(check, text)
    assert found.right == (not found.fault)
    return found.fault


# ------------------------------------------------------------------------------------------------------- the questions


def test_there_are_sixty_questions_of_ten_kinds_within_the_budget_of_tokens() -> None:
    assert len(load_questions()) >= 60
    assert {question.kind for question in ALL} == set(KINDS)
    assert sum(question.max_tokens for question in ALL) <= 2829  # 5,000 with those of serving checks


def test_every_id_is_unique_and_begins_with_its_kind() -> None:
    assert len(BY_ID) == len(ALL)
    assert all(question.id.startswith(f"{question.kind}-") for question in ALL)


def test_prompts_are_unique_but_for_those_about_pictures() -> None:
    asked = Counter(json.dumps([*question.messages, question.image]) for question in ALL)
    assert max(asked.values()) == 1


def test_no_placeholder_is_left_in_a_prompt() -> None:
    texts = [message["content"] for question in ALL for message in question.messages]
    assert not [text for text in texts if "{database}" in text or "{schema}" in text]
    assert any("CREATE TABLE books" in text for text in texts)


@pytest.mark.parametrize("question", ALL, ids=lambda question: question.id)
def test_the_example_of_an_answer_is_right(question: Question) -> None:
    assert grade(question, reply_to(question, question.answer)) == Grade(True)


@pytest.mark.parametrize("question", ALL, ids=lambda question: question.id)
def test_the_answer_to_another_question_is_wrong(question: Question) -> None:
    others = [other for other in ALL if other.check != question.check and other.kind != "images"]
    at = ALL.index(question)
    for other in (others[at % len(others)], BY_ID["retrieval-1" if question.id != "retrieval-1" else "retrieval-2"]):
        found = grade(question, reply_to(question, other.answer))
        assert not found.right, other.id
        assert 0 < len(found.fault) <= 240


@pytest.mark.parametrize("question", ALL, ids=lambda question: question.id)
def test_an_example_fits_its_budget_of_tokens(question: Question) -> None:
    assert len(question.answer) <= 4 * question.max_tokens


@pytest.mark.parametrize("length", LENGTHS)
def test_a_long_text_has_its_length_and_its_fact_at_two_depths(length: int) -> None:
    depths = []
    for question in retrieval_questions([length]):
        [message] = question.messages
        text = message["content"]
        assert text.count(question.answer) == 1
        assert len(text) / 4 == pytest.approx(length, rel=0.03)
        assert question.context == length
        depths.append(text.index(question.answer) / len(text))
    assert depths == pytest.approx([0.25, 0.75], abs=0.05)


def test_long_texts_are_the_same_in_every_process_and_have_different_answers() -> None:
    assert len({question.answer for question in retrieval_questions()}) == 2 * len(LENGTHS)
    script = (
        "from fidelab.inputs.questions.load import retrieval_questions as r; import hashlib; "
        "print(hashlib.sha256(str(r([1024])).encode()).hexdigest())"
    )
    words = [sys.executable, "-c", script]
    runs = {subprocess.run(words, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(runs) == 1


def test_an_unknown_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths are 1024, .*; found 3000"):
        retrieval_questions([3000])


def entry(**changes: Any) -> dict[str, Any]:
    base = {"id": "arithmetic-1", "kind": "arithmetic", "prompt": "2 + 2?", "max_tokens": 8}
    return {**base, "check": {"number": "4"}, "answer": "4", **changes}


@pytest.mark.parametrize(
    ("questions", "said"),
    [
        ([entry(kind="poems")], "question arithmetic-1: kind is one of"),
        ([entry(id="sum-1")], "question sum-1: id begins with arithmetic-"),
        ([entry(max_tokens=0)], "max_tokens is a number from 1 to 256"),
        ([entry(max_tokens=True)], "max_tokens is a number from 1 to 256"),
        ([entry(prompt=" ")], "prompt is text"),
        ([entry(colour="red")], "unknown colour"),
        ([{"id": "arithmetic-1"}], "missing answer, check, kind, max_tokens, prompt"),
        (["text"], "question 1: write an object"),
        ([entry(check={})], "check maps graders"),
        ([entry(check={"guess": 1})], "check has the graders .*; found 'guess'"),
        ([entry(check={"number": "many"})], "number needs a number, as text; found 'many'"),
        ([entry(check={"words": "yes"})], "words needs a list of texts"),
        ([entry(check={"constraints": [{"n_verbs": 1}]})], "constraints needs a list of constraints"),
        ([entry(check={"constraints": [{"n_words": "one"}]})], "constraints needs a list of constraints"),
        ([entry(check={"json": {"type": "text"}})], "json needs a JSON schema"),
        ([entry(check={"json": {"$ref": "http://example.org"}})], "json needs a JSON schema"),
        ([entry(check={"sql": {"database": "none", "rows": [[1]]}})], "database is one of"),
        ([entry(check={"sql": {"setup": "CREATE TABLE t(x)", "rows": []}})], "sql needs setup"),
        ([entry(image={"color": "red"})], "image describes the picture of a question of kind images"),
        ([entry(id="images-1", kind="images")], "image describes the picture"),
        ([entry(id="images-1", kind="images", image={"color": "mauve"})], "color is one of"),
        ([entry(tools=["fly"])], "tools lists the functions of a question of kind tools"),
        ([entry(id="tools-1", kind="tools", tools=["fly"], check={"call": "none"})], "tools are .*; found 'fly'"),
        ([entry(), entry()], "question arithmetic-1 is there twice"),
        ({}, "write a list 'questions'"),
    ],
)
def test_a_damaged_file_is_refused_with_question_and_field(questions: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.yaml"
    path.write_text(yaml.safe_dump({"questions": questions}))
    with pytest.raises(InputError, match=said):
        read_questions(path)


def test_a_file_that_is_not_yaml_or_names_objects_of_python_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "questions.yaml"
    for text in ("questions: [", "questions: !!python/object/apply:os.system [ls]"):
        path.write_text(text)
        with pytest.raises(InputError, match="is not YAML"):
            read_questions(path)


def test_the_data_file_is_in_the_package() -> None:
    assert (DATA / "questions.yaml").is_file()


# ------------------------------------------------------------------------------------------------------------- graders


@pytest.mark.parametrize(
    "text",
    [
        *("391", "391.", "**391**", "$391", "391%", "The answer is 391.", "148 + 243 = 391", "391.0"),
        *("\\boxed{391}", "\\(\\boxed{391}\\) since 148 + 243", "```\n391\n```", "0391", "#### 391\nThat is 1 answer"),
    ],
)
def test_the_last_number_is_read_in_every_notation(text: str) -> None:
    assert graded({"number": "391"}, text).right


def test_thousands_fractions_and_decimals_are_compared_as_numbers() -> None:
    assert graded({"number": "1250"}, "1,250").right
    assert graded({"number": "3/4"}, "0.75").right
    assert graded({"number": "0.75"}, "\\boxed{\\frac{3}{4}}").right
    assert graded({"number": "-5"}, "−5").right
    assert not graded({"number": "5"}, "-5").right


def test_a_wrong_number_and_none_are_named() -> None:
    assert fault({"number": "391"}, "It is 381") == "expected 391, found 381"
    assert fault({"number": "391"}, "many") == "expected 391, found many: no number that can be read"
    assert fault({"number": "391"}, "") == "expected 391, found nothing: no number that can be read"


def test_words_ignore_case_punctuation_and_markup() -> None:
    for text in ("Tuesday", "**tuesday**.", "It is: TUESDAY!", '"Tuesday"', "`Tuesday`\n"):
        assert graded({"words": ["Tuesday"]}, text).right
    assert graded({"words": ["ten past two"]}, "Ten past two.").right
    assert fault({"words": ["Tuesday"]}, "Tuesdays") == "expected Tuesday, found Tuesdays"
    assert fault({"words": ["2", "two"]}, "12") == "expected 2, found 12"


def test_a_word_next_to_a_wrong_one_is_wrong() -> None:
    check = {"words": ["yes"], "without": ["no"]}
    assert graded(check, "Yes, I know.").right
    assert fault(check, "Yes and no") == "the answer has no, too"


def test_output_is_compared_exactly_but_for_a_fence_and_trailing_space() -> None:
    check = {"output": "0\n1\n2"}
    for text in ("0\n1\n2", "0 \n1\t\n2\n\n", "```\n0\n1\n2\n```", "```text\n0\n1\n2\n```", "0\r\n1\r\n2"):
        assert graded(check, text).right
    assert fault(check, "0 1 2") == "expected 0 / 1 / 2, found 0 1 2"
    assert not graded({"output": "  x"}, "x").right
    assert not graded({"output": "ELM"}, "elm").right


def test_json_has_to_fulfil_the_schema_and_to_equal_the_value() -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    check = {"json": schema, "equals": {"age": 8}}
    for text in ('{"age": 8}', '```json\n{"age": 8}\n```', 'Here it is:\n```\n{"age": 8.0}\n```'):
        assert graded(check, text).right
    assert fault(check, '{"age": "8"}') == "at $.age: '8' is not of type 'integer'"
    assert fault(check, "{}") == "'age' is a required property"
    assert fault(check, '{"age": 9}') == 'expected {"age": 8}, found {"age": 9}'
    assert fault(check, "age: 8").startswith("the answer is not JSON: ")
    assert fault(check, '{"age": 8').startswith("the answer is not JSON: ")


def test_true_is_not_one_and_one_is_not_true() -> None:
    assert not graded({"equals": {"open": True}}, '{"open": 1}').right
    assert not graded({"equals": {"open": 1}}, '{"open": true}').right


CONSTRAINED = {
    "n_words": (2, "Good day!", "Good", "expected 2 words, found 1"),
    "n_lines": (2, "a\n\nb", "a", "expected 2 lines, found 1"),
    "n_sentences": (1, "It is 3.5 m.", "One. Two.", "expected 1 sentence, found 2"),
    "n_bullets": (2, "- a\n- b", "- a\nb", "expected 2 bullets, found 1"),
    "upper_case": (True, "PARIS 1", "Paris", "expected capital letters alone"),
    "lower_case": (True, "rome.", "Rome", "expected small letters alone"),
    "starts_with": ("Answer:", "Answer: x", "answer: x", 'expected "Answer:" at the start, found answer: x'),
    "ends_with": ("DONE", "5. DONE.", "DONE 5", 'expected "DONE" at the end, found DONE 5'),
    "contains": ("moon", "The Moon!", "moons", 'expected the word "moon", found moons'),
    "lacks": ("e", "This is short", "Here", '"e" is in the answer'),
    "only_digits": (True, "2000", "2000.", "expected digits alone, found 2000."),
    "exactly": ("a b", "a b\n", "a  b", 'expected exactly "a b", found a b'),
}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_constraint_accepts_what_fulfils_it_and_says_what_does_not(name: str) -> None:
    wanted, right, wrong, said = CONSTRAINED[name]
    assert graded({"constraints": [{name: wanted}]}, right).right
    assert fault({"constraints": [{name: wanted}]}, wrong) == said


def test_all_broken_constraints_are_listed() -> None:
    check = {"constraints": [{"n_words": 1}, {"lower_case": True}, {"contains": "x"}]}
    assert (
        fault(check, "A b")
        == 'expected 1 word, found 2; expected small letters alone; expected the word "x", found A b'
    )


# --------------------------------------------------------------------------------------------------------------- tools

WEATHER = BY_ID["tools-1"]


def called(arguments: str, name: str = "get_weather", question: Question = WEATHER) -> str:
    return grade(question, Reply("", (Call(name, arguments),))).fault


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"city": "Oslo", "day": "tomorrow"}', ""),
        ('{"day": "tomorrow", "city": "oslo "}', ""),
        (
            '{"location": "Oslo", "day": "tomorrow"}',
            'argument "location" is not in the schema; missing "city"',
        ),
        ('{"city": "Oslo"}', 'missing "day"'),
        ("", 'missing "city", "day"'),
        ('{"city": "Bergen", "day": "tomorrow"}', 'argument "city": expected "Oslo", found "Bergen"'),
        ('{"city": 3, "day": "tomorrow"}', "argument \"city\": 3 is not of type 'string'"),
        ('{"city": "Oslo", "day": "Friday"}', "argument \"day\": 'Friday' is not one of ['today', 'tomorrow']"),
        ('["Oslo"]', 'the arguments are not an object, found ["Oslo"]'),
    ],
)
def test_a_fault_of_arguments_names_the_argument(arguments: str, said: str) -> None:
    assert called(arguments) == said


def test_arguments_that_are_not_json_are_named() -> None:
    assert called('{"city": ').startswith("the arguments are not JSON: ")
    assert called('{"city": NaN}').startswith("the arguments are not JSON: ")


def test_a_wrong_function_no_call_and_several_calls_are_named() -> None:
    assert called("{}", "set_timer") == 'expected a call of "get_weather", found "set_timer"'
    assert grade(WEATHER, Reply("It is sunny.")).fault == "no tool was called"
    assert grade(WEATHER, Reply("", (Call("get_weather", "{}"),) * 2)).fault == "expected 1 call, found 2"


def test_a_call_that_the_server_left_in_the_text_is_named() -> None:
    assert grade(WEATHER, Reply(WEATHER.answer)).fault == "no tool was called (the text has a call that was not parsed)"


def test_a_call_where_none_is_right_is_wrong() -> None:
    question = BY_ID["tools-6"]
    assert called('{"minutes": 8}', "set_timer", question) == 'no call is right, found a call of "set_timer"'
    assert grade(question, Reply("A spider has eight legs.")).right
    assert not grade(question, Reply("six")).right


ARGUMENTS = {"city": "Oslo", "day": "tomorrow"}


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>',
        'I look it up.\n<tool_call>{"name": "get_weather", "arguments": %s}',
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": %s}]',
        '[TOOL_CALLS][{"name": "get_weather", "arguments": %s, "id": "VvvODy9mT"}]',
        "[TOOL_CALLS]get_weather[ARGS]%s",
        "[TOOL_CALLS]get_weather%s",
        "[TOOL_CALLS]get_weather[CALL_ID]VvvODy9mT[ARGS]%s",
        '{"name": "get_weather", "parameters": %s}',
        '<|python_tag|>{"name": "get_weather", "parameters": %s}',
        '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": %s}',
        '```json\n{"name": "get_weather", "arguments": %s}\n```',
        '{"type": "function", "function": {"name": "get_weather", "parameters": %s}}',
    ],
)
def test_calls_are_read_in_the_forms_of_chat_templates(text: str) -> None:
    reply = read_reply(text % json.dumps(ARGUMENTS))
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [("get_weather", ARGUMENTS)]
    assert grade(WEATHER, reply).right


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Oslo", "days": 3}<|call|>',
        "<|tool▁call▁begin|>x<|tool▁sep|>y".replace("|", "｜")
        .replace("x", "function")
        .replace("y", 'get_weather\n```json\n{"city": "Oslo", "days": 3}\n```')
        + "<｜tool▁call▁end｜>",
        '```tool_code\nget_weather(city="Oslo", days=3)\n```',
    ],
    ids=["qwen3-coder", "glm", "gpt-oss", "deepseek", "gemma"],
)
def test_calls_are_read_in_forms_that_are_not_json_alone(text: str) -> None:
    [call] = read_reply(text).calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo", "days": 3})


def test_several_calls_of_one_answer_are_all_read() -> None:
    one = '{"name": "set_timer", "arguments": {"minutes": %d}}'
    for text in (
        f"<tool_call>{one % 1}</tool_call>\n<tool_call>{one % 2}</tool_call>",
        f"[TOOL_CALLS] [{one % 1}, {one % 2}]",
        f"{one % 1}; {one % 2}",
    ):
        assert [json.loads(call.arguments)["minutes"] for call in read_reply(text).calls] == [1, 2]


def test_text_and_json_that_are_not_calls_stay_text() -> None:
    for text in ("Sunny.", '{"city": "Oslo"}', "[1, 2]", '{"name": "Lena", "age": 3}', "```\nx\n```"):
        assert read_reply(text) == Reply(text)


def test_a_marker_without_a_readable_call_is_a_call_without_a_name() -> None:
    reply = read_reply("<tool_call>get_weather(Oslo)</tool_call>")
    assert grade(WEATHER, reply).fault == "the call cannot be read: get_weather(Oslo)"


# ----------------------------------------------------------------------------------------------------- hostile answers


@pytest.mark.parametrize("hostile", HOSTILE)
def test_no_text_makes_a_grader_raise(hostile: str) -> None:
    text = HOSTILE[hostile]
    for kind in KINDS:
        question = next(question for question in ALL if question.kind == kind)
        for reply in (reply_to(question, text), Reply(text, (Call(text, text), Call("get_weather", text)))):
            found = grade(question, reply)
            found.fault.encode()
            assert len(found.fault) <= 240
            assert found.fault.isprintable()
        grade(question, Reply("", (Call("get_weather", text),))).fault.encode()
    for name in CONSTRAINTS:
        graded({"constraints": [{name: CONSTRAINED[name][0]}]}, text)


def test_both_ends_of_a_long_answer_are_read() -> None:
    assert graded({"number": "391"}, "x" * 10 * MAX_CHARS + " 391").right
    assert graded({"constraints": [{"starts_with": "Answer:"}]}, "Answer: " + "x" * 10 * MAX_CHARS).right


def test_a_schema_that_refers_to_another_place_is_refused() -> None:
    refused: list[Any] = [{"$ref": "file:///etc/passwd"}, {"items": {"pattern": "(a+)+$"}}, [], "text", {"type": 3}]
    for schema in refused:
        with pytest.raises(ValueError):
            validate_schema(schema)


# ----------------------------------------------------------------------------------------------------------------- SQL

SETUP = "CREATE TABLE t (a INTEGER, b TEXT); INSERT INTO t VALUES (1, 'x'), (2, 'y'), (3, 'y');"


def sql(query: str, rows: list[list[Any]], *, ordered: bool = False) -> str:
    return fault({"sql": {"setup": SETUP, "rows": rows, "ordered": ordered}}, query)


def error_of(query: str) -> str:
    with pytest.raises(QueryError) as found:
        rows_of(SETUP, query)
    return str(found.value)


def test_rows_are_compared_and_their_order_only_where_asked() -> None:
    assert sql("SELECT b, COUNT(*) FROM t GROUP BY b", [["y", 2], ["x", 1]]) == ""
    assert sql("```sql\nSELECT a FROM t ORDER BY a DESC;\n```", [[3], [2], [1]], ordered=True) == ""
    assert sql("SELECT a FROM t ORDER BY a", [[3], [2], [1]], ordered=True) == "the rows are right, in another order"
    assert sql("SELECT a FROM t ORDER BY a", [[3], [2], [1]]) == ""
    assert sql("SELECT AVG(a), 1e0 FROM t", [[2, 1]]) == ""
    assert sql("SELECT 1.0 / 3", [[0.333333]]) == ""


def test_wrong_rows_are_named() -> None:
    assert sql("SELECT a FROM t", [[1], [2]]) == "expected 2 rows, found 3"
    assert sql("SELECT b FROM t WHERE a = 1", [["y"]]) == "expected rows such as (y), found (x)"
    assert sql("SELECT 'y', 1", [["y"]]) == "expected rows such as (y), found (y, 1)"
    assert sql("", [[1]]) == "no SQL in the answer"
    assert sql("SELECT nme FROM t", [[1]]) == "the query fails: no such column: nme"


@pytest.mark.parametrize(
    "query",
    [
        *("ATTACH DATABASE '{}' AS other", "PRAGMA user_version", "PRAGMA writable_schema = 1"),
        *("SELECT * FROM pragma_table_info('t')", "SELECT * FROM sqlite_master", "SELECT load_extension('{}')"),
        *("INSERT INTO t VALUES (4, 'z')", "UPDATE t SET a = 0", "DELETE FROM t", "DROP TABLE t", "CREATE TABLE u (x)"),
        *(
            "CREATE TEMP TABLE u (x)",
            "CREATE VIEW v AS SELECT 1",
            "VACUUM INTO '{}'",
            "BEGIN",
            "ANALYZE",
            "DETACH main",
        ),
        *("SELECT zeroblob(1000000000)", "SELECT randomblob(1000000000)", "SELECT hex(zeroblob(10))"),
        *("SELECT 1; DROP TABLE t", "SELECT writefile('{}', 'x')", "SELECT fts3_tokenizer('simple')"),
        "CREATE TRIGGER r AFTER INSERT ON t BEGIN SELECT 1; END",
    ],
)
def test_a_query_may_read_tables_and_nothing_else(query: str, tmp_path: Path) -> None:
    path = tmp_path / "written"
    assert "the query" in error_of(query.format(path))
    assert not path.exists()
    assert rows_of(SETUP, "SELECT COUNT(*), SUM(a) FROM t") == ((3, 6),)


ENDLESS = "WITH RECURSIVE r (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r)"
# sixteen levels, each of which names the one before it three times: SQLite copies the first one 3^16 times
COPIES = ", ".join(f"c{i} (x) AS (SELECT a.x FROM c{i - 1} a, c{i - 1} b, c{i - 1} d)" for i in range(1, 17))


@pytest.mark.parametrize(
    "query",
    [
        *(f"{ENDLESS} SELECT n FROM r", f"{ENDLESS} SELECT MAX(n) FROM r"),
        "SELECT COUNT(*) FROM t a, t b, t c, t d, t e, t f, t g, t h, t i, t j, t k, t l, t m, t n, t o, t p",
        "SELECT printf('%.*c', 1000000000, 'x')",
        "SELECT replace(printf('%.*c', 3000, 'x'), 'x', 'yyyyyyyyyy')",
        "WITH RECURSIVE r (n, s) AS (SELECT 1, printf('%.*c', 3900, 'x') UNION SELECT n + 1, s FROM r) "
        "SELECT * FROM r ORDER BY s, n",
        f"WITH c0 (x) AS (SELECT 1), {COPIES} SELECT x FROM c16",
        f"SELECT {'(' * 500}1{')' * 500}",
        f"SELECT '{'x' * 5000}'",
        " UNION ALL ".join(["SELECT 1"] * 100),
    ],
)
def test_a_query_without_an_end_or_of_any_size_ends(query: str) -> None:
    assert error_of(query).startswith("the query ")


def test_tables_of_saved_outputs_are_made_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "written"
    for setup in (f"ATTACH DATABASE '{path}' AS other", "PRAGMA user_version = 1", f"VACUUM INTO '{path}'"):
        with pytest.raises(QueryError):
            rows_of(setup, "SELECT 1")
    assert not path.exists()


def test_a_query_runs_in_a_process_with_limits_of_its_own() -> None:
    program = Path(sandbox.__file__)
    done = subprocess.run(
        [sys.executable, "-I", "-S", program], input=json.dumps([SETUP, "SELECT 7"]), capture_output=True, text=True
    )
    assert json.loads(done.stdout) == [[7]]


def test_the_sum_of_a_join_is_right_with_either_form_of_the_query() -> None:
    question = BY_ID["sql-5"]
    nested = "SELECT name, (SELECT SUM(amount) FROM orders WHERE customer_id = c.id) s FROM customers c WHERE s > 0"
    named = (
        "WITH s AS (SELECT customer_id, SUM(amount) AS total FROM orders GROUP BY 1) "
        "SELECT name, total FROM customers JOIN s ON s.customer_id = id"
    )
    for query in (nested, named):
        assert grade(question, Reply(query)) == Grade(True)
    outer = "SELECT name, SUM(amount) FROM customers c LEFT JOIN orders o ON o.customer_id = c.id GROUP BY c.id"
    assert grade(question, Reply(outer)).fault == "expected 3 rows, found 4"


def test_a_grade_depends_on_the_check_alone() -> None:
    question = replace(BY_ID["arithmetic-1"], messages=(), answer="")
    assert grade(question, Reply("391")).right
