"""The axis contract, and the intervals and paired excess that all axes share.

An axis is made from its settings, builds requests, and scores pairs of captures into an :class:`AxisScore`: metrics and
plots for the report, and per-item sufficient statistics from which all intervals are computed.

Most axes have one request: they implement ``request`` and ``score``.  An axis with several *parts* (contexts, styles)
implements ``requests`` and ``score_parts``; an axis with requests that depend on the reference's answers also
implements ``follow_up``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict

from fidelab.axes import AXES
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate, Request, Timed, Tokens
from fidelab.config.load import validate_as
from fidelab.core import Status
from fidelab.core.errors import CaptureError, InputError
from fidelab.inputs.reasoning import after_reasoning
from fidelab.metrics.intervals import (
    PairedDifference,
    RatioItems,
    Transform,
    paired_difference,
    ratio_estimate,
    ratio_interval,
)
from fidelab.results.measurement import Cell, Definition, Measurement, Metric
from fidelab.results.plots import TextPair, Texts

if TYPE_CHECKING:
    from fidelab.inputs.conversations import Traffic
    from fidelab.inputs.prompts import Prompt
    from fidelab.inputs.texts import Text
    from fidelab.inputs.tokens import Template, Tokenizer

T = TypeVar("T")
R = TypeVar("R", bound=Request)
Floats = NDArray[np.float64]

_HARM_POINTS = -5.0  # points
_REASONING_TAIL_TOKENS = 16  # tokens at the end of a prompt that may open a block of reasoning


class AxisSettings(BaseModel):
    """Base of every axis' settings: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class AxisInputs:
    """Inputs of requests.  ``max_positions`` is the model's limit in tokens, ``None`` if unknown.

    ``traffic``: the log of text and prompts, if they come from one.  ``private``: their words must not be written
    down, except as token ids.
    """

    tokenizer: Tokenizer
    text: Text
    prompts: tuple[Prompt, ...]
    max_positions: int | None
    traffic: Traffic | None = None
    private: bool = False


SCORE = Definition("score", "points", "higher", "0-100, higher is closer to the reference.")
OVER_CONTROL = Definition(
    "over_control",
    about="This configuration minus the control, paired over the items that both answered.",
    null_value=None,
)
_NO_INTERVAL = "no interval"


