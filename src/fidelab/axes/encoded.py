"""How much of what attention read was encoded, for formats that keep some tokens exact.

See docs/metrics/bytes.md#share-of-tokens-encoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from numpy.typing import ArrayLike

from fidelab.axes.base import AxisScore
from fidelab.captures.requests import Prefill, Request
from fidelab.core import Arm, KVSpec
from fidelab.core.errors import FidelabError
from fidelab.formats import create
from fidelab.metrics.encoded import context_of_share, encoded_share
from fidelab.results.sizes import CONTEXT_FACT, SHARE_FACT

_MOST = 0.9  # of the tokens: from here on a loss is that of the format


def _share_and_context(
    kv: KVSpec, positions: ArrayLike, first: int, last: int, n_ctx: int
) -> tuple[float, int | None] | None:
    """Share of tokens encoded and the context at which it is 90%, of the side that has less of it; ``None``: all are.

    ``positions``: of the scored rows in windows of ``n_ctx`` tokens.
    """
    found = []
    for spec in (kv.k, kv.v):
        if not {"sinks", "tail", "axis"} & dict(spec.options).keys():
            continue
        try:
            side = create(spec)
        except FidelabError:  # of another package, unknown here
            continue
        if not side.has_exceptions:
            continue
        exact = side.sinks, side.tail, side.token_block
        share = encoded_share(positions, *exact)
        found.append((share, context_of_share(_MOST, *exact, first=first, last=last, n_ctx=n_ctx)))
    return min(found, key=lambda one: one[0], default=None)


def encoded_facts(kv: KVSpec, score: AxisScore) -> dict[str, Any]:
    """Return the facts of a KLD about the tokens encoded, at its longest context; empty for formats without exceptions.

    Keys and values may differ: the facts are those of the side with fewer tokens encoded.
    """
    parts = [part for part in (score.parts.values() or [score]) if len(part.positions.get("position", ()))]
    if not parts:
        return {}
    longest = max(parts, key=lambda part: int(part.positions["n_ctx"][0]))
    rows, n_ctx = longest.positions["position"], int(longest.positions["n_ctx"][0])
    found = _share_and_context(kv, rows, int(rows.min()), int(rows.max()), n_ctx)
    if found is None:
        return {}
    share, context = found
    return {SHARE_FACT: share, **({} if context is None else {CONTEXT_FACT: context})}


def encoding_remarks(candidates: Sequence[Arm], requests: Mapping[str, Request]) -> Iterator[str]:
    """Yield a line per candidate that keeps some tokens exact: its share of tokens encoded, and where it is 90%.

    ``requests``: those of the KLD.
    """
    asked = [request for request in requests.values() if isinstance(request, Prefill) and request.windows]
    longest = max(asked, key=lambda request: len(request.windows[0]), default=None)
    if longest is None:
        return
    n_ctx, rows = len(longest.windows[0]), range(longest.first, longest.last + 1)
    for arm in candidates:
        found = _share_and_context(arm.kv, rows, longest.first, longest.last, n_ctx)
        if found is not None:
            share, context = found
            enough = "" if context is None else f", {_MOST:.0%} from {context:,} tokens"
            yield f"{arm.name}: {share:.0%} of the tokens that attention reads are encoded at {n_ctx:,} tokens{enough}"
