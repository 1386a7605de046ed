"""Notes of a reader of pasted text: parts that it ignored or translated, and words that are secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

SECRET_REASON = "a secret, which no report may hold; it is left out of the commands that the report shows"
SECRET = re.compile(r"(?i).*(_KEYS?|_TOKEN|_PASSWORD|_PASSWD|_SECRET|_CREDENTIALS?|API_?KEY.*)")
SECRET_FLAGS = ("api-key", "admin-api-key", "hf-token", "ssl-keyfile-password")
_LONGEST = 200  # characters of a pasted text in a message
_ASSIGNED = re.compile(r"(?<![\w-])([A-Za-z_]\w*)=\S+")


@dataclass
class Notes:
    """Parts of a pasted text that do not reach the server's command as they are.

    ``ignored``: words → the reason.  ``translated``: as pasted → as read.  ``secrets``: values that no record may hold.
    """

    ignored: dict[str, str] = field(default_factory=dict)
    translated: dict[str, str] = field(default_factory=dict)
    secrets: list[str] = field(default_factory=list)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a key or a token."""
    return SECRET.fullmatch(name) is not None


def without_secrets(text: str) -> str:
    """Return a text with ``…`` for the values of variables that hold keys and tokens."""
    return _ASSIGNED.sub(lambda match: f"{match[1]}=…" if is_secret_name(match[1]) else match[0], text)


def shorten(text: str) -> str:
    """Return a text in one line that fits a message."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


def secret_words(words: Sequence[str]) -> Iterator[bool]:
    """Tell for each word of a command whether it holds a key or a token: in ``--api-key=X``, ``X``, ``HF_TOKEN=X``."""
    follows = False
    for word in words:
        name, _, value = word.lstrip("-").partition("=")
        yield follows or name in SECRET_FLAGS or (name.isidentifier() and is_secret_name(name))
        follows = word.startswith("-") and name in SECRET_FLAGS and not value
