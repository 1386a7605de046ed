"""Two captures side by side.  Captures that must not be compared are refused, and the message names the mismatch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill, Request, RoundedWeights, Served
from fidelab.core import Estimator, digest
from fidelab.core.errors import MismatchError

_RETURNED = "returned"


@dataclass(frozen=True)
class Pair:
    """Reference and test capture with their items matched: ``items`` holds (reference index, test index).

    ``figures``: columns ``[rows]`` by test item, for rows that were compared before.
    """

    ref: Capture
    test: Capture
    items: tuple[tuple[int, int], ...]
    figures: Mapping[int, Mapping[str, NDArray[np.generic]]] = field(default_factory=dict, compare=False)

    @classmethod
    def match(cls, ref: Capture, test: Capture, *, subset: bool = False) -> Pair:
        """Check comparability and match items by their token ids.

        ``subset``: the test side may hold only some of the items (run-to-run noise).

        Raises:
            MismatchError: If the captures must not be compared.  The message names the first difference.
        """
        where = f"{test.folder} against {ref.folder}"
        for name in ("kind", "axis"):
            if ref.manifest[name] != test.manifest[name]:
                raise MismatchError(f"{where}: {name} {test.manifest[name]!r} is not {ref.manifest[name]!r}")
        expected, actual = ref.manifest["settings"], test.manifest["settings"]
        for name in sorted({*expected, *actual}):
            if expected.get(name) != actual.get(name):
                raise MismatchError(f"{where}: {name} {actual.get(name)!r} is not {expected.get(name)!r}")
        if ref.vocabulary != test.vocabulary:
            for index, (a, b) in enumerate(zip(ref.pieces(), test.pieces(), strict=False)):
                if a != b:
                    raise MismatchError(f"{where}: vocabulary differs: token {index} is {b!r}, in the reference {a!r}")
        if (ref.estimator is Estimator.TOPK) != (test.estimator is Estimator.TOPK):
            raise MismatchError(
                f"{where}: estimator {test.estimator} cannot be paired with {ref.estimator} "
                "(top-k gives only a lower bound)"
            )
        # Generated text that is tokenized again need not give the ids that were generated
        ref_ids, test_ids = _ids(ref), _ids(test)
        if ref_ids != test_ids:
            raise MismatchError(
                f"{where}: generated ids that are {test_ids} cannot be paired with {ref_ids} ones: compare servers "
                "that both return token ids, or neither"
            )
        whole = Prefill | Served | RoundedWeights
        if isinstance(ref.request, whole) and isinstance(test.request, whole):
            rows, other = (ref.request.first, ref.request.last), (test.request.first, test.request.last)
            sparse = any(isinstance(side.request, Prefill) and side.request.positions for side in (ref, test))
            if rows != other and not sparse:
                raise MismatchError(f"{where}: rows {other[0]}–{other[1]} of each window are not {rows[0]}–{rows[1]}")
        if not subset and len(ref.items) != len(test.items):
            noun = "windows" if ref.manifest["kind"] in ("prefill", "served") else "items"
            raise MismatchError(f"{where}: {len(test.items)} {noun} are not {len(ref.items)}")
        if subset:
            place = {item["hash"]: index for index, item in enumerate(ref.items)}
            pairs = [(place.get(item["hash"], -1), index) for index, item in enumerate(test.items)]
        else:
            pairs = [(index, index) for index in range(len(ref.items))]
        for r, t in pairs:
            if r < 0 or ref.items[r]["hash"] != test.items[t]["hash"]:
                raise MismatchError(f"{where}: tokens of item {t} differ (another text, tokenizer, or template)")
            asked = ref.request, test.request
            if all(isinstance(one, Prefill) for one in asked) and _rows_of(asked[0], r) != _rows_of(asked[1], t):
                raise MismatchError(f"{where}: rows of item {t} are at other positions than the reference's")
        return cls(ref, test, tuple(pairs))


def _rows_of(request: Request, item: int) -> tuple[int, ...]:
    return tuple(request.rows_of(item)) if isinstance(request, Prefill) else ()


def _ids(capture: Capture) -> str:
    """Return ``returned`` if the engine returned the ids, or ``retokenized`` if they come from its text."""
    generated = capture.manifest["kind"] == "generate"
    return str(capture.manifest["ran"].get("ids") or _RETURNED) if generated else _RETURNED


def comparability_key(capture: Capture) -> dict[str, Any]:
    """Return the fields that must agree before numbers of one axis are ranked together.

    See docs/metrics/between-runs.md#comparability.
    """
    return {
        "items": digest(*(item["hash"] for item in capture.items)),
        "settings": capture.manifest["settings"],
        "vocabulary": capture.vocabulary.sha256,
        "estimator": str(capture.estimator),
        **({} if _ids(capture) == _RETURNED else {"ids": _ids(capture)}),
    }
