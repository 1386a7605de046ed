"""Graders: whether a reply is right, exactly, and in a few words what is wrong otherwise.

A check maps the name of a grader to what it needs.  Where there are several, a reply has to pass all of them:

- ``number: "391"``: the last number of the text, or that in ``\\boxed{}``;
- ``words: [Tuesday]``: one of these spellings is in the text; case, punctuation and markup are ignored;
- ``without: [Monday]``: none of these is;
- ``output: "1\\n2"``: the text itself, but for a code fence and space at the ends of lines;
- ``sql: {setup, rows, ordered}``: the rows of the query; see :mod:`fidelab.inputs.questions.sandbox`;
- ``json: {…}``: a JSON schema that the value fulfils;
- ``equals: …``: the JSON value itself;
- ``constraints: [{n_words: 1}, …]``: see :data:`CONSTRAINTS`;
- ``call: {name, arguments}``: the tool that has to be called, or ``none``.

Nothing that a model wrote is run, except for SQL.  No text makes a grader raise.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from fidelab.core import strict_json
from fidelab.inputs.gsm8k import extract_answer
from fidelab.inputs.json_values import same_value
from fidelab.inputs.questions.calls import bounded_text, read_reply, unfenced
from fidelab.inputs.questions.question import Call, Grade, Question, Reply
from fidelab.inputs.questions.sandbox import QueryError, rows_of

_SHOWN_CHARS = 60  # of an answer in a fault
_MAX_FAULT_CHARS = 240
_TOLERANCE = Decimal("1e-9")
_FLOAT_DIGITS = 6  # of numbers in rows, which SQLite computes in binary
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\}){0,200})\}")
_MARKUP = re.compile(r"[*_`~#>\"'“”‘’]+")
_NOT_WORD = re.compile(r"[^\w]+")
_SENTENCE_END = re.compile(r"[.!?]+(?=\s|\Z)")
_BULLET = re.compile(r"\s*(?:[-*•+]|\d{1,3}[.)])\s+\S")
_REFUSED_IN_SCHEMAS = frozenset({"$ref", "$dynamicRef", "$recursiveRef", "pattern", "patternProperties", "format"})


def grade(question: Question, reply: Reply) -> Grade:
    """Return whether a reply answers a question, by all graders of its check."""
    text = bounded_text(reply.text)
    for name, wanted in question.check.items():
        fault = GRADERS[name](wanted, text) if name in GRADERS else _call(wanted, text, reply.calls, question.tools)
        if fault:
            return Grade(False, _printable(fault, _MAX_FAULT_CHARS))
    return Grade(True)


def validate_check(check: Any) -> Mapping[str, Any]:
    """Return a check that graders can use.

    Raises:
        ValueError: If it has no grader, an unknown one, or one whose value has the wrong form.
    """
    if not isinstance(check, Mapping) or not check:
        raise ValueError(f"check maps graders ({', '.join(_FORMS)}) to what they need")
    for name, wanted in check.items():
        if name not in _FORMS:
            raise ValueError(f"check has the graders {', '.join(_FORMS)}; found {_printable(repr(name))}")
        needs, accepts = _FORMS[name]
        if not accepts(wanted):
            raise ValueError(f"{name} needs {needs}; found {_printable(repr(wanted))}")
    return check


def validate_schema(schema: Any) -> Mapping[str, Any]:
    """Return a JSON schema that refers to nothing outside itself.

    Raises:
        ValueError: If it is not a schema, or has keywords that are not used here, such as ``$ref``.
    """
    from jsonschema import Draft202012Validator, SchemaError

    if not isinstance(schema, Mapping):
        raise ValueError(f"a JSON schema is an object; found {_printable(repr(schema))}")
    if refused := sorted(_keywords(schema) & _REFUSED_IN_SCHEMAS):
        raise ValueError(f"a JSON schema of a question has no {', '.join(refused)}")
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"invalid JSON schema: {_printable(error.message)}") from None
    return schema


def validate_tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    """Return functions that are offered, in OpenAI's form.

    Raises:
        ValueError: If one has no name, no description, or no JSON schema of an object as its parameters.
    """
    if not isinstance(tools, list | tuple):
        raise ValueError("tools is a list of functions")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not all(_is_text(function.get(key)) for key in ("name", "description")):
            raise ValueError("a tool is a function with name, description and parameters")
        parameters = validate_schema(function.get("parameters"))
        if parameters.get("type") != "object" or not isinstance(parameters.get("properties"), Mapping):
            raise ValueError(f"parameters of {function['name']} are a JSON schema of an object with properties")
    return tuple(tools)


# ------------------------------------------------------------------------------------------------------------ graders


def _number(wanted: Any, text: str) -> str:
    boxed = _BOXED.findall(text)
    found, expected = _read_number(boxed[-1] if boxed else text), _read_number(str(wanted))
    if found is None:
        return f"expected {wanted}, found {_shown(text)}: no number that can be read"
    if expected is None or abs(found - expected) > _TOLERANCE * max(Decimal(1), abs(expected)):
        return f"expected {wanted}, found {found:f}"
    return ""


def _read_number(text: str) -> Decimal | None:
    try:
        return extract_answer(text)
    except (ValueError, ArithmeticError):  # thousands of digits
        return None


def _words(wanted: Sequence[str], text: str) -> str:
    if any(_has(text, spelling) for spelling in wanted):
        return ""
    return f"expected {wanted[0]}, found {_shown(text)}"


def _without(unwanted: Sequence[str], text: str) -> str:
    found = [word for word in unwanted if _has(text, word)]
    return f"the answer has {found[0]}, too" if found else ""


def _has(text: str, words: str) -> bool:
    """Whether words stand in a text, one after the other."""
    return f" {_plain(words)} " in f" {_plain(text)} "


def _plain(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(_NOT_WORD.sub(" ", _MARKUP.sub("", folded)).split())


def _output(wanted: str, text: str) -> str:
    expected, found = _lines(wanted), _lines(unfenced(text))
    if found == expected:
        return ""
    return f"expected {_shown(' / '.join(expected))}, found {_shown(' / '.join(found))}"


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.strip("\r\n").splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _sql(wanted: Mapping[str, Any], text: str) -> str:
    query = unfenced(text).strip().strip("`").strip()
    if not query:
        return "no SQL in the answer"
    try:
        found = [tuple(map(_cell, row)) for row in rows_of(wanted["setup"], query)]
    except QueryError as error:
        return str(error)
    expected = [tuple(map(_cell, row)) for row in wanted["rows"]]
    if found == expected or (not wanted.get("ordered", False) and Counter(found) == Counter(expected)):
        return ""
    if len(found) != len(expected):
        return f"expected {_count(len(expected), 'row')}, found {len(found)}"
    if Counter(found) == Counter(expected):
        return "the rows are right, in another order"
    wrong = next(row for row in found if row not in expected) if set(found) - set(expected) else found[0]
    return f"expected rows such as {_shown(_row(expected[0]))}, found {_shown(_row(wrong))}"


def _cell(value: Any) -> Any:
    """A value of a row as it is compared: whole floats are equal to integers."""
    return float(f"{value:.{_FLOAT_DIGITS}g}") if isinstance(value, float) else value


def _row(row: Sequence[Any]) -> str:
    return f"({', '.join(map(str, row))})"


def _json(schema: Mapping[str, Any], text: str) -> str:
    try:
        value = strict_json(unfenced(text).strip())
    except ValueError as error:
        return f"the answer is not JSON: {error}"
    return _violation(schema, value)


def _violation(schema: Mapping[str, Any], value: Any) -> str:
    """The first fault of a value by a schema; empty where the schema accepts it."""
    from jsonschema import Draft202012Validator

    error = next(iter(Draft202012Validator(schema).iter_errors(value)), None)
    if error is None:
        return ""
    return f"at {error.json_path}: {error.message}" if error.absolute_path else str(error.message)


def _equals(wanted: Any, text: str) -> str:
    try:
        value = strict_json(unfenced(text).strip())
    except ValueError as error:
        return f"the answer is not JSON: {error}"
    return "" if same_value(value, wanted) else f"expected {_dumped(wanted)}, found {_shown(_dumped(value))}"


def _constraints(wanted: Sequence[Mapping[str, Any]], text: str) -> str:
    """All constraints that the text breaks."""
    faults = (CONSTRAINTS[name][1](text.strip(), value) for item in wanted for name, value in item.items())
    return "; ".join(filter(None, faults))


def _call(wanted: Any, text: str, calls: Sequence[Call], tools: Sequence[Mapping[str, Any]]) -> str:
    if wanted == "none":
        return f"no call is right, found a call of {_name(calls[0])}" if calls else ""
    if not calls:
        unread = " (the text has a call that was not parsed)" if read_reply(text).calls else ""
        return f"no tool was called{unread}"
    if len(calls) > 1:
        return f"expected 1 call, found {len(calls)}"
    [call] = calls
    if not call.name:
        return f"the call cannot be read: {_shown(call.arguments)}"
    if call.name != wanted["name"]:
        return f'expected a call of "{wanted["name"]}", found {_name(call)}'
    try:
        found = strict_json(bounded_text(call.arguments) or "{}")
    except ValueError as error:
        return f"the arguments are not JSON: {error}"
    if not isinstance(found, dict):
        return f"the arguments are not an object, found {_shown(_dumped(found))}"
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    schema = schemas.get(call.name, {"properties": {}})
    return "; ".join(_argument_faults(schema, wanted["arguments"], found))


def _argument_faults(schema: Mapping[str, Any], wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    properties = schema.get("properties", {})
    for name in found.keys() - properties.keys():
        yield f"argument {_quoted(name)} is not in the schema"
    if missing := [_quoted(name) for name in wanted if name not in found]:
        yield f"missing {', '.join(missing)}"
    for name, value in found.items():
        if name not in properties:
            continue
        if fault := _violation(properties[name], value):
            yield f"argument {_quoted(name)}: {fault}"
        elif name not in wanted:
            yield f"argument {_quoted(name)} was not asked for"
        elif not same_value(value, wanted[name]):
            yield f"argument {_quoted(name)}: expected {_dumped(wanted[name])}, found {_shown(_dumped(value))}"


GRADERS: Mapping[str, Callable[[Any, str], str]] = {
    "number": _number,
    "words": _words,
    "without": _without,
    "output": _output,
    "sql": _sql,
    "json": _json,
    "equals": _equals,
    "constraints": _constraints,
}
"""Graders of the text.  Each returns what is wrong; ``call`` reads the calls of tools, too."""


# -------------------------------------------------------------------------------------------------------- constraints


def _counted(what: str, count: Callable[[str], int]) -> Callable[[str, Any], str]:
    def check(text: str, wanted: Any) -> str:
        found = count(text)
        return "" if found == wanted else f"expected {_count(wanted, what)}, found {found}"

    return check


def _is_upper(text: str, _wanted: Any) -> str:
    return "" if text.upper() == text != text.lower() else "expected capital letters alone"


def _is_lower(text: str, _wanted: Any) -> str:
    return "" if text.lower() == text != text.upper() else "expected small letters alone"


def _starts(text: str, wanted: str) -> str:
    return "" if text.startswith(wanted) else f'expected "{wanted}" at the start, found {_shown(text)}'


def _ends(text: str, wanted: str) -> str:
    """Whether the text ends with some words; a full stop or markup may follow."""
    bare = text.rstrip(" \n.!*_`\"'")
    found = _shown(bare[-_SHOWN_CHARS:])
    return "" if bare.endswith(wanted.rstrip(".!")) else f'expected "{wanted}" at the end, found {found}'


def _contains(text: str, wanted: str) -> str:
    return "" if _has(text, wanted) else f'expected the word "{wanted}", found {_shown(text)}'


def _lacks(text: str, unwanted: str) -> str:
    """Whether a letter, or a word, is absent."""
    there = unwanted.casefold() in text.casefold() if len(unwanted) == 1 else _has(text, unwanted)
    return f'"{unwanted}" is in the answer' if there else ""


def _only_digits(text: str, _wanted: Any) -> str:
    return "" if re.fullmatch("[0-9]+", text) else f"expected digits alone, found {_shown(text)}"


def _exactly(text: str, wanted: str) -> str:
    return "" if _lines(text) == _lines(wanted) else f'expected exactly "{wanted}", found {_shown(text)}'


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 1000


def _is_true(value: Any) -> bool:
    return value is True


CONSTRAINTS: Mapping[str, tuple[Callable[[Any], bool], Callable[[str, Any], str]]] = {
    "n_words": (_is_count, _counted("word", lambda text: len(_plain(text).split()))),
    "n_lines": (_is_count, _counted("line", lambda text: sum(bool(line.strip()) for line in text.splitlines()))),
    "n_sentences": (_is_count, _counted("sentence", lambda text: len(_SENTENCE_END.findall(text)))),
    "n_bullets": (_is_count, _counted("bullet", lambda text: sum(map(bool, map(_BULLET.match, text.splitlines()))))),
    "upper_case": (_is_true, _is_upper),
    "lower_case": (_is_true, _is_lower),
    "starts_with": (_is_text, _starts),
    "ends_with": (_is_text, _ends),
    "contains": (_is_text, _contains),
    "lacks": (_is_text, _lacks),
    "only_digits": (_is_true, _only_digits),
    "exactly": (_is_text, _exactly),
}
"""Constraints on an answer: the form of their value, and the function that says what is wrong."""


# --------------------------------------------------------------------------------------------------- forms and faults


def _is_number(value: Any) -> bool:
    return isinstance(value, str) and _read_number(value) is not None


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


def _is_sql(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and {"setup", "rows"} <= set(value) <= {"setup", "rows", "ordered"}
        and _is_text(value["setup"])
        and isinstance(value["rows"], list)
        and bool(value["rows"])
        and all(isinstance(row, list) and all(map(_is_cell, row)) for row in value["rows"])
        and isinstance(value.get("ordered", False), bool)
    )


def _is_cell(value: Any) -> bool:
    return value is None or (isinstance(value, str | int | float) and not isinstance(value, bool))


def _is_schema(value: Any) -> bool:
    try:
        validate_schema(value)
    except ValueError:
        return False
    return True


def _is_constraints(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_constraint, value))


def _is_constraint(value: Any) -> bool:
    if not isinstance(value, Mapping) or len(value) != 1:
        return False
    [(name, wanted)] = value.items()
    return name in CONSTRAINTS and CONSTRAINTS[name][0](wanted)


def _is_call(value: Any) -> bool:
    return value == "none" or (
        isinstance(value, Mapping)
        and set(value) == {"name", "arguments"}
        and _is_text(value["name"])
        and isinstance(value["arguments"], Mapping)
        and all(map(_is_text, value["arguments"]))
    )


_FORMS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "number": ("a number, as text", _is_number),
    "words": ("a list of texts", _is_texts),
    "without": ("a list of texts", _is_texts),
    "output": ("a text", _is_text),
    "sql": ("setup (SQL), rows (lists) and ordered (true or false)", _is_sql),
    "json": (f"a JSON schema without {', '.join(sorted(_REFUSED_IN_SCHEMAS))}", _is_schema),
    "equals": ("a value", lambda value: value is not None),
    "constraints": (f"a list of constraints ({', '.join(CONSTRAINTS)}), each with its value", _is_constraints),
    "call": ("name and arguments of a call, or none", _is_call),
}


def _keywords(schema: Any) -> set[str]:
    """All keys in a schema, at any depth."""
    found: set[str] = set()
    left = [schema]
    while left:
        item = left.pop()
        if isinstance(item, Mapping):
            found |= set(map(str, item))
            left += item.values()
        elif isinstance(item, list):
            left += item
    return found


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _name(call: Call) -> str:
    return _quoted(call.name)


def _quoted(name: str) -> str:
    return f'"{_printable(name)}"'


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _shown(text: str) -> str:
    return _printable(text) or "nothing"


def _printable(text: str, most: int = _SHOWN_CHARS) -> str:
    """A text in one line, cut after some characters, with � for those that cannot be printed."""
    line = " ".join(text[: 4 * most].split())
    line = "".join(char if char.isprintable() else "\ufffd" for char in line)
    return line if len(line) <= most else f"{line[: most - 1]}…"