@dataclass(frozen=True, eq=False)
class AxisScore:
    """One arm on one axis.

    ``num``, ``den``, ``units`` [n] hold every item, failed ones included; ``units`` are the ids of the resampling
    clusters; ``usable`` [n] marks the items that did not fail.  The ratio Σnum/Σden is the axis' mean; ``transform``
    maps it to the score, 0…100 (``None``: the axis has no score); ``scale`` converts the paired difference to the unit
    of :attr:`Axis.excess`.  ``bound``: items are lower bounds, which have no upper end and no difference.

    ``found``: the measurement for the report.  A metric is computed once, when the axis scores; the verdict and the
    composite read it from there.  Its ``n_items`` and ``n_failed`` are set where they differ from the numbers of items
    and of unusable items.  ``positions``: columns of ``positions.parquet`` (axis kld).

    ``parts``: the scores of all parts, where the metrics and items are those of the part named ``part``.

    ``right``: 1 where the reference and where the arm gives the right answer, else 0, NaN where that is not known; [n]
    each.  Axes that have it get a non-inferiority test.

    ``nll_difference``: items are NLLs of the arm minus the reference's, nats.  They get a non-inferiority test, too.

    ``probability_loss`` [n]: P − Q of the text's own next token (axis kld); NaN where that is not known.

    ``not_measurable``: why this model cannot be measured on the axis with any arm.

    ``looks``: windows after each look (axis kld); items are in the order of their looks, as many of each window.
    """

    num: Floats
    den: Floats
    clusters: NDArray[Any]
    usable: NDArray[np.bool_]
    transform: Transform | None = None
    bounds: tuple[float, float] = (0.0, math.inf)
    identical: bool = False
    proportion: bool = False
    scale: float = 1.0
    bound: bool = False
    found: Measurement = field(default_factory=lambda: Measurement(status=Status.OK))
    positions: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    right: tuple[Floats, Floats] | None = None
    nll_difference: bool = False
    probability_loss: Floats | None = None
    not_measurable: str = ""
    looks: tuple[int, ...] = ()
    part: str = ""
    parts: Mapping[str, AxisScore] = field(default_factory=dict)

    @classmethod
    def percent(
        cls, num: ArrayLike, clusters: ArrayLike, usable: ArrayLike, *, den: ArrayLike | None = None, **more: Any
    ) -> Self:
        """Items that are shares 0…1 of one, or of ``den``; the score is their mean in percent."""
        items = np.asarray(num, dtype=np.float64)
        return cls(
            num=items,
            den=np.ones(len(items)) if den is None else np.asarray(den, dtype=np.float64),
            clusters=np.asarray(clusters, dtype=np.int64),
            usable=np.asarray(usable, dtype=bool),
            transform=lambda share: 100.0 * share,
            bounds=(0.0, 1.0),
            proportion=True,
            scale=100.0,
            **more,
        )

    def minus_reference(self, seed: int) -> PairedDifference:
        """Accuracy (:attr:`right`) of the arm minus the reference's, points, over the usable items; NaN without any."""
        if self.right is None or not self.usable.any():
            return PairedDifference(math.nan, None, 0)
        theirs = RatioItems.of(self.right[0][self.usable], 1.0, self.clusters[self.usable])
        return paired_difference(self.items(), theirs, seed, scale=100.0, bounds=(0.0, 1.0), proportion=True)

    def at(self, part: str) -> AxisScore | None:
        """Return the score of one part if the axis scores them separately, else this score."""
        return self.parts.get(part) if self.parts else self

    def items(self, among: NDArray[np.bool_] | None = None) -> RatioItems:
        """Return the usable items, or only those that are also ``among`` the given ones."""
        keep = self.usable if among is None else self.usable & among
        return RatioItems(self.num[keep], self.den[keep], self.clusters[keep])

    @property
    def n_clusters(self) -> int:
        """The resampling clusters of the usable items."""
        return len(np.unique(self.clusters[self.usable]))

    def mean(self) -> float | None:
        """Σnum/Σden over the usable items; ``None`` if there are none."""
        return ratio_estimate(self.items())

    def mean_interval(self, seed: int) -> tuple[float, float] | None:
        """95% interval of Σnum/Σden."""
        return ratio_interval(self.items(), seed, bounds=self.bounds, proportion=self.proportion)

    def score(self, seed: int, *, headline: bool = True) -> Metric:
        """Return the metric ``score`` with its 95% interval, computed from the usable items.

        Its value is null without usable items.

        Raises:
            ValueError: If the axis has no ``transform``, and therefore no score.
        """
        if self.transform is None:
            raise ValueError("a score needs a transform of the mean")
        interval = ratio_interval(
            self.items(), seed, transform=self.transform, bounds=self.bounds, proportion=self.proportion
        )
        return SCORE(ratio_estimate(self.items(), self.transform), interval, headline=headline)

    def excess_over(self, control: AxisScore, seed: int) -> PairedDifference | None:
        """Return the paired difference between this arm and the control over the items usable on both sides.

        The difference is of this arm's ``part``.  It is ``None`` if no item is usable on both sides, or if this score
        is a lower bound.
        """
        other = control.at(self.part)
        if self.bound or other is None:
            return None
        n = min(len(self.num), len(other.num))  # an arm may have more items: only those of both count
        own, theirs = (side.positions.get("window", np.arange(len(side.num)))[:n] for side in (self, other))
        if n < max(len(self.num), len(other.num)) and not (self.positions and np.array_equal(own, theirs)):
            return None
        both = self.usable[:n] & other.usable[:n]
        a, b = (RatioItems(side.num[:n][both], side.den[:n][both], side.clusters[:n][both]) for side in (self, other))
        if not len(a.num) or a.den.sum() == 0 or b.den.sum() == 0:
            return None
        return paired_difference(a, b, seed, scale=self.scale, bounds=self.bounds, proportion=self.proportion)

    def with_measurement(self, **fields: Any) -> Self:
        """Return the score with these fields replaced in :attr:`found`."""
        return replace(self, found=Measurement.model_validate({**dict(self.found), **fields}))

    def measurement(self, title: str = "", *more: Metric) -> Measurement:
        """Return the measurement for the report, with its outcome, the counts of items, and ``more`` metrics."""
        found = self.found
        status, reason = Status.IDENTICAL if self.identical else Status.OK, None
        if self.not_measurable:
            status, reason = Status.NOT_MEASURABLE, self.not_measurable
        elif not self.usable.any():
            status, reason = Status.FAILED, "; ".join(found.fails) or "no item was usable"
        counts: dict[str, Any] = {"cluster": ""}
        if len(self.num):
            counts = {
                "n_items": len(self.num) if found.n_items is None else found.n_items,
                "n_failed": int((~self.usable).sum()) if found.n_failed is None else found.n_failed,
                "n_clusters": self.n_clusters,
            }
        metrics = tuple(map(_estimated, (*found.metrics, *more)))
        fields = {"status": status, "reason": reason, "title": title, "metrics": metrics, **counts}
        return Measurement.model_validate({**dict(found), **fields})


