"""Small captures to write and read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fidelab.captures.container import Array
from fidelab.captures.manifest import MANIFEST, capture_folder, capture_key, dump_manifest
from fidelab.captures.requests import Generate, Prefill, Request
from fidelab.captures.writer import CaptureWriter, Comparer, store_head, store_vocabulary
from fidelab.core import Arm, KVSpec, Vocabulary, digest
from fidelab.core.serial import to_json

PIECES = [f"<{i}>" for i in range(8)]
ARM = Arm("bf16", "fake", "owner/model", "here", "w" * 8, KVSpec.parse("bf16"), "float32", "cpu", 2, (("a", "1"),))
AGAINST = "a" * 64
_TEXTS, _UNITS = ((1, 2, 3, 4), (5, 6, 7, 1), (2, 4, 6, 3)), ((0, 0), (0, 0), (1, 1))
WINDOWS = Prefill("kld", _TEXTS, 1, 2, _UNITS, (("n_ctx", 4), ("protocol", "half")))
PROMPTS = Generate("trajectory", ((1, 2), (3,)), 3, (0,), 4, (("n_predict", 3), ("template", "raw")))


def vocabulary(pieces: Sequence[str] = PIECES) -> Vocabulary:
    return Vocabulary(len(pieces), digest(*pieces))


def rows(item: int, width: int = 8) -> dict[str, Array]:
    return {"logprobs": np.full((2, width), -1.0 - item, dtype=np.float32)}


def writer(
    store: Path,
    arm: Arm = ARM,
    request: Request = WINDOWS,
    pieces: Sequence[str] = PIECES,
    n: int = 0,
    comparer: Comparer | None = None,
) -> CaptureWriter:
    """An open writer; its vocabulary is stored."""
    key = capture_key(arm, request, {"fake": "1"}, n)
    words = vocabulary(pieces)
    store_vocabulary(store, words, pieces)
    return CaptureWriter(capture_folder(store, arm, request, key), request, key, to_json(arm), words, AGAINST, comparer)


def write(
    store: Path,
    arm: Arm = ARM,
    request: Request = WINDOWS,
    pieces: Sequence[str] = PIECES,
    *,
    replicate: int = 0,
    estimator: str = "logprobs",
    head: Mapping[str, Array] | None = None,
    ran: Mapping[str, Any] | None = None,
) -> Path:
    """A finished capture."""
    out = writer(store, arm, request, pieces, replicate)
    for item in range(len(request.items())):
        out.add(item, rows(item))
    if head is not None:
        out.head(store_head(store, head, None, 1.0))
    return out.finish(estimator, {"device": "cpu", **(ran or {})}, {"tokens": 12})


def named(kv: str) -> Arm:
    return replace(ARM, name=kv, kv=KVSpec.parse(kv))


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    """Change a manifest and give it a valid checksum again: what only someone who means it does."""
    path = folder / MANIFEST
    manifest = {**json.loads(path.read_text()), **changes}
    path.write_text(dump_manifest(manifest))


def tree(root: Path) -> dict[str, str]:
    """Every file under a folder with the hash of its content."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
