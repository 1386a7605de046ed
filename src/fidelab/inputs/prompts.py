"""Prompts: the package's own, or the user's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fidelab.core.errors import InputError
from fidelab.inputs.files import DATA, json_lines, numbered_lines


@dataclass(frozen=True)
class Prompt:
    """One prompt as chat messages (``role`` and ``content``); ``kind`` groups prompts of one sort.

    ``tools``: functions that the model may call, in OpenAI's form.
    """

    id: str
    kind: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()


def load_prompts(path: Path | None = None) -> tuple[Prompt, ...]:
    """Return the prompts of a file, or the package's own.

    ``.jsonl``: one object per line with ``prompt`` (text) or ``messages`` (list of role and content), and optionally
    ``id`` and ``kind``.  ``.txt``: one prompt per line.  Blank lines do not count.

    Raises:
        InputError: If the file does not exist, is not UTF-8, has no prompt, or has an invalid line (the message has its
            number).
    """
    source = path if path is not None else DATA / "prompts.jsonl"
    if source.suffix not in (".jsonl", ".txt"):
        raise InputError(f"prompt file {source}: the name should end in .jsonl or .txt")
    if source.suffix == ".txt":
        lines = numbered_lines(source, "prompt file")
        prompts = tuple(Prompt(str(number), "user", ({"role": "user", "content": line},)) for number, line in lines)
    else:
        prompts = tuple(_from_json(*line) for line in json_lines(source, "prompt file"))
    if not prompts:
        raise InputError(f"prompt file {source} has no prompt in it")
    ids = Counter(prompt.id for prompt in prompts)
    if repeated := [name for name, count in ids.items() if count > 1]:
        raise InputError(f"prompt file {source} has the id {repeated[0]!r} twice")
    return prompts


def _from_json(place: str, number: int, record: Any) -> Prompt:
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise InputError(f"{place}: write an object with either 'prompt' or 'messages'")
    if "prompt" in record:
        messages: Any = [{"role": "user", "content": record["prompt"]}]
    else:
        messages = record["messages"]
    listed = messages if isinstance(messages, list) else []
    texts = [one.get(key) if isinstance(one, dict) else None for one in listed for key in ("role", "content")]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise InputError(f"{place}: a prompt is text, messages are a list of objects with text in 'role' and 'content'")
    return Prompt(
        id=str(record.get("id", number)),
        kind=str(record.get("kind", "user")),
        messages=tuple({"role": message["role"], "content": message["content"]} for message in messages),
    )