def _estimated(metric: Metric) -> Metric:
    """Add a caveat to a metric estimated over items without an interval: such a value proves no change."""
    sure = metric.ci is not None or metric.exact or metric.caveat or metric.repeats
    return metric if sure else metric.model_copy(update={"caveat": _NO_INTERVAL})


class Axis:
    """One axis with its settings."""

    name: ClassVar[str]
    title: ClassVar[str] = ""
    """The question that it answers, in a few words: a heading."""
    Settings: ClassVar[type[AxisSettings]]
    excess: ClassVar[Definition] = OVER_CONTROL
    """The paired difference to the control: its unit, and which side of it is better."""
    covers: ClassVar[str] = ""
    """What a user wants to know that this axis can answer for or against a candidate: ``retrieval``.

    Reports list it as not tested until an axis with these words ran.  Empty: it answers no such question by itself.
    """
    in_composite: ClassVar[bool] = False
    """The composite includes its score."""
    distributions: ClassVar[bool] = False
    """Whether it compares distributions over the vocabulary.  Bit-identical ones prove identical caches."""
    reads_prompts: ClassVar[bool] = False
    """All of its requests read prompts and generate nothing."""
    follows: ClassVar[bool] = False
    """Some of its requests depend on the reference's answers."""
    quick: ClassVar[Mapping[str, Any]] = {}
    """Settings for a first look: fewer items."""
    until_decided: ClassVar[Mapping[str, Any]] = {}
    """Settings of a run that ends when its candidates are decided; empty if its requests are fixed."""
    reference_only: ClassVar[tuple[str, ...]] = ()
    """Parts that only the reference answers, as input of :meth:`follow_up`.  They are not compared."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def request(self, inputs: AxisInputs) -> Request:
        """Return the request sent to every arm, if the axis has only one.

        Raises:
            InputError: If text or prompts do not suffice.  The message names the needed amount.
        """
        raise NotImplementedError(f"test {self.name} must implement request() or requests()")

    def score(self, pair: Pair, seed: int) -> AxisScore:
        """Compare two captures of the request."""
        raise NotImplementedError(f"test {self.name} has neither score nor score_parts of its own")

    def requests(self, inputs: AxisInputs) -> Mapping[str, Request]:
        """Return the requests sent to every arm, by part.

        An axis with a single request names its part ``""``.  The ``axis`` of a request is :func:`part_name` of its
        part.
        """
        return {"": self.request(inputs)}

    def remarks(self, inputs: AxisInputs, requests: Mapping[str, Request]) -> Iterable[str]:
        """Return lines that a user should read before a run: what of the requests is missing or cannot decide."""
        return ()

    @property
    def n_looks(self) -> int:
        """The maximum number of looks at whether more requests are needed."""
        return 1

    def look(self, part: str) -> int:
        """Return the look that a part belongs to, counted from 0.

        Only candidates that are still undecided are asked the parts of later looks.
        """
        return 0

    def available(self, inputs: AxisInputs) -> int | None:
        """Return the number of items that the setting ``limit`` selects from, by default the number of prompts.

        ``None`` means that the number is not known.
        """
        return len(inputs.prompts)

    def follow_up(self, inputs: AxisInputs, reference: Mapping[str, Capture]) -> Mapping[str, Request]:
        """Return further requests, made from the reference's answers to :meth:`requests`."""
        return {}

    def foreseen(self, inputs: AxisInputs) -> Mapping[str, Request]:
        """Return the largest requests that :meth:`follow_up` may return, to estimate the time."""
        return {}

    def repeated(self, request: Request, share: float) -> Request | None:
        """Return the part of a request that the reference answers again to measure run-to-run noise.

        By default this is an evenly spread ``share`` (0…1) of the items.  ``None`` means no repeat.
        """
        return None if isinstance(request, Timed) else request.select(spread(len(request.items()), share))

    def compared(self, pair: Pair) -> Iterable[tuple[int, int, NDArray[np.int64]]]:
        """Items of a pair whose rows are compared: reference item, test item, actual next tokens ``[rows]``.

        Rows of hidden states may then be compared together with those of other arms, before the axis scores them
        (:attr:`~fidelab.captures.pair.Pair.figures`).
        """
        return ()

    def figures(self, pair: Pair) -> Iterable[tuple[int, Mapping[str, NDArray[Any]]]] | None:
        """Figures that scoring reads of a pair's rows: test items with columns ``[rows]``; ``None`` if it needs rows.

        Once all pairs are compared, they replace the test side's rows; for a reference, those that compare it
        with itself
        (:meth:`~fidelab.captures.reader.Capture.figures`).  ``pair`` may hold only some of the items: rows are compared
        while an arm answers.
        """
        return None

    def score_parts(self, pairs: Mapping[str, Pair], seed: int) -> AxisScore:
        """Compare two arms' captures of all parts."""
        return self.score(pairs[""], seed)

    def failed_part_cell(self, part: str, reason: str) -> Cell | None:
        """Return the remark on a failed part if the others are scored without it, else ``None``."""
        return None


