"""Rows of next-token distributions out of captures, in chunks, whatever the estimator."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fidelab.captures.reader import Capture, HeadFile
from fidelab.core import Estimator
from fidelab.errors import CaptureError, NotSupportedError
from fidelab.metrics.divergence import Head, head_logits

__all__ = ["CHUNK", "item_rows", "logits"]

CHUNK = 256  # rows at a time: 50 MB of float32 per side at 49,152 tokens


def item_rows(capture: Capture, item: int) -> int:
    """How many rows one item stores; 0 for a failed one."""
    name = _name(capture)
    return capture.array_shape(item, name)[0] if name in capture.names(item) else 0


def logits(capture: Capture, item: int, start: int, stop: int) -> Tensor:
    """Unnormalised log scores ``[stop - start, V]`` float32 of some rows of one item."""
    rows = torch.from_numpy(capture.floats(item, _name(capture), start, stop))
    if capture.estimator is Estimator.LOGPROBS:
        return rows
    if capture.head is None:
        raise CaptureError(f"capture {capture.folder} holds hidden states without a head; capture again")
    return head_logits(rows, _head(capture.head))


def _name(capture: Capture) -> str:
    if capture.estimator is Estimator.TOPK:
        raise NotSupportedError("top-k captures give only a lower bound, and no axis of this version scores them")
    return str(capture.estimator)


@lru_cache(maxsize=2)  # reference and candidate of another checkpoint; 113 MB each at 49,152 × 576
def _head(file: HeadFile) -> Head:
    weight, bias = file.load()
    return Head(torch.from_numpy(weight), None if bias is None else torch.from_numpy(bias), file.softcap, file.scale)
