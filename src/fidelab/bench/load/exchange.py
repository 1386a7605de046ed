"""Requests that a drive sends, and their outcomes.  Times are seconds of the system's monotonic clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fidelab.core.errors import InputError


class ServerRefusedError(InputError):
    """The server refuses every request.  ``status``: HTTP status.  ``said``: the server's message."""

    def __init__(self, message: str, status: int, said: str) -> None:
        super().__init__(message)
        self.status = status
        self.said = said


@dataclass(frozen=True)
class Target:
    """Destination of requests."""

    base_url: str
    """Ends in ``/v1`` or wherever the API lies."""
    path: str = "/completions"
    """Below ``base_url``: ``/completions`` or ``/chat/completions``."""
    api_key: str | None = field(default=None, repr=False)
    """Sent as bearer token; never shown."""
    timeout: float = 600.0
    """Seconds for one request, from sending to the end of its answer."""
    connect_timeout: float = 10.0
    """Seconds for opening a connection."""
    models: tuple[str, ...] = ()
    """The requested model, and its other names: an answer that names another is an error; empty: any may answer."""


@dataclass(frozen=True)
class LoadRequest:
    """One request, rendered before the run."""

    index: int
    """Position in the load; each index occurs once."""
    body: bytes
    """The JSON body, complete."""
    prompt_tokens: int | None
    """Requested number; ``None``: unknown (a prompt of text)."""
    max_tokens: int
    """Output tokens asked."""
    due: float | None = None
    """Open loop: seconds after the start of the drive; ``None``: closed loop."""


@dataclass(frozen=True)
class Load:
    """Requests to send, and when to send them."""

    requests: Sequence[LoadRequest]
    """Requests, in the order of sending."""
    concurrency: int | None = None
    """Requests in flight at most; ``None``: no limit, so a closed loop sends everything at once."""
    open_loop: bool = False
    """Each request is sent when due, whatever became of those before (within ``concurrency``)."""
    warmup: int = 0
    """First requests that are not measured.  Closed loop: the measured part begins when all of them have ended;
    open loop: when the first request after them is due."""
    duration: float | None = None
    """Seconds of the measured part after which nothing more is sent; what is in flight may end."""
    drain: float = 60.0
    """Seconds that requests in flight get after ``duration``; then they end with error ``aborted``."""


@dataclass
class Exchange:
    """Outcome of one request."""

    index: int
    """The request's."""
    due: float | None
    """Open loop: when it was to be sent."""
    sent: float
    """Time at which its bytes were handed to the socket; with error ``connect``: when the connection was given up."""
    events: NDArray[np.float64]
    """``[n]``: arrival of each stream event that carries text or a token.  Others do not count: role-only and empty
    first chat deltas, usage alone, ``[DONE]``."""
    ended: float
    """Time at which the answer was complete, or broke off."""
    prompt_tokens: int | None = None
    """Count by the server's usage."""
    output_tokens: int | None = None
    """Count by the server's usage."""
    finish_reason: str | None = None
    """Reason why the server stopped: ``length``, ``stop``."""
    error: str | None = None
    """``None``: complete.  Else the kind: ``connect``, ``timeout``, ``aborted`` (ended by the drive, or left unfinished
    by the server), ``http-404`` and other statuses, ``invalid-json``, ``invalid-http``, ``no-stream``, ``server`` (an
    error sent as an event), ``too-large`` (more bytes than an answer of this length can have), ``other-model`` (the
    answer names a model that was not requested)."""
    detail: str = ""
    """One line on the error: the server's message, shortened, without the key."""
    warmup: bool = False
    """Part of the warm-up, not measured."""
    retried: bool = False
    """Sent again on a fresh connection, since the server had closed the idle one."""


@dataclass(frozen=True)
class DriveResult:
    """One drive."""

    exchanges: list[Exchange]
    """Outcomes by index, without requests that were never sent (the duration was over, the server had gone)."""
    started: float
    """Start of the measured part, after the warm-up."""
    ended: float
    """End of the measured part: the last answer."""
    lag: NDArray[np.float64]
    """``[n]`` seconds by which the event loop ran late, each 10 ms of the measured part."""
    cpu_seconds: float
    """Processor time of the client over the measured part."""
    behind: bool
    """Open loop: requests could not be sent in time; p99 of ``sent - due`` is above 50 ms."""