def lost_and_gained(items: Sequence[tuple[float, float]]) -> str:
    """Return a text such as ``lost 9 of 36, gained 2``.

    An item is lost if the arm has a lower share of it, out of the items that the reference got.  ``items``: shares 0 …
    1 of each item for the reference and the arm.
    """
    lost, gained = sum(test < ref for ref, test in items), sum(test > ref for ref, test in items)
    had = sum(ref > 0 for ref, _ in items)
    return f"lost {lost:,} of {had:,}{f', gained {gained:,}' if gained else ''}" if items else ""


def accuracy_falls(what: str, difference: PairedDifference) -> tuple[str, ...]:
    """Return the sentence that lowers the verdict if accuracy falls by 5 points or more; see
    docs/metrics/verdicts.md#verdicts.
    """
    if difference.interval is None or difference.interval[1] >= _HARM_POINTS:
        return ()
    most, least = (-end for end in difference.interval)
    return (f"{what} falls by {-difference.estimate:.1f} points (95%: {least:.1f} to {most:.1f})",)


def part_name(axis: str, part: str) -> str:
    """Return the name of the captures of a part: ``perplexity.2048``, or the name of the axis for the part ``""``."""
    return f"{axis}.{part}" if part else axis


def parts_of(axis: str, named: Mapping[str, T]) -> dict[str, T]:
    """Return the captures or failures of one axis, by part."""
    return {name[len(axis) + 1 :]: value for name, value in named.items() if name.split(".", 1)[0] == axis}


