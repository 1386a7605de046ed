"""Typed parent–child messages: one JSON object per line, over the child's standard input and output.

The version is checked when the child greets, because it may run in an environment with another fidelab.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from fidelab.core import Status
from fidelab.errors import EngineError

__all__ = [
    "PROTOCOL",
    "Captured",
    "Done",
    "Failed",
    "Hello",
    "Idle",
    "Job",
    "Message",
    "More",
    "Opened",
    "ProbeFailed",
    "ProbeTask",
    "Progress",
    "decode",
    "encode",
]

PROTOCOL = 8


@dataclass(frozen=True)
class ProbeTask:
    """One request to answer: its record, where the capture goes, and the capture's key."""

    request: Mapping[str, Any]
    target: str
    key: Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """Parent → child: an arm to open, and its first tasks.

    ``env``: variables to set before the engine is imported (a command prefix may not hand them on).  ``about``: goes
    into the record of what ran.
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
    """Child → parent: alive, before anything heavy is imported."""

    pid: int
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Opened:
    """Child → parent: the model is loaded.

    ``seconds`` since the job arrived; ``phases`` of them in order: ``import``, ``weights``, ``warm-up``.  What is left
    went into the comparison of tokenizers, which no user of the engine waits for.
    """

    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """Child → parent: ``tokens`` processed since the last message, of which ``decoded`` one by one."""

    tokens: int
    decoded: int = 0


@dataclass(frozen=True)
class Captured:
    """Child → parent: the capture of task ``index`` is in place."""

    index: int
    path: str
    seconds: float


@dataclass(frozen=True)
class ProbeFailed:
    """Child → parent: task ``index`` failed, the next one goes on."""

    index: int
    reason: str


@dataclass(frozen=True)
class Idle:
    """Child → parent: the model is loaded and all tasks so far were tried; sent again after each More."""


@dataclass(frozen=True)
class More:
    """Parent → child: further tasks, numbered on from the last; none ends the work."""

    tasks: list[ProbeTask]


@dataclass(frozen=True)
class Failed:
    """Child → parent: nothing more can be answered.  ``kind``: a value of core.Status."""

    kind: str
    reason: str


@dataclass(frozen=True)
class Done:
    """Child → parent: all tasks were tried; what ran."""

    ran: Mapping[str, Any]


Message = Job | Hello | Opened | Progress | Captured | ProbeFailed | Idle | More | Failed | Done
_TYPES: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(Message)}


def encode(message: Message) -> bytes:
    """One line."""
    return json.dumps({"type": type(message).__name__, **asdict(message)}, ensure_ascii=True).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The inverse of :func:`encode`.

    Raises:
        EngineError: the line is no message of this protocol.
    """
    try:
        fields = json.loads(line)
        cls = _TYPES[fields.pop("type")]
        if cls is Hello:  # of any version, whatever else that version says
            fields = {"pid": fields["pid"], "protocol": fields["protocol"]}
        elif cls is Failed:
            fields["kind"] = str(Status(fields["kind"]))
        elif cls in (Job, More):
            fields["tasks"] = [ProbeTask(**task) for task in fields["tasks"]]
        message: Message = cls(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"the worker sent something that is no message ({error}): {line[:80]!r}") from None
    return message
