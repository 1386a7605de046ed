"""GSM8K: word problems with numbers as answers, worked examples for the prompt, and parsing of answers.

Problems are ``openai/gsm8k``'s (Cobbe et al. 2021, arXiv:2110.14168) from the hub, or of a JSONL file with its fields:
``question``, and ``answer`` ending in ``#### number``.  The worked examples are the package's own.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from fidelab.core.errors import InputError
from fidelab.core.paths import expand
from fidelab.core.registry import require
from fidelab.inputs.files import DATA, json_lines

_HUB = ("openai/gsm8k", "main/test-00000-of-00001.parquet")
_MARK = "####"

_MINUS = r"\-\u2010-\u2013\u2212\ufe63\uff0d"  # hyphens, figure and en dash, minus sign, their small and wide forms
_GAP = "[ \u00a0\u2007\u2009\u202f]"  # plain, non-breaking, figure, thin and narrow space between thousands
_NUMBER = re.compile(
    rf"""
    (?:(?<![\w)\]}}$€£])[{_MINUS}])?            # a sign, not the minus of 16-3
    [$€£]?(?:(?<=[$€£])[{_MINUS}])?             # $5, -$5, $-5
    (?:
        (?<![\d.,/])(?P<whole>\d+)(?:{_GAP}+|{_GAP}and{_GAP})(?P<part>\d+/\d+)(?![\d.,/]*\d)  # 1 1/2
        |
        (?P<digits>
            (?<!\d)[1-9]\d{{0,2}}(?:{_GAP}\d{{3}})+(?!\d)(?:[.,]\d+)*  # 1 000  1 000,5
            | \d+(?:[.,]\d+)*                   # 1,234.5  1.234,5  1,00,000
            | (?<!\d)\.\d+                      # .5
        )
        (?P<rest>
            /\d++(?![\d.,]*\d)                 # 3/4
            | (?:[eE][+-]?\d{{1,2}}(?!\d))?
        )
    )
    """,
    re.VERBOSE,
)
_THOUSANDS = {  # commas also as in India: 1,00,000
    ",": re.compile(r"(?!0)\d{1,3}(?:,\d{2,3})*,\d{3}"),
    ".": re.compile(r"(?!0)\d{1,3}(?:\.\d{3})+"),
}
_LATEX_FRACTION = re.compile(r"\\[cdt]?frac\s*\{(\d+)\}\s*\{(\d+)\}")
_SIGN_OF_FRACTION = "\u2044"  # between the two numbers of characters such as ½
_MARKED = re.compile(rf"{_MARK}[\s*:=_(\\]*")  # with what markup may stand before the number
_APART = re.compile(rf"({_MARK}(?:[^\S\n]|[*:=_(\\])*[{_MINUS}$€£]+)[^\S\n]+(?=[$€£.\d])")  # - 7, $ 7
_SIGN = re.compile(f"[{_MINUS}]")
_NEXT = re.compile(r"^[ \t]*Question:", re.MULTILINE)


@dataclass(frozen=True)
class Problem:
    """A question, its worked answer, and the number that the answer ends in."""

    id: str
    question: str
    answer: str
    gold: Decimal


def load_problems(source: str, limit: int | None = None) -> tuple[Problem, ...]:
    """Return the first ``limit`` problems of ``gsm8k`` (the hub's test set) or of a JSONL file.

    A problem's ``id`` is the file's, else the number of its row or line, from 1.

    Raises:
        InputError: If the file does not exist, a line is not a problem (the message has its number), there is no
            problem, or the hub cannot be reached.
    """
    if source == "gsm8k":
        rows = [(f"gsm8k test set, row {n}", n, row) for n, row in enumerate(_from_hub(), 1)]
    else:
        rows = _from_file(expand(source))
    if not rows:
        raise InputError(f"GSM8K problems {source}: there is none")
    return tuple(_problem(*row) for row in rows[:limit])


def load_shots(n: int) -> tuple[Problem, ...]:
    """Return the first ``n`` ≤ 8 worked examples."""
    return tuple(_problem(*row) for row in _from_file(DATA / "gsm8k_shots.jsonl")[:n])


def ask(problem: Problem, shots: Sequence[Problem], template: Literal["chat", "raw"]) -> list[dict[str, str]]:
    """Return chat messages that show the worked examples and ask the question.

    ``chat``: an example is a turn of the user and one of the assistant.  ``raw``: one message with ``Question:`` and
    ``Answer:`` before each part, which a base model continues.
    """
    if template == "chat":
        turns = [(("user", shot.question), ("assistant", shot.answer)) for shot in shots]
        asked = [*(turn for pair in turns for turn in pair), ("user", problem.question)]
        return [{"role": role, "content": content} for role, content in asked]
    shown = [f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots]
    return [{"role": "user", "content": f"{''.join(shown)}Question: {problem.question}\nAnswer:"}]


def truncate_answer(text: str) -> str:
    """Return an answer up to the next question that the model invents: a line that begins with ``Question:``."""
    return _NEXT.split(text, maxsplit=1)[0]


def extract_answer(text: str) -> Decimal | None:
    """Return the number after the first ``####`` that a number follows, else the last number.

    ``None`` if there is none, or none that can be read: ``1.2.3``, ``1,23,4``, ``3/0``.

    Currency signs are removed; so are a trailing period, a percent sign and other units.  Fractions and mixed numbers
    are one number (``3/4``, ``1 1/2``, ``1½``).  Both notations of decimals and thousands are read: see
    docs/metrics/generated-text.md#gsm8k.  A minus between two terms (``16-3``) is not a sign. A minus before a space
    (``- 7``) is a sign only right after ``####``: elsewhere it begins a list item.
    """
    text = _LATEX_FRACTION.sub(r" \1/\2", text.replace("{,}", ","))  # {,}: LaTeX
    text = _APART.sub(r"\1", "".join(map(_written_out, text)))
    marked = (_NUMBER.match(text, mark.end()) for mark in _MARKED.finditer(text))
    number = next(filter(None, marked), None)
    if number is None:
        number = next(iter(reversed(list(_NUMBER.finditer(text)))), None)
    return None if number is None else _value(number)


def _written_out(character: str) -> str:
    """``½`` as `` 1/2``, every other character as it is."""
    if character.isascii() or unicodedata.category(character) != "No":
        return "/" if character == _SIGN_OF_FRACTION else character
    numerator, slash, denominator = unicodedata.normalize("NFKC", character).partition(_SIGN_OF_FRACTION)
    return f" {numerator}/{denominator}" if slash and denominator else character


def _value(match: re.Match[str]) -> Decimal | None:
    if match["whole"] is not None:
        part = _fraction(match["part"])
        value = None if part is None or not part < 1 else Decimal(match["whole"]) + part
        begin = match.start("whole")
    elif match["rest"].startswith("/"):
        value, begin = _fraction(match["digits"] + match["rest"]), match.start("digits")
    else:
        digits, begin = _plain(match["digits"]), match.start("digits")
        value = None if digits is None else Decimal(f"{digits}{match['rest']}")
    if value is None:
        return None
    return -value if _SIGN.search(match[0][: begin - match.start()]) else value


def _fraction(text: str) -> Decimal | None:
    over, under = text.split("/")
    digits = _plain(over)
    return None if digits is None or not int(under) else Decimal(digits) / Decimal(under)


def _plain(digits: str) -> str | None:
    """Digits with at most a decimal point; ``None`` if the separators are not those of one number.

    The last separator is the decimal one where it differs from those before it.  Separators of one kind are those of
    thousands if groups have three digits: a single comma so, a single point not, because ``1.000`` is what a calculator
    prints.  A single one otherwise is the decimal one.
    """
    digits = re.sub(_GAP, "", spaced := digits)
    kinds = re.findall("[.,]", digits)
    if not kinds:
        return digits
    last, others = kinds[-1], kinds[:-1]
    if last in others or (spaced == digits and last == "," and not others):
        if _THOUSANDS[last].fullmatch(digits):
            return digits.replace(last, "")
        if others:
            return None
    whole, _, decimals = digits.rpartition(last)
    if others and not _THOUSANDS[others[0]].fullmatch(whole):
        return None
    return f"{re.sub('[.,]', '', whole)}.{decimals}"


def _from_hub() -> list[dict[str, Any]]:
    from fidelab.models.hub import dataset_file

    try:
        file = dataset_file(*_HUB)
    except InputError as error:
        raise type(error)(f"{error}: the test set as JSONL does as well (axes.gsm8k.data)") from error
    read = require("pyarrow.parquet", "GSM8K from the hub").read_table  # without types
    rows: list[dict[str, Any]] = read(file, columns=["question", "answer"]).to_pylist()
    return rows


def _from_file(path: Path) -> list[tuple[str, int, Any]]:
    if not path.is_file():
        raise InputError(f"no GSM8K problems at {str(path)!r}: write gsm8k or the path of a JSONL file")
    return list(json_lines(path, "problem file"))


def _problem(place: str, number: int, record: Any) -> Problem:
    fields = [record.get(key) for key in ("question", "answer")] if isinstance(record, dict) else []
    texts = [value.strip() for value in fields if isinstance(value, str) and value.strip()]
    if len(texts) < 2:
        raise InputError(f"{place}: write an object with text in 'question' and 'answer'")
    question, answer = texts
    match = _NUMBER.fullmatch(answer.rpartition(_MARK)[2].strip()) if _MARK in answer else None
    gold = None if match is None else _value(match)
    if gold is None:
        raise InputError(f"{place}: 'answer' must end in #### and a number")
    return Problem(str(record.get("id", number)), question, answer, gold)
