"""Texts by name, with the places where their documents begin."""

from __future__ import annotations

import contextlib
import hashlib
import json
import lzma
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from fidelab.core.errors import InputError
from fidelab.core.paths import expand
from fidelab.core.registry import require
from fidelab.inputs.files import DATA, json_lines, read_utf8
from fidelab.inputs.tokens import Tokenizer

_BUNDLED = ("prose.md", "long.md")  # documents of about 470 tokens, and of 2,200 and more
_WIKITEXT = ("Salesforce/wikitext", "wikitext-2-raw-v1/test-00000-of-00001.parquet")
_WIKI_TITLE = re.compile(r"^ = (?!= )[^\r\n]+(?<! =) = \r?$", re.MULTILINE)
_MARKDOWN_TITLE = re.compile(r"^# [^\r\n]+\r?$", re.MULTILINE)
# scripts/agents_text writes the file; SHA-256 of what is packed in it
_AGENTS = ("agents.jsonl.xz", "bd557fee6c0b7c2c87b8d7faca0e178961aea4c71034eeedea692b0b273630a2")
_DOMAINS = ((None, "prose", 6), ("long.md", "long document", 3))  # of the default text: file, domain, documents


@dataclass(frozen=True)
class Text:
    """A corpus.  ``doc_starts``: character offsets of its documents, empty if it has fewer than two.

    ``content`` is the file's text with its line ends as they are: other tools see the same bytes.  ``domains``: the
    kind of each document (``code``), if known.
    """

    name: str
    content: str
    doc_starts: tuple[int, ...]
    sha256: str
    domains: tuple[str, ...] = ()

    def domain_of(self, document: int) -> str:
        """Return the domain of a document by its number, counted from 1; empty if it is not known."""
        return self.domains[document - 1] if 1 <= document <= len(self.domains) else ""


def load_text(name_or_path: str | Path, tokenizer: Tokenizer | None = None) -> Text:
    """Return ``default``, ``domains`` or ``agents`` of the package, ``wikitext-2`` from the hub, or a file's text.

    ``domains`` holds short documents of eight kinds, ``agents`` long ones; ``tokenizer``: whose chat template writes
    their conversations.

    The package's own text is its short documents, then its long ones.

    Documents begin at WikiText titles (`` = Title = ``) or, in a text that begins with one, at ``# Title`` lines.

    Raises:
        InputError: If the file does not exist, is not UTF-8 (the message names line and byte) or is empty, or the hub
            cannot be reached, or the package's own file is damaged.
    """
    name = str(name_or_path)
    if name == "domains":
        return domains_text(tokenizer)
    if name == "agents":
        return agents_text(tokenizer)
    if name == "wikitext-2":
        # WikiText-2's raw test text; the hub stores its lines as rows, blank lines without their blank
        from fidelab.models.hub import dataset_file

        try:
            file = dataset_file(*_WIKITEXT)
        except InputError as error:
            raise InputError(f"{error}: the raw test text, wiki.test.raw, does as well") from error
        read = require("pyarrow.parquet", "WikiText-2 from the hub").read_table  # without types
        lines = read(file, columns=["text"]).column("text").to_pylist()
        content = "".join(line or " \n" for line in lines)
    elif name == "default":
        content = "\n".join(read_utf8(DATA / name, "text") for name in _BUNDLED)
    else:
        path = expand(name)
        if not path.is_file():
            raise InputError(
                f"no text {name!r}: write default, domains, agents, wikitext-2 or the path of a UTF-8 file"
            )
        content = read_utf8(path, "text")
    if not content.strip():
        raise InputError(f"text {name} is empty")
    starts = tuple(match.start() for match in _WIKI_TITLE.finditer(content))
    if not starts and content.startswith("# "):
        starts = tuple(match.start() for match in _MARKDOWN_TITLE.finditer(content))
    return Text(name, content, starts if len(starts) > 1 else (), hashlib.sha256(content.encode()).hexdigest())


def domains_text(tokenizer: Tokenizer | None) -> Text:
    """Return the package's own documents of eight kinds.

    Without a tokenizer, conversations are written without a template.  If a template does not accept tools or these
    roles, the conversations are also written as plain text.
    """
    documents: list[tuple[str, str]] = []
    for name, domain, count in _DOMAINS:
        own = load_text("default" if name is None else DATA / name)
        ends = [*own.doc_starts[1:], len(own.content)]
        spans = list(zip(own.doc_starts, ends, strict=True))[:count]
        documents += [(domain, own.content[start:end].rstrip("\n")) for start, end in spans]
    documents += [_document(tokenizer, record) for _, _, record in json_lines(DATA / "domains.jsonl", "text")]
    return _joined("domains", documents)


def agents_text(tokenizer: Tokenizer | None) -> Text:
    """Return the package's own long documents of eight kinds, as agents and long contexts have them.

    Conversations are written as :func:`domains_text` does.

    Raises:
        InputError: If the package's file is missing or damaged.
    """
    name, sha256 = _AGENTS
    try:
        content = lzma.decompress((DATA / name).read_bytes())
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise InputError(f"text agents cannot be read, install fidelab again: {name}: {error}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise InputError(f"text agents is damaged, install fidelab again: {name} has another SHA-256")
    return _joined("agents", [_document(tokenizer, json.loads(line)) for line in content.splitlines()])


def _document(tokenizer: Tokenizer | None, record: Mapping[str, Any]) -> tuple[str, str]:
    """Return a record's domain and its text, a conversation as the template writes it."""
    messages = record.get("messages")
    return record["domain"], record["text"] if messages is None else _written(tokenizer, messages)


def _joined(name: str, documents: Sequence[tuple[str, str]]) -> Text:
    parts = [f"{content}\n" for _, content in documents]
    content = "".join(parts)
    return Text(
        name,
        content,
        tuple([0, *accumulate(map(len, parts))][:-1]),
        hashlib.sha256(content.encode()).hexdigest(),
        domains=tuple(domain for domain, _ in documents),
    )


def _written(tokenizer: Tokenizer | None, messages: Sequence[Mapping[str, Any]]) -> str:
    if tokenizer is not None and tokenizer.template == "chat":
        with contextlib.suppress(InputError):
            return tokenizer.render(messages)
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
