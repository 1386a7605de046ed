"""From the raw bytes of an answer to its events, its usage and what went wrong.

All of this runs when a stream has ended: while it runs, the client only keeps pieces of bytes and when each arrived.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from fidelab.bench.load.exchange import Exchange

__all__ = ["read_stream", "said", "split_events"]

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")  # atomic: the halves of one \r\n are not two line ends
_DONE = b"[DONE]"


def split_events(body: bytes, whole: bool = True) -> tuple[list[bytes], list[int]]:
    """The data of each server-sent event, and the offset at which it was complete: behind its blank line.

    Several data lines are joined by line feeds; comments, other fields and events without data are left out.  Data
    without a blank line behind it counts at the end of a ``whole`` body (some servers leave that out), and where it
    says that the stream is done.
    """
    plain = body.startswith(b"data:") and body.endswith(b"\n\n") and b"\r" not in body
    if plain and body.count(b"\n") == 2 * body.count(b"\n\ndata:") + 2:  # one line of data per event, nothing else
        data = body[5:-2].split(b"\n\ndata:")
        return data, list(accumulate(len(one) + 7 for one in data))
    blocks, ends = _blocks(body)
    data = []
    offsets: list[int] = []
    last = len(blocks) - 1
    for at, (block, end) in enumerate(zip(blocks, ends, strict=True)):
        event = block[5:] if block.startswith(b"data:") and b"\n" not in block and b"\r" not in block else _data(block)
        if event is not None and (at < last or whole or event.strip() == _DONE):
            data.append(event)
            offsets.append(end)
    return data, offsets


def _blocks(body: bytes) -> tuple[list[bytes], list[int]]:
    """What lies between blank lines, and where each of these ends.  The last block has none behind it."""
    if b"\r" not in body:
        blocks = body.split(b"\n\n")
        ends = list(accumulate(len(block) + 2 for block in blocks))
    else:
        blocks, ends = [], []
        begin = 0
        for blank in _BLANK_LINE.finditer(body):
            blocks.append(body[begin : blank.start()])
            begin = blank.end()
            ends.append(begin)
        blocks.append(body[begin:])
        ends.append(0)
    ends[-1] = len(body)
    return blocks, ends


def _data(block: bytes) -> bytes | None:
    lines = [line[5:] for line in _LINE_END.split(block) if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def read_stream(exchange: Exchange, parts: Sequence[bytes], times: Sequence[float], whole: bool) -> None:
    """Fill ``exchange`` from the body of a 200.

    ``parts``: the body in the pieces that arrived, ``times``: when each did; an event arrived with the piece that
    completed it.  ``whole``: HTTP says that the body is complete.  An error that the exchange has already (a time-out,
    a lost connection) is lifted where the stream had said ``[DONE]`` before.
    """
    body = b"".join(parts)
    data, ends = split_events(body, whole)
    if not data:
        if exchange.error is None:
            exchange.error, exchange.detail = _no_stream(body)
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
    events, bad = _objects(data)
    exchange.events = arrived[: len(events)][_carrying(exchange, events)]
    if bad is not None:
        exchange.error, exchange.detail = "invalid-json", f"event {len(events) + 1} is no JSON object: {bad}"
    elif exchange.error is None and done is None and exchange.finish_reason is None:
        exchange.error, exchange.detail = "aborted", "the stream ended before its answer did"


def _objects(data: list[bytes]) -> tuple[list[dict[str, Any]], str | None]:
    """The events up to the first that is no JSON object, and that one's text."""
    try:
        events_at_once = orjson.loads(b"[" + b",".join(data) + b"]")  # one call instead of one per event
        if len(events_at_once) == len(data) and all(type(event) is dict for event in events_at_once):
            return events_at_once, None
    except orjson.JSONDecodeError:
        pass
    events: list[dict[str, Any]] = []
    for text in data:
        try:
            event = orjson.loads(text)
        except orjson.JSONDecodeError:
            event = None
        if not isinstance(event, dict):
            return events, text.decode("utf-8", "replace").strip()
        events.append(event)
    return events, None


def _carrying(exchange: Exchange, events: list[dict[str, Any]]) -> NDArray[np.bool_]:
    """``[n]`` whether each event carries text or a token; usage, reason and error are noted on the way."""
    carries = np.zeros(len(events), bool)
    begun = False
    for at, event in enumerate(events):
        if choices := event.get("choices"):
            choice = choices[0] if isinstance(choices, list) and isinstance(choices[0], dict) else {}
            if reason := choice.get("finish_reason"):
                exchange.finish_reason = reason if isinstance(reason, str) else "unknown"
            if choice.get("text") or _carries(choice, begun):
                carries[at] = begun = True
        if isinstance(usage := event.get("usage"), dict):
            exchange.prompt_tokens = _count(usage.get("prompt_tokens"))
            exchange.output_tokens = _count(usage.get("completion_tokens"))
        elif not choices and (event.get("error") or event.get("object") == "error"):
            exchange.error, exchange.detail = "server", _message(event)
    return carries


def _carries(choice: dict[str, Any], begun: bool) -> bool:
    """A choice without ``text``: tokens, a chat's delta, or a token whose text the server still holds back.

    Held back (part of a character) means empty text though nothing is finished; a chat's first deltas are empty anyway.
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


def _no_stream(body: bytes) -> tuple[str, str]:
    """Kind and detail of a 200 without any event."""
    try:
        body_json = orjson.loads(body)
    except orjson.JSONDecodeError:
        body_json = None
    if isinstance(body_json, dict) and body_json.get("error"):  # some servers say 200 all the same
        return "server", _message(body_json)
    what = "one JSON object" if isinstance(body_json, dict) else "nothing" if not body.strip() else "something else"
    return "no-stream", f"the server answers with {what} instead of a stream of events"


def said(body: bytes) -> str:
    """What the body of an error says, in whichever of the usual forms."""
    try:
        return _message(orjson.loads(body))
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace").strip() or "no message"


def _message(found: Any) -> str:
    for key in ("error", "message", "detail", "msg"):
        while isinstance(found, dict) and key in found:
            found = found[key]
        if isinstance(found, list) and found:
            found = found[0]
    if isinstance(found, str):
        return found
    try:
        return orjson.dumps(found).decode()
    except orjson.JSONEncodeError:
        return "JSON that nests too deeply"
