"""Timed probes: the clock is the same for every engine that decodes a prompt token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.core import Timed, Tokens
from fidelab.engines.base import Sink
from fidelab.errors import EngineError

__all__ = ["time_prompts"]


def time_prompts(probe: Timed, sink: Sink, decode: Callable[[Tokens], Iterator[object]]) -> dict[str, Any]:
    """Answer a Timed probe: warm-up first, then the prompts one by one; returns the facts.

    ``decode(prompt)`` makes a fresh cache ready, which is not timed, and returns an iterator over 1 + n tokens or more.
    Work on the first begins when it is asked for; each is handed over when it is known to the host, not before.

    Raises:
        EngineError: an answer ended early.
    """
    for prompt in probe.prompts[: probe.warmup]:
        _seconds(decode(prompt), probe.n)
    for item, prompt in enumerate(probe.prompts):
        sink.add(item, {"seconds": _seconds(decode(prompt), probe.n)})
        sink.progress(len(prompt) + probe.n)
    generated = probe.n * len(probe.prompts)
    return {"tokens": sum(map(len, probe.prompts)) + generated, "generated": generated}


def _seconds(tokens: Iterator[object], n: int) -> NDArray[np.float64]:
    """Seconds [1 + n] from now to each of the tokens."""
    began = time.perf_counter()
    seconds = [time.perf_counter() - began for _ in islice(tokens, 1 + n)]
    if len(seconds) <= n:
        raise EngineError(f"a timed answer ended after {len(seconds)} of {1 + n} tokens: something stopped it")
    return np.array(seconds)
