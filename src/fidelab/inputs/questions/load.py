"""Questions of the package: those of ``data/questions.yaml``, and those about long texts, which are made here."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from fidelab.core import canonical_json
from fidelab.core.errors import InputError
from fidelab.inputs.files import DATA, read_utf8
from fidelab.inputs.haystack import generate_paragraphs
from fidelab.inputs.questions.graders import validate_check, validate_tools
from fidelab.inputs.questions.pictures import picture
from fidelab.inputs.questions.question import KINDS, Question

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
"""Approximate tokens of the texts of :func:`retrieval_questions`."""
CHARS_PER_TOKEN = 4  # of English prose, about
_DEPTHS = (0.25, 0.75)
_SEED = 41
_NAMES = (
    *("Amber", "Birch", "Cedar", "Delta", "Ember", "Falcon"),
    *("Granite", "Harbor", "Indigo", "Juniper", "Kestrel", "Lantern"),
)
_FIELDS = {"id", "kind", "prompt", "system", "max_tokens", "check", "answer", "tools", "image"}
_NEEDED = {"id", "kind", "prompt", "max_tokens", "check", "answer"}
_MAX_TOKENS = 256


@cache
def load_questions() -> tuple[Question, ...]:
    """Return the questions of the package's data file, in its order.

    Raises:
        InputError: If the file is damaged; the message names question and field.
    """
    return read_questions(DATA / "questions.yaml")


def read_questions(path: Path) -> tuple[Question, ...]:
    """Return the questions of a file of that form: ``databases``, ``tools`` and ``questions``.

    In a prompt ``{database}`` stands for the tables of its check, and ``{schema}`` for the JSON schema.

    Raises:
        InputError: If the file cannot be read or a question is invalid; the message names question and field.
    """
    import yaml

    try:
        data = yaml.safe_load(read_utf8(path, "file of questions"))
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict) or not isinstance(data.get("questions"), list):
        raise InputError(f"{path}: write a list 'questions'")
    databases, tools = (data.get(key) or {} for key in ("databases", "tools"))
    if not isinstance(databases, dict) or not isinstance(tools, dict):
        raise InputError(f"{path}: 'databases' and 'tools' map names to SQL and to functions")
    found = []
    for number, entry in enumerate(data["questions"], 1):
        name = entry.get("id") if isinstance(entry, dict) else None
        try:
            found.append(_question(entry, databases, tools))
        except ValueError as error:
            raise InputError(f"{path}: question {name or number}: {error}") from None
    names = [question.id for question in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"{path}: question {twice} is there twice")
    return tuple(found)


def retrieval_questions(lengths: Sequence[int] = LENGTHS) -> tuple[Question, ...]:
    """Return questions about one fact in a long text, two for each length in approximate tokens.

    A text is generated prose.  It has one sentence with a number, after a quarter or three quarters of it.  Each
    question has its own number.  A token is taken as four characters.

    Raises:
        ValueError: If a length is none of :data:`LENGTHS`.
    """
    if unknown := set(lengths) - set(LENGTHS):
        raise ValueError(f"lengths are {', '.join(map(str, LENGTHS))}; found {', '.join(map(str, sorted(unknown)))}")
    return tuple(
        _retrieval(number, LENGTHS[number // len(_DEPTHS)], _DEPTHS[number % len(_DEPTHS)])
        for number in range(len(LENGTHS) * len(_DEPTHS))
        if LENGTHS[number // len(_DEPTHS)] in lengths
    )


@cache
def _retrieval(number: int, length: int, depth: float) -> Question:
    name, code = _NAMES[number], str(random.Random(_SEED + number).randint(10_000, 99_999))
    fact = f"The access code of project {name} is {code}."
    question = (
        f"The access code of project {name} is in the text above. Which number is it? Answer with the number only."
    )
    room = CHARS_PER_TOKEN * length - len(fact) - len(question) - 80
    sentences: list[str] = []
    size = 0
    prose = chain.from_iterable(text.split(". ") for text in generate_paragraphs(_SEED + number))
    while size < room:
        sentences.append(f"{next(prose).rstrip('.')}.")
        size += len(sentences[-1]) + 1
    sentences.insert(round(depth * len(sentences)), fact)
    text = f"Read this text.\n\n{' '.join(sentences)}\n\n{question}"
    return Question(
        id=f"retrieval-{number + 1}",
        kind="retrieval",
        messages=({"role": "user", "content": text},),
        max_tokens=12,
        check={"number": code},
        answer=code,
        context=length,
    )


def _question(entry: Any, databases: Mapping[str, Any], tools: Mapping[str, Any]) -> Question:
    if not isinstance(entry, dict):
        raise ValueError("write an object")
    if missing := sorted(_NEEDED - set(entry)):
        raise ValueError(f"missing {', '.join(missing)}")
    if unknown := sorted(map(str, set(entry) - _FIELDS)):
        raise ValueError(f"unknown {', '.join(unknown)}")
    for field in ("id", "kind", "prompt", "answer", *(["system"] if "system" in entry else [])):
        if not isinstance(entry[field], str) or not entry[field].strip():
            raise ValueError(f"{field} is text; found {entry[field]!r}")
    kind = entry["kind"]
    if kind not in KINDS:
        raise ValueError(f"kind is one of {', '.join(KINDS)}; found {kind!r}")
    if not entry["id"].startswith(f"{kind}-"):
        raise ValueError(f"id begins with {kind}-")
    if type(entry["max_tokens"]) is not int or not 0 < entry["max_tokens"] <= _MAX_TOKENS:
        raise ValueError(f"max_tokens is a number from 1 to {_MAX_TOKENS}; found {entry['max_tokens']!r}")
    check = validate_check(_with_setup(entry["check"], databases))
    image = entry.get("image", {})
    if (kind == "images") != bool(image) or not isinstance(image, dict):
        raise ValueError("image describes the picture of a question of kind images")
    if image:
        picture(image)
    prompt = _filled(entry["prompt"].strip(), check)
    system = ({"role": "system", "content": entry["system"].strip()},) if "system" in entry else ()
    return Question(
        id=entry["id"],
        kind=kind,
        messages=(*system, {"role": "user", "content": prompt}),
        max_tokens=entry["max_tokens"],
        check=check,
        answer=entry["answer"].strip("\n"),
        tools=_tools(kind, check, entry.get("tools", []), tools),
        image=image,
    )


def _with_setup(check: Any, databases: Mapping[str, Any]) -> Any:
    """A check whose ``sql`` has the SQL of its database in the place of the name."""
    if not isinstance(check, dict) or not isinstance(check.get("sql"), dict) or "database" not in check["sql"]:
        return check
    asked = dict(check["sql"])
    name = asked.pop("database")
    if not isinstance(name, str) or not isinstance(databases.get(name), str):
        raise ValueError(f"database is one of {', '.join(map(str, databases))}; found {name!r}")
    return {**check, "sql": {**asked, "setup": databases[name].strip()}}


def _filled(prompt: str, check: Mapping[str, Any]) -> str:
    if "sql" in check:
        prompt = prompt.replace("{database}", check["sql"]["setup"])
    if "json" in check:
        prompt = prompt.replace("{schema}", canonical_json(check["json"]))
    return prompt


def _tools(kind: str, check: Mapping[str, Any], names: Any, known: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The offered functions in OpenAI's form."""
    if not isinstance(names, list) or (kind == "tools") != bool(names) or ("call" in check) != bool(names):
        raise ValueError("tools lists the functions of a question of kind tools, whose check has call")
    found = []
    for name in names:
        if not isinstance(name, str) or not isinstance(known.get(name), dict):
            raise ValueError(f"tools are {', '.join(map(str, known))}; found {name!r}")
        found.append({"type": "function", "function": {"name": name, **known[name]}})
    called = check.get("call", "none")
    if called != "none" and called["name"] not in names:
        raise ValueError(f"call is of a tool that is not offered: {called['name']!r}")
    return validate_tools(found)
