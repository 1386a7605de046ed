"""Whether the answers in a capture are what their request asks for, as far as no axis has to know.

A capture is written by the engine's process, which may run another fidelab, or ask a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.container import BFloat16
from fidelab.captures.manifest import FIGURES
from fidelab.captures.requests import Forced, Layerwise, Prefill, Recached, Reweighted, Served, Timed
from fidelab.core import Estimator
from fidelab.errors import CaptureError

if TYPE_CHECKING:
    from fidelab.captures.reader import Capture

__all__ = ["MOST_LOGPROB", "MOST_MASS", "check_answers", "why_no_distribution"]

MOST_LOGPROB = 1e-3  # nats: what rounding may lift a log-probability above 0
MOST_MASS = 1.01  # and the sum of the probabilities of a row above 1


def check_answers(capture: Capture) -> None:
    """Check the types and dimensions of all stored arrays, and the values of top tokens, ids and times.

    Raises:
        CaptureError: one is not what it should be; names the item.
    """
    try:
        expected = len(capture.request.items())
        if len(capture.items) != expected:
            raise ValueError(f"{len(capture.items)} items answer {expected}")
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise CaptureError(f"capture {capture.folder} answers no request ({error}); capture again") from None
    for item in range(len(capture.items)):
        try:
            fault = _fault(capture, item)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            fault = f"cannot be read ({type(error).__name__}: {error})"
        if fault:
            raise CaptureError(f"capture {capture.folder}: item {item} {fault}; delete it and capture again")


def why_no_distribution(logprobs: NDArray[np.floating]) -> str:
    """Why rows of log-probabilities ``[rows, k]`` are none of the top tokens of distributions; empty where they are."""
    if not logprobs.size:
        return ""
    worst = float(np.max(logprobs))
    if not worst <= MOST_LOGPROB:  # NaN, too
        return f"has a log-probability of {worst:.4g}, and none is above 0"
    mass = float(np.exp(logprobs.astype(np.float64)).sum(axis=-1).max())
    return f"has probabilities that add up to {mass:.4g}, and none do to more than 1" if mass > MOST_MASS else ""


def _fault(capture: Capture, item: int) -> str:
    """What is wrong with the arrays of one item; empty for nothing."""
    names = capture.names(item)
    if not names:
        return "" if capture.items[item]["failed"] is not None else "has no answer"
    if not isinstance(capture.items[item]["failed"], str | None):
        return "has a reason that is no text"
    compact = capture.compact(item)
    plain = [name for name in names if not (compact and name == "logprobs") and not name.startswith(FIGURES)]
    arrays = {name: capture.array(item, name) for name in plain}
    shapes = {name: (one.bits if isinstance(one, BFloat16) else one).shape for name, one in arrays.items()}
    for name, one in arrays.items():
        kind = "f" if isinstance(one, BFloat16) else one.dtype.kind
        if kind != ("i" if name in ("ids", "topk_ids") else "f"):
            return f"has {name} of type {kind}"
    for name, dimensions in (("ids", 1), ("seconds", 1), *((str(estimator), 2) for estimator in Estimator)):
        if name in shapes and len(shapes[name]) != dimensions:
            return f"has {name} of {len(shapes[name])} dimensions"
    if "ids" in arrays and min(capture.ints(item, "ids"), default=0) < 0:
        return "has a negative token id"
    if ("topk_ids" in arrays or "topk_logprobs" in arrays) and shapes.get("topk_ids") != shapes.get("topk_logprobs"):
        return "has other ids than log-probabilities"
    rows = Prefill | Forced | Served | Reweighted | Recached
    if isinstance(capture.request, rows) and not ({"topk_ids", *map(str, Estimator)} & {*names} or capture.against):
        return "" if capture.items[item]["failed"] is not None else "has no rows"
    if isinstance(capture.request, Layerwise) and capture.request.tensors == "states":
        return "" if len(shapes.get("states", ())) == 3 else "has no states of layers"
    if "topk_logprobs" in arrays:
        if len(shapes["topk_logprobs"]) != 2:
            return "has top tokens that are no rows"
        return why_no_distribution(np.asarray(arrays["topk_logprobs"]))
    if isinstance(capture.request, Timed):
        seconds = np.asarray(arrays.get("seconds", np.empty(0)), dtype=np.float64)
        if len(seconds) != 1 + capture.request.n:
            return f"has {len(seconds)} times of {1 + capture.request.n}"
        if not (np.isfinite(seconds).all() and seconds[0] >= 0 and (np.diff(seconds) >= 0).all()):
            return "has times that no clock gives"
    return ""
