"""Documents of the kind ``logs``: logs and terminals."""

from __future__ import annotations

import lzma
import random
import re
from collections.abc import Iterator

from scripts.agents_text.documents import Document, filled, shuffled, sizes
from scripts.agents_text.record import recorded
from scripts.agents_text.repository import Repository, git

_PART = 9_000  # characters of an output that a document takes at a time
_DENSITY = 6.0  # a part that can be packed smaller than by this factor is left out: it repeats itself
_PARTS = {
    "failure": 4,
    "tests": 22,
    "lint": 12,
    "run": 1,
    "file": 3,
    "command": 5,
}  # of one output; code has the other failures


def _parts(command: str, text: str) -> Iterator[str]:
    """Yield an output in parts that end with a line."""
    lines, part, size, first = text.rstrip().split("\n"), [], 0, True
    for line in lines:
        part.append(line[:600])
        size += len(line)
        if size > _PART:
            yield (f"$ {command}\n" if first else f"({command}, continued)\n") + "\n".join(part)
            part, size, first = [], 0, False
    if part:
        yield (f"$ {command}\n" if first else f"({command}, continued)\n") + "\n".join(part)


def _history(repository: Repository, seed: int) -> Iterator[str]:
    """Yield commits with the files that they changed."""
    order = random.Random(seed)
    text = git(
        "log",
        "--format=%x00commit %h%n%n    %s%n%n%b",
        "--stat=100",
        "-n900",
        repository.revision,
    )
    commits = [re.sub(r"\n{3,}", "\n\n", one).strip() for one in text.split("\0")[1:]]
    at = 0
    while at < len(commits):
        count = order.randint(5, 14)
        yield f"$ git log --stat --skip {at} -n {count}\n" + "\n\n".join(one[:3000] for one in commits[at : at + count])
        at += count


def _changes(repository: Repository, seed: int) -> Iterator[str]:
    """Yield changes of pages and settings, as a terminal shows them."""
    text = git(
        "log",
        "-p",
        "--no-color",
        "--no-ext-diff",
        "--format=%x00%h %s",
        "-n900",
        repository.revision,
        "--",
        "*.md",
        "*.yaml",
        "*.toml",
    )
    for one in shuffled(text.split("\0")[1:], seed):
        subject, _, change = one.strip().partition("\n")
        if 700 < len(change) < 7000:
            yield (
                f"$ git show {subject[:9]} -- '*.md' '*.yaml' '*.toml'  # {subject[10:]}\n"
                + re.sub(r"(?m)^index .*\n", "", change).strip()
            )


def build(repository: Repository, seed: int = 61) -> list[Document]:
    """Return the documents; no part of an output is in two of them."""
    order = random.Random(seed)
    sources: dict[str, list[str]] = {}
    for kind, most in _PARTS.items():
        parts: list[str] = []
        for number, one in enumerate(recorded(kind)):
            if len(one["output"]) > 250:
                every = 5 if kind == "file" else 1  # reports are alike: take other parts of each
                parts += list(_parts(one["command"], one["output"]))[number % every :: every][:most]
        parts = [part for part in parts if len(part) < _DENSITY * len(lzma.compress(part.encode()))]
        sources[kind] = shuffled(parts, seed)[1::2] if kind == "failure" else shuffled(parts, seed)
    sources["history"] = list(_history(repository, seed))
    sources["changes"] = list(_changes(repository, seed))[:80]
    left = {name: iter(parts) for name, parts in sources.items()}
    weights = {name: sum(map(len, parts)) for name, parts in sources.items()}

    def pieces() -> Iterator[str]:
        while True:
            name = order.choices(list(weights), list(weights.values()))[0]
            piece = next(left[name], None)
            if piece is None:
                del weights[name]
            else:
                yield piece

    return [
        Document("logs", f"logs-{number:02}", filled(pieces(), size)) for number, size in enumerate(sizes(2, huge=1), 1)
    ]
