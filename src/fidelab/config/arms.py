"""One arm in one line: a KV format, or ``key=value`` pairs such as ``kv=fp8_e4m3,tp=2,attention-backend=triton``.

``preset=NAME`` starts from a preset.  ``env.NAME=value`` sets an environment variable for that arm only.  A value may
be JSON: ``speculative-config={…}``.
"""

from __future__ import annotations

import re
from typing import Any

_PAIRS = re.compile(r"[A-Za-z][\w.-]*=")
_ARM_KEYS = ("kv", "name", "engine", "model", "dtype", "preset")  # keys of the arm; all others are the engine's
_OF_ENGINE = ("python", "image", "pythonpath")
_ENV = "env."


def split_commas(text: str) -> list[str]:
    """Split a text at commas outside of brackets (of formats or JSON) and JSON strings."""
    parts, depth, start, quoted, escaped = list[str](), 0, 0, False, False
    for at, sign in enumerate(text):
        if sign == '"' and not escaped:
            quoted = depth > 0 and not quoted
        elif sign in "[{" and not quoted:
            depth += 1
        elif sign in "]}" and not quoted:
            depth = max(0, depth - 1)
        elif sign == "," and not depth:
            parts.append(text[start:at])
            start = at + 1
        escaped = sign == "\\" and not escaped
    return [*parts, text[start:]]


def arm_fields(text: str) -> dict[str, Any]:
    """Return the fields of an arm's settings.

    Raises:
        ValueError: If a part has no value, or ``python``, ``image`` or ``pythonpath`` come without ``engine``.
    """
    if not _PAIRS.match(text.strip()):
        return {"kv": text}
    fields: dict[str, Any] = {}
    options: dict[str, str] = {}
    engine: dict[str, Any] = {}
    env: dict[str, str] = {}
    for part in split_commas(text):
        key, eq, value = (piece.strip() for piece in part.partition("="))
        if eq and key.startswith(_ENV):
            env[key.removeprefix(_ENV)] = value  # an environment variable may be empty
            continue
        key = key.replace("_", "-")
        if not eq or not value:
            raise ValueError(f"{part.strip()!r} has no value; write key=value, separated by commas")
        if key in _ARM_KEYS:
            fields[key] = value
        elif key in _OF_ENGINE:
            engine[key] = [value] if key == "pythonpath" else value
        else:
            options[key] = value
    if engine:
        if "engine" not in fields:
            raise ValueError(f"{next(iter(engine))} belongs to an engine: write engine=NAME next to it")
        fields["engine"] = {"name": fields["engine"], **engine}
    return {**fields, **({"engine_args": options} if options else {}), **({"env": env} if env else {})}
