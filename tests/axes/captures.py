"""Captures made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fidelab.captures.manifest import capture_key
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Request
from fidelab.captures.writer import CaptureWriter, store_head, store_vocabulary
from fidelab.core import Arm, KVSpec, Vocabulary, digest
from fidelab.core.serial import to_json

BYTES = [f"<0x{i:02X}>" for i in range(256)]

Answer = Mapping[str, Any] | Sequence[int] | None
"""The arrays of an item, the ids of its tokens, or nothing."""


def make_arm(kv: str, engine: str = "hf") -> Arm:
    return Arm(kv, engine, "m", "m", "0" * 64, KVSpec.parse(kv), "float32", "cpu", 1)


def make_capture(
    folder: Path,
    request: Request,
    answers: Sequence[Answer],
    arm: Arm,
    *,
    size: int = 8,
    pieces: Sequence[str] = (),
    failed: Mapping[int, str] | None = None,
    head: Mapping[str, Any] | None = None,
    estimator: str = "",
    facts: Mapping[str, Any] | None = None,
) -> Capture:
    """Write a capture to ``folder``; a head and the vocabulary of ``pieces`` are stored next to it.

    ``size``: of a vocabulary without pieces. ``failed``: item → reason.
    """
    words = Vocabulary(len(pieces), digest(*pieces)) if pieces else Vocabulary(size, "0" * 64)
    if pieces:
        store_vocabulary(folder.parent, words, pieces)
    writer = CaptureWriter(folder, request, capture_key(arm, request, {}, 0), to_json(arm), words)
    for item, answer in enumerate(answers):
        if answer is not None:
            writer.add(item, answer if isinstance(answer, Mapping) else {"ids": np.array(answer, dtype=np.int32)})
    for item, reason in (failed or {}).items():
        writer.fail(item, reason)
    if head is not None:
        writer.head(store_head(folder.parent, head, None, 1.0))
    return Capture(writer.finish(estimator or ("logprobs" if head is None else "hidden"), {}, facts or {}))
