"""Timed requests: the clock is the same for every engine that decodes prompts token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fidelab.captures.requests import Timed, Tokens
from fidelab.core.errors import EngineError
from fidelab.engines.base import Sink

TimingGroup = tuple[Tokens, ...]


def groups(request: Timed) -> tuple[TimingGroup, ...]:
    """Group the prompts that are answered together.

    Raises:
        EngineError: If the prompts of a group differ in length.
    """
    prompt_groups = request.groups()
    for index, group in enumerate(prompt_groups):
        if len(lengths := sorted(set(map(len, group)))) > 1:
            raise EngineError(
                f"timed prompts that are answered together have one length, group {index} has {lengths}: "
                "make them equal, or pass batch=1"
            )
    return prompt_groups


def time_prompts(request: Timed, sink: Sink, decode: Callable[[TimingGroup], Iterator[object]]) -> dict[str, Any]:
    """Answer a Timed request, group by group. Returns the facts.

    ``decode(group)`` prepares a fresh cache, which is not timed, and returns an iterator of 1 + n steps or more.
    Work on the first step begins when it is requested; each step is yielded when that token of all prompts of the
    group is known to the host, not before.

    Raises:
        EngineError: If prompts of a group differ in length, or an answer ended early.
    """
    prompt_groups = groups(request)
    for item, group in enumerate(prompt_groups):
        sink.add(item, {"seconds": _seconds(decode(group), request.n)})
        decoded = request.n * len(group)
        sink.progress(sum(map(len, group)) + decoded, decoded=decoded)
    generated = request.n * len(request.prompts)
    return {"tokens": sum(map(len, request.prompts)) + generated, "generated": generated}


def _seconds(steps: Iterator[object], n: int) -> NDArray[np.float64]:
    """Seconds [1 + n] from now to each of the tokens."""
    began = time.perf_counter()
    seconds = [time.perf_counter() - began for _ in islice(steps, 1 + n)]
    if len(seconds) <= n:
        raise EngineError(f"a timed answer ended after {len(seconds)} of {1 + n} tokens: something stopped it")
    return np.array(seconds)
