"""Parser of an answer's raw bytes: its events, its usage and its errors.

All of this happens after a stream has ended.  While it runs, the client only keeps the pieces of bytes and the time at
which each arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from fidelab.bench.load.exchange import Exchange
from fidelab.engines.openai.http import message_of, parse_json
from fidelab.engines.openai.named import misnamed, model_named

_DONE = b"[DONE]"


def split_events(body: bytes, whole: bool = True) -> tuple[list[bytes], list[int]]:
    """Return the data of each server-sent event and the offset after its blank line, where it is complete.

    Several data lines are joined by line feeds.  Comments, other fields and events without data are skipped.  Data
    without a blank line after it counts at the end of a ``whole`` body, since some servers omit that line.  It also
    counts if it says that the stream is done.
    """
    data, ends, at = list[bytes](), list[int](), 0
    lines: list[bytes] = []
    for line in body.splitlines(keepends=True):
        at += len(line)
        if line.startswith(b"data:"):
            lines.append(line[5:].rstrip(b"\r\n"))
        elif line[0] in b"\r\n" and lines:
            data.append(b"\n".join(lines))
            ends.append(at)
            lines = []
    if lines and (whole or b"\n".join(lines).strip() == _DONE):
        data.append(b"\n".join(lines))
        ends.append(at)
    return data, ends


def read_stream(
    exchange: Exchange, parts: Sequence[bytes], times: Sequence[float], whole: bool, models: Sequence[str] = ()
) -> None:
    """Fill ``exchange`` from the body of a response with status 200.

    ``parts``: the body in the pieces that arrived, ``times``: the time of each piece.  An event arrived with the piece
    that completed it.  ``whole``: HTTP says that the body is complete.  An error that the exchange has already (a
    time-out, a lost connection) is cleared if the stream had sent ``[DONE]`` before.  ``models``: names that the answer
    may have; none: any.
    """
    body = b"".join(parts)
    data, ends = split_events(body, whole)
    if not data:
        if exchange.error is None:
            # The kind and detail of the error for a status 200 without any event
            found = parse_json(body)
            if isinstance(found, dict) and found.get("error"):  # some servers answer errors with status 200
                exchange.error, exchange.detail = "server", message_of(found)
            else:
                what = "one JSON object" if isinstance(found, dict) else "something else" if body.strip() else "nothing"
                exchange.error = "no-stream"
                exchange.detail = f"the server answers with {what} instead of a stream of events"
        return
    pieces = list(accumulate(map(len, parts)))
    arrived = np.asarray(times)[np.searchsorted(pieces, ends)]
    done = next((at for at, one in enumerate(data) if len(one) < 10 and one.strip() == _DONE), None)
    if done is not None:
        exchange.ended, exchange.error, exchange.detail = float(arrived[done]), None, ""
        data = data[:done]
        if not data:
            exchange.error, exchange.detail = "no-stream", "the server says that the stream is done before any event"
            return
    carries = _read_events(exchange, data, models)
    exchange.events = arrived[: len(carries)][carries]
    if exchange.error is None and done is None and exchange.finish_reason is None:
        exchange.error, exchange.detail = "aborted", "the stream ended before its answer did"


def _read_events(exchange: Exchange, data: list[bytes], models: Sequence[str]) -> list[bool]:
    """Return for each event whether it carries text or a token; note usage, reason and error on the way.

    Ends at the first event that is not a JSON object.
    """
    carries: list[bool] = []
    begun = False
    for text in data:
        event = parse_json(text)
        if not isinstance(event, dict):
            shown = text.decode("utf-8", "replace").strip()
            exchange.error = "invalid-json"
            exchange.detail = f"event {len(carries) + 1} is not a JSON object: {shown}"
            break
        if models and (name := model_named(event)) is not None and name not in models:
            exchange.error, exchange.detail = "other-model", misnamed(name, models[0])
        carried = False
        if choices := event.get("choices"):
            choice = choices[0] if isinstance(choices, list) and isinstance(choices[0], dict) else {}
            if reason := choice.get("finish_reason"):
                exchange.finish_reason = reason if isinstance(reason, str) else "unknown"
            carried = bool(choice.get("text")) or _carries(choice, begun)
        if isinstance(usage := event.get("usage"), dict):
            exchange.prompt_tokens = _count(usage.get("prompt_tokens"))
            exchange.output_tokens = _count(usage.get("completion_tokens"))
        elif not choices and (event.get("error") or event.get("object") == "error"):
            exchange.error, exchange.detail = "server", message_of(event)
        carries.append(carried)
        begun = begun or carried
    return carries


def _carries(choice: dict[str, Any], begun: bool) -> bool:
    """Return whether a choice carries text or a token: ``text``, tokens, a chat's delta, or a token held back.

    Text is held back (part of a character) if it is empty though nothing is finished.  A chat's first deltas are empty
    in any case.
    """
    if choice.get("token_ids"):
        return True
    delta = choice.get("delta")
    if isinstance(delta, dict):
        if any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")):
            return True
        return begun and delta.get("content") == "" and "role" not in delta and not choice.get("finish_reason")
    return choice.get("text") == "" and not choice.get("finish_reason")


def _count(found: object) -> int | None:
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None
