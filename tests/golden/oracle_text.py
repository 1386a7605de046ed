"""The part of the independent program that reads generated text: the definitions of docs/metrics/, and numpy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.golden.oracle_read import Side

CONFIDENT_FLIP = 0.1  # nats


def mcnemar(b: int, c: int) -> float:
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1)) / 2.0 ** (b + c)
    return min(1.0, 2 * tail)


def prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def trajectory(ref: Side, test: Side) -> dict[str, float]:
    pairs = [(r, ref.ids[r], test.ids[t]) for t, r in enumerate(ref.places(test))]
    good = [(r, a, b) for t, (r, a, b) in enumerate(pairs) if (a or b) and not (ref.failed[r] or test.failed[t])]
    found = {"n_items": float(len(pairs)), "n_failed": float(len(pairs) - len(good))}
    if not good or not any(b for _, _, b in good):
        return found
    shared = sum(prefix(a, b) for _, a, b in good)
    forks = [(r, a, b, prefix(a, b)) for r, a, b in good if a != b]
    equal = sum(x == y for _, a, b in good for x, y in zip(a, b, strict=False))
    longest = sum(max(len(a), len(b)) for _, a, b in good)
    found |= {"score": 100 * shared / longest, "score (REFRACT)": 100 * shared / sum(len(b) for _, _, b in good)}
    found |= {"exact match": 1 - len(forks) / len(good), "positional agreement": equal / longest}
    if forks:
        found["median first divergence"] = float(np.median([at for *_, at in forks]))
    margins = []
    for r, _, b, at in forks:
        rows = ref.rows[r]
        if at < len(b) and rows is not None and at < len(rows):
            margins.append(float(rows[at].max() - rows[at][b[at]]))
    return {**found, **({"near ties": float(np.mean([m < CONFIDENT_FLIP for m in margins]))} if margins else {})}


def retrieval(ref: Side, test: Side) -> dict[str, float]:
    cells: dict[tuple[Any, Any], list[tuple[float, float]]] = {}
    failed = 0
    for t, r in enumerate(ref.places(test)):
        note = json.loads(ref.request["notes"][r])
        if ref.failed[r] or test.failed[t]:
            failed += 1
            continue
        sides = [hit(side.text(side.ids[item]), note) for side, item in ((ref, r), (test, t))]
        cells.setdefault((note["length"], note["position"]), []).append((sides[0], sides[1]))
    found = {"n_items": float(len(test.ids)), "n_failed": float(failed)}
    if not cells:
        return found
    base, own = np.array([pair for cell in cells.values() for pair in cell]).T
    at = {cell: np.array(pairs).mean(axis=0) for cell, pairs in cells.items()}
    lost = [max(0.0, float(a - b)) for a, b in at.values() if a > 0]
    found |= {"accuracy": own.mean(), "reference's accuracy": base.mean(), "cells": len(cells)}
    found |= {"accuracy difference": 100 * (own.mean() - base.mean()), "informative cells": len(lost)}
    found |= {"lost": float((own < base).sum()), "found by the reference": float((base > 0).sum())}
    found["score (REFRACT)"] = 100 * (1 - sum(lost) / len(at))
    return {**found, **({"score": 100 * (1 - float(np.mean(lost)))} if lost else {})}


def hit(answer: str, note: Mapping[str, Any]) -> float:
    """Share of the codes that an answer has; 0 where it has a wrong one."""
    plain = re.sub(r"[-–—\s]", "", answer).upper()
    has = [code.replace("-", "") in plain for code in note["codes"]]
    return 0.0 if any(code.replace("-", "") in plain for code in note["wrong"]) else sum(has) / len(has)


def levenshtein(a: Sequence[int], b: Sequence[int]) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


def drift(a: Sequence[int], b: Sequence[int]) -> float:
    return min(1.0, levenshtein(a, b) / len(a)) if a else float(bool(b))


def perturbed(ref: Side, test: Side) -> dict[str, float]:
    notes = [json.loads(note) for note in test.request["notes"]]
    places = ref.places(test)
    plain = {n["prompt"]: t for t, n in enumerate(notes) if not n["perturbation"]}
    cells, failed = [], 0
    for t, note in enumerate(notes):
        if note["perturbation"]:
            base = plain[note["prompt"]]
            if test.failed[t] or test.failed[base] or ref.failed[places[t]] or ref.failed[places[base]]:
                failed += 1
                continue
            sides = (ref.ids[places[base]], ref.ids[places[t]]), (test.ids[base], test.ids[t])
            cells.append([drift(*side) for side in sides])
    found = {"n_items": float(len(notes) - len(plain)), "n_failed": float(failed)}
    if not cells:
        return found
    own, mine = np.array(cells).T
    found |= {"drift of the reference": own.mean(), "drift of the candidate": mine.mean()}
    found["score"] = float(np.mean(100 * np.exp(-5 * np.maximum(0, mine - own))))
    asked = test.request["settings"]
    kinds = asked["perturbations"].split(",")
    if len(plain) == asked["prompts"]:
        found["skipped"] = float(len(kinds) * len(plain) - (len(notes) - len(plain)))
    return {**found, "excess drift": float((mine - own).mean())}


def arithmetic(ref: Side, test: Side) -> dict[str, float]:
    def right(side: Side, item: int, gold: str) -> bool:
        text = side.text(side.ids[item])
        numbers = re.findall(r"####\s*(-?\d+)", text)[:1] or re.findall(r"-?\d+", text)[-1:]
        return numbers == [gold]

    items = [(r, t, json.loads(ref.request["notes"][r])["gold"]) for t, r in enumerate(ref.places(test))]
    good = [(right(ref, r, g), right(test, t, g)) for r, t, g in items if not (ref.failed[r] or test.failed[t])]
    found = {"n_items": float(len(items)), "n_failed": float(len(items) - len(good))}
    if not good:
        return found
    base, own = np.array(good, dtype=np.float64).T
    lost, gained = int((base > own).sum()), int((own > base).sum())
    found |= {"accuracy": own.mean(), "reference accuracy": base.mean(), "difference": 100 * (own - base).mean()}
    return {
        **found,
        "score": 100 * own.mean(),
        "right in the reference": base.sum(),
        "lost": lost,
        "gained": gained,
        "McNemar p": mcnemar(lost, gained),
    }
