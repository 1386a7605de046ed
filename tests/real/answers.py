"""What scripts of these tests share that run in an engine's environment: its answers, and the record of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fidelab.captures.container import Array, to_float32
from fidelab.captures.requests import request_from_record
from fidelab.core import finite
from fidelab.core.errors import FidelabError
from fidelab.engines.base import Engine


class Answers:
    """A sink that keeps what it is given, by names for ``numpy.savez``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.arrays: dict[str, Any] = {}
        self.failed: dict[int, str] = {}
        self.tokens = self.decoded = 0

    def add(self, item: int, arrays: Mapping[str, Array]) -> None:
        for key, array in arrays.items():
            exact = isinstance(array, np.ndarray) and array.dtype.kind in "if" and array.dtype.itemsize >= 4
            self.arrays[f"{self.name}.{item}.{key}"] = array if exact else to_float32(array)

    def fail(self, item: int, reason: str) -> None:
        self.failed[item] = reason

    def progress(self, tokens: int, decoded: int = 0) -> None:
        self.tokens += tokens
        self.decoded += decoded


@dataclass
class Said:
    """What one arm said: arrays by ``request.item.name``, the rest as plain data."""

    arrays: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)

    def put(self, engine: Engine, requests: Mapping[str, Any], source: Any, method: str) -> None:
        """Ask each request; ``source.method`` yields the token ids of each step of the engine, which are noted."""
        facts, failed, progress, decoded, errors, steps = (
            self.plain.setdefault(name, {}) for name in ("facts", "failed", "progress", "decoded", "errors", "steps")
        )
        heads = set()
        stepped = getattr(source, method)
        for name, record in requests.items():
            answers = Answers(name)
            setattr(source, method, _noted(stepped, steps.setdefault(name, [])))
            try:
                answer = engine.answer(request_from_record(record), answers)
            except FidelabError as error:
                errors[name] = str(error)
                continue
            facts[name], failed[name], progress[name] = answer.facts, answers.failed, answers.tokens
            decoded[name] = answers.decoded
            self.arrays |= answers.arrays
            if answer.head is not None:
                heads.add(id(answer.head))
                self.arrays |= {f"head.{key}": to_float32(array) for key, array in answer.head.items()}
        self.plain["heads"] = len(heads)


@contextmanager
def answering() -> Iterator[tuple[dict[str, Any], Said]]:
    """The job that the command line names, and what is to be written beside it: also when an error ends it."""
    job, folder, said = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), Said()
    try:
        yield job, said
    except FidelabError as error:
        said.plain["error"] = str(error)
    np.savez(folder / "arrays.npz", **said.arrays)
    (folder / "said.json").write_text(json.dumps(finite(said.plain)))


def _noted(stepped: Callable[..., Iterator[list[int]]], groups: list[Any]) -> Callable[..., Iterator[list[int]]]:
    """The same steps; the tokens of each go into a new list of ``groups``."""

    def noted(*asked: Any) -> Iterator[list[int]]:
        groups.append([])
        for ids in stepped(*asked):
            groups[-1].append(ids)
            yield ids

    return noted
