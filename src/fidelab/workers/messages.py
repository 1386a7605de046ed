"""Typed parent–child messages: one JSON object per line, over the child's standard input and output.

The version is checked when the child greets, and every field for its type: an engine's environment may hold anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from fidelab.core import Status
from fidelab.core.errors import EngineError
from fidelab.core.runtime import invalid_runtime_fields
from fidelab.core.serial import from_json, to_json

PROTOCOL = 10
_DEEPEST = 32  # objects and lists within one another


@dataclass(frozen=True)
class ProbeTask:
    """One request to answer: its record, the place of the capture, and the capture's key.

    ``seed``: seed of the engine's proof of engagement.  ``against``: digest of the key of the capture whose comparison
    with this one may stand for rows.  ``compared``: the parent makes it as rows are written.
    """

    request: Mapping[str, Any]
    target: str
    key: Mapping[str, Any]
    seed: int = 0
    against: str = ""
    compared: bool = False


@dataclass(frozen=True)
class Job:
    """Parent → child: an arm to open, and its first tasks.

    ``env``: variables to set before the engine is imported (a container does not inherit them).  ``about``: facts for
    the runtime info.
    """

    arm: Mapping[str, Any]
    store: str
    tasks: list[ProbeTask]
    vocabulary: Mapping[str, Any]
    sample_text: str = ""
    sample_ids: list[int] = field(default_factory=list)
    env: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Hello:
    """Child → parent: the child is alive. Sent before anything heavy is imported."""

    pid: int
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Opened:
    """Child → parent: the model is loaded.

    ``seconds`` since the job arrived; ``phases`` of them in order: ``import``, ``weights``, ``warm-up``.  The rest
    is the comparison of tokenizers, which no user of the engine waits for.
    """

    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """Child → parent: ``tokens`` processed since the last message, of which ``decoded`` one by one."""

    tokens: int
    decoded: int = 0


@dataclass(frozen=True)
class Written:
    """Child → parent: a part of task ``index`` is in ``folder`` and holds rows of ``items``.

    The next part is written after a :class:`Compared`.
    """

    index: int
    folder: str
    part: int
    items: list[int]


@dataclass(frozen=True)
class Compared:
    """Parent → child: figures replaced the rows of a part, whose file has this hash and size now.

    Without a hash, the part keeps its rows.
    """

    sha256: str = ""
    size: int = 0


@dataclass(frozen=True)
class Captured:
    """Child → parent: the capture of task ``index`` is in place."""

    index: int
    path: str
    seconds: float


@dataclass(frozen=True)
class ProbeFailed:
    """Child → parent: task ``index`` failed; the next one continues."""

    index: int
    reason: str


@dataclass(frozen=True)
class Idle:
    """Child → parent: the model is loaded and all tasks so far were tried.  Sent again after each :class:`More`."""


@dataclass(frozen=True)
class More:
    """Parent → child: further tasks, numbered on from the last; an empty list ends the work."""

    tasks: list[ProbeTask]


@dataclass(frozen=True)
class Failed:
    """Child → parent: no further task can be answered."""

    kind: Status
    reason: str


@dataclass(frozen=True)
class Done:
    """Child → parent: all tasks were tried; carries the runtime info."""

    ran: Mapping[str, Any]


Message = Job | Hello | Opened | Progress | Written | Compared | Captured | ProbeFailed | Idle | More | Failed | Done
_TYPES: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(Message)}


def encode(message: Message) -> bytes:
    """Encode a message as one line."""
    return json.dumps({"type": type(message).__name__, **to_json(message)}, ensure_ascii=True).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Decode a line of :func:`encode`.

    Raises:
        EngineError: If the line is not a message of this protocol, or a field has another type.
    """
    try:
        fields = json.loads(line, parse_constant=_no_number)
        cls = _TYPES[fields.pop("type")]
        check_text(fields)
        if cls is Hello:  # of any version, whatever else that version says
            fields = {"pid": fields["pid"], "protocol": fields["protocol"]}
        message: Message = from_json(cls, fields)
        if isinstance(message, Done):
            check_runtime_info(message.ran)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EngineError(f"the worker sent something that is not a message ({error}): {line[:80]!r}") from None
    return message


def check_runtime_info(ran: Mapping[str, Any]) -> None:
    """Check the fields of runtime info that are read here; further fields are not checked.

    Raises:
        ValueError: If a field has another type. The message names it.
    """
    if fault := next(invalid_runtime_fields(ran), None):
        raise ValueError(f"what ran: {fault} is of another type")


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def check_text(value: Any, depth: int = 0) -> None:
    """Refuse text that no file can hold, and nesting that exhausts the stack.

    Raises:
        ValueError: If the value holds such text or nesting.
    """
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")
    if isinstance(value, str):
        value.encode()  # lone surrogates
    elif isinstance(value, dict):
        for key, item in value.items():
            check_text(key, depth)
            check_text(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_text(item, depth + 1)
