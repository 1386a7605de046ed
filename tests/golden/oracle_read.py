"""The part of the independent program that reads a stored run: JSON, numpy's arrays, and the product with the head."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

DATA = Path(__file__).parent / "data"
Array = Any  # of numpy


class Side(NamedTuple):
    """What one arm answered to one request: rows [n, V] of logits per item (``None``: none), and token ids per item."""

    request: Mapping[str, Any]
    rows: list[Array | None]
    ids: list[list[int]]
    failed: list[bool]
    text: Callable[[list[int]], str]
    facts: Mapping[str, Any]

    def places(self, other: Side) -> list[int]:
        """For each of the other side's items the place of the equal item here."""
        mine, theirs = (list(map(str, items_of(side.request))) for side in (self, other))
        return list(range(len(mine))) if mine == theirs else [mine.index(item) for item in theirs]


def items_of(request: Mapping[str, Any]) -> list[Any]:
    """The token ids of each item."""
    if "continuations" in request:
        return list(zip(request["prompts"], request["continuations"], strict=True))
    return list(request.get("windows") or request.get("prompts") or [])


def load(name: str) -> tuple[Mapping[str, Any], dict[str, dict[str, Side]]]:
    """A stored run: its text, and by role and request what was answered."""
    text = json.loads((DATA / f"{name}.json").read_text("utf-8"))
    arrays = np.load(DATA / f"{name}.npz")

    def wide(key: str, bfloat16: bool) -> Array:
        array = arrays[key]
        return (array.astype(np.uint32) << 16).view(np.float32) if bfloat16 else array

    def split(entry: Mapping[str, Any], bfloat16: bool) -> Iterator[Array | None]:
        whole, start = wide(entry["array"], bfloat16), 0
        for length in entry["lengths"]:
            yield None if length is None else whole[start : start + length]
            start += length or 0

    def side(one: Mapping[str, Any]) -> Side:
        request, pieces = text["requests"][one["request"]], text["vocabularies"][one["vocabulary"]]
        n = len(items_of(request))
        named = {k: list(split(entry, k in one["bfloat16"])) for k, entry in one["arrays"].items()}
        rows = named.get(one["estimator"], [None] * n)
        if one["estimator"] == "hidden" and one["head"] is not None:
            head = text["heads"][one["head"]]
            tensors = {k: wide(t["array"], t["bfloat16"]).astype(np.float64) for k, t in head["tensors"].items()}
            rows = [None if states is None else logits(states, tensors, head) for states in rows]
        ids = [[] if part is None else part.tolist() for part in named.get("ids", [None] * n)]
        failed = [str(item) in one["failed"] for item in range(n)]
        return Side(request, rows, ids, failed, lambda ids: written(pieces, ids), one["facts"])

    roles = {arm["role"]: {k: side(one) for k, one in arm["captures"].items()} for arm in text["arms"]}
    return text, roles


def logits(states: Array, tensors: Mapping[str, Array], head: Mapping[str, Any]) -> Array:
    scores = head["scale"] * (states.astype(np.float64) @ tensors["weight"].T + tensors.get("bias", 0.0))
    return scores if head["softcap"] is None else head["softcap"] * np.tanh(scores / head["softcap"])


def written(pieces: Sequence[str], ids: Sequence[int]) -> str:
    """The text of byte tokens."""
    found = [re.fullmatch("<0x([0-9A-F]{2})>", pieces[token]) for token in ids]
    return bytes(int(match[1], 16) for match in found if match).decode("utf-8", "replace").replace("\0", "")
