"""The bench contract: a bench puts timed questions and makes a record of the answers.

Each question is asked of every arm in turn, again and again with fresh prompts, so that drift of the machine hits all
alike; what an arm answered before it was steady is thrown away.  A bench never sees an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from fidelab.captures.requests import Timed, Tokens
from fidelab.core import Status
from fidelab.results.axis_record import Outcome
from fidelab.results.bench_values import Flag

__all__ = ["Answers", "Bench", "BenchInputs", "BenchSettings", "Counts", "Facts", "Question", "limit_of", "unsteady"]

Floats = NDArray[np.float64]


def _several(value: Any) -> Any:
    """``512`` and ``"128,512"`` as lists."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return [value] if isinstance(value, int) else value


Counts = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_several), Field(min_length=1)]
Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_several), Field(min_length=1)]


class BenchSettings(BaseModel):
    """What every bench can be told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    repeats: int = Field(default=5, ge=1, description="measured answers to each question")
    seed: int = Field(default=1, ge=0, description="seed of the prompts")


class LiveSettings(BenchSettings):
    """Of benches that ask loaded models."""

    batch: Sizes = Field(default=(1,), description="sequences answered together")
    max_warmup: int = Field(default=8, ge=1, description="unmeasured answers at most, until three agree within 5%")
    interleave: Literal["auto", "live", "loads"] = Field(
        default="auto", description="arms in turn (live), or repeats spread over loads; auto: live where memory allows"
    )


@dataclass(frozen=True)
class BenchInputs:
    """What questions are made from; ``prompts(length, count, seed)`` gives distinct prompts of exact length."""

    prompts: Callable[[int, int, int], tuple[Tokens, ...]]
    max_positions: int | None


@dataclass(frozen=True)
class Question:
    """One shape of work: ``batch`` prompts of ``tokens`` tokens, ``n`` decoded behind the first.

    ``repeats`` and ``max_warmup`` answers are wanted, each to prompts of its own; ``impossible``: why none is.
    """

    bench: str
    part: str
    tokens: int
    batch: int
    n: int
    repeats: int
    max_warmup: int
    prompts: tuple[Tokens, ...] = field(repr=False, default=())
    impossible: str = ""

    @classmethod
    def make(cls, inputs: BenchInputs, settings: LiveSettings, bench: str, **shape: Any) -> Question:
        """With prompts for all answers; or impossible, where the model's positions do not suffice."""
        shape = {"repeats": settings.repeats, "max_warmup": settings.max_warmup, **shape}
        tokens, n = max(1, shape["tokens"]), shape["n"]  # at depth 0 a prompt has one token all the same
        impossible = limit_of(inputs, tokens + n)
        wanted = shape["batch"] * (shape["repeats"] + shape["max_warmup"])
        prompts = () if impossible else inputs.prompts(tokens, wanted, settings.seed)
        return cls(bench, prompts=prompts, impossible=impossible, **shape)

    @property
    def name(self) -> str:
        """What its captures are called."""
        return f"{self.bench}.{self.part}"

    def probe(self, number: int) -> Timed:
        """The answer of this number; negative numbers are warm-ups."""
        at = (number if number >= 0 else self.repeats - 1 - number) * self.batch
        settings = tuple(sorted({"tokens": self.tokens, "number": number}.items()))
        mine = self.prompts[at : at + self.batch]
        return Timed(self.name, mine, n=self.n, warmup=0, batch=self.batch, settings=settings)


def limit_of(inputs: BenchInputs, tokens: int) -> str:
    """Why so many tokens cannot be; empty where they can."""
    limit = inputs.max_positions
    return f"{tokens} tokens are beyond the model's {limit} positions" if limit is not None and tokens > limit else ""


@dataclass(frozen=True)
class Answers:
    """What one arm answered to one question: ``seconds`` [repeats, 1 + n], and why there are none.

    ``warmups``: unmeasured answers before, of the load with most; ``ran``: what the engine said of itself then.
    """

    question: Question
    seconds: Floats | None
    warmups: int = 0
    ran: Mapping[str, Any] = field(default_factory=dict)
    status: Status = Status.OK
    reason: str | None = None

    def outcome(self) -> dict[str, Any]:
        """Fields of an :class:`Outcome`."""
        return {"status": self.status, "reason": self.reason}


@dataclass(frozen=True)
class Facts:
    """What is known of an arm besides its answers.

    ``weights_bytes``: of the checkpoint.  ``loads``: processes over which the repeats are spread; 1: all arms were
    asked in turn.  ``starts``: of each fresh process its kind (cold, warm) and seconds by part.
    """

    ran: Mapping[str, Any] = field(default_factory=dict)
    weights_bytes: int = 0
    loads: int = 1
    starts: Sequence[tuple[str, Mapping[str, float]]] = ()


class Bench(ABC):
    """One bench with its settings."""

    name: ClassVar[str]
    title: ClassVar[str]
    Settings: ClassVar[type[BenchSettings]]
    fresh: ClassVar[bool] = False
    """Every repeat in a process of its own."""
    loads: ClassVar[bool] = False
    """It puts load on a server instead of asking questions."""
    served: ClassVar[str] = ""
    """Why it says nothing about a server that somebody else started; empty where it does."""

    protocol: ClassVar[tuple[str, ...]] = ()
    """Settings that must agree before two figures of a cell are compared; lists of cells need not."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @abstractmethod
    def questions(self, inputs: BenchInputs) -> tuple[Question, ...]:
        """What is asked, in order."""

    @abstractmethod
    def record(self, answers: Mapping[str, Answers], facts: Facts) -> Outcome:
        """The answers of one arm by part → its record."""


def unsteady(what: str, steady: bool | None, loads: int) -> tuple[Flag, ...]:
    """What must be known to read repeats."""
    found = []
    if steady is False:
        found.append(Flag(kind="unsteady", text=f"{what}: the last three repeats differ by 5% or more"))
    if loads > 1:
        found.append(Flag(kind="loads", text=f"{what}: repeats are spread over {loads} loads of the model"))
    return tuple(found)
