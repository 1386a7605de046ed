"""``requests.jsonl``: one line per request of a load, from which all figures can be recomputed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fidelab.core.errors import OutputError

REQUESTS = "requests.jsonl"
_DIGITS = 6  # microseconds


class RecordedRequests(Protocol):
    """Outcome of one request; times in seconds of one clock."""

    index: int
    due: float | None
    sent: float
    events: NDArray[np.float64]
    ended: float
    prompt_tokens: int | None
    output_tokens: int | None
    finish_reason: str | None
    error: str | None
    detail: str
    warmup: bool


def request_row(
    exchange: RecordedRequests, started: float, *, cell: int, repeat: int, prompt_tokens: int | None, max_tokens: int
) -> dict[str, Any]:
    """Return one line: the request (``prompt_tokens``, ``max_tokens``), the server's counts, and arrival times.

    Times are seconds since ``started``, the start of the measured part; those of a warm-up are negative.
    """

    def since(instant: float | None) -> float | None:
        return None if instant is None else round(instant - started, _DIGITS)

    return {
        "cell": cell,
        "repeat": repeat,
        "index": exchange.index,
        "warmup": exchange.warmup,
        "asked": {"prompt_tokens": prompt_tokens, "output_tokens": max_tokens},
        "counted": {"prompt_tokens": exchange.prompt_tokens, "output_tokens": exchange.output_tokens},
        "due": since(exchange.due),
        "sent": since(exchange.sent),
        "events": np.round(exchange.events - started, _DIGITS).tolist(),
        "ended": since(exchange.ended),
        "finish_reason": exchange.finish_reason,
        "error": exchange.error,
        "detail": exchange.detail,
    }


def append_requests(folder: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append lines to the file of a run.

    Raises:
        OutputError: If it cannot be written.
    """
    path = folder / REQUESTS
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    except OSError as error:
        raise OutputError(f"{path}: cannot write: {error.strerror or error}") from error