def prompt_ids(
    inputs: AxisInputs, limit: int | None, template: Template, n_predict: int, setting: str
) -> tuple[Tokens, ...]:
    """Return the token ids of the first ``limit`` prompts, each with room for ``n_predict`` generated tokens.

    Raises:
        InputError: If a prompt has no tokens, or is too long for the model.  The message names ``setting`` as the fix.
    """
    prompts = inputs.prompts[:limit]
    ids = tuple(inputs.tokenizer.chat(prompt.messages, template, prompt.tools) for prompt in prompts)
    for prompt, tokens in zip(prompts, ids, strict=True):
        if not tokens:
            raise InputError(f"prompt {prompt.id!r} has no tokens")
        if inputs.max_positions is not None and len(tokens) + n_predict > inputs.max_positions:
            raise InputError(
                f"prompt {prompt.id!r} has {len(tokens)} tokens; with {setting} that is beyond the model's limit of "
                f"{inputs.max_positions} positions"
            )
    return ids


def greedy_request(
    inputs: AxisInputs,
    axis: str,
    prompts: tuple[Tokens, ...],
    asked: Any,
    settings: tuple[tuple[str, Any], ...],
    *,
    rows: bool = False,
    notes: tuple[str, ...] = (),
) -> Generate:
    """Return the request for greedy answers to prompts; ``asked``: the axis' settings, ``n_predict`` and ``batch``."""
    stop = inputs.tokenizer.stop_ids
    return Generate(axis, prompts, asked.n_predict, stop, asked.batch, settings=settings, rows=rows, notes=notes)


def texts(title: str, pairs: Iterable[TextPair]) -> tuple[Texts, ...]:
    """Return the plot of texts side by side, or nothing without pairs.

    It is also empty if captures lack the vocabulary to decode tokens.
    """
    try:
        listed = tuple(pairs)
    except CaptureError:
        return ()
    return (Texts(title=title, pairs=listed),) if listed else ()


def request_of(capture: Capture, kind: type[R]) -> R:
    """Return the request that a capture answers.

    Raises:
        CaptureError: If it is of another kind.
    """
    if not isinstance(capture.request, kind):
        raise CaptureError(f"capture {capture.folder} answers no {kind.__name__} request; delete it and capture again")
    return capture.request


def notes_of(capture: Capture) -> list[dict[str, Any]]:
    """Return what the notes of a request for text say about each of its prompts."""
    return [json.loads(note) for note in request_of(capture, Generate).notes]


def answered(pair: Pair) -> NDArray[np.bool_]:
    """Return whether both sides answered, for each item of a pair."""
    failures = ((pair.ref.items[r]["failed"], pair.test.items[t]["failed"]) for r, t in pair.items)
    return np.array([failed == (None, None) for failed in failures], dtype=bool)


def written_text(capture: Capture, item: int) -> str:
    """Return the generated text without the stop token."""
    ids, request = capture.ids(item), capture.request
    ended = isinstance(request, Generate) and ids and ids[-1] in request.stop
    return capture.text(ids[:-1] if ended else ids)


def answer_text(capture: Capture, item: int) -> str:
    """Return the generated text without the stop token and without reasoning."""
    request = capture.request
    prompt = capture.text(request.prompts[item][-_REASONING_TAIL_TOKENS:]) if isinstance(request, Generate) else ""
    return after_reasoning(written_text(capture, item), prompt)


def select_groups(request: Request, groups: Sequence[Hashable], share: float) -> Request:
    """Return the request cut down to a ``share`` (0…1) of its groups, evenly spread, with all their items.

    ``groups`` [n]: the group of each item.
    """
    names = list(dict.fromkeys(groups))
    kept = {names[index] for index in spread(len(names), share)}
    return request.select([index for index, group in enumerate(groups) if group in kept])


def spread(n: int, share: float) -> list[int]:
    """Return ``ceil(share · n)`` indices, evenly spread over 0 … n-1."""
    count = max(1, math.ceil(share * n))
    return sorted({round(i * (n - 1) / max(1, count - 1)) for i in range(count)}) if count > 1 else [0]


def load_axis(name: str, values: Mapping[str, object]) -> Axis:
    """Load an axis with its settings.

    Raises:
        UnknownNameError: If there is no such axis.
        ConfigError: If it has no such setting, or the value is invalid.
    """
    cls: type[Axis] = AXES.load(name)
    return cls(validate_as(cls.Settings, values, "settings", f"axes.{name}"))
