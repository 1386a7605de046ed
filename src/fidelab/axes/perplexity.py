"""Perplexity through the cache under test, at several contexts. See docs/metrics/distributions.md#perplexity.

``chunked``: windows do not overlap and the last half of each is scored, as llama.cpp's perplexity tool does, whose
windows lie one after another from the text's start (``place: start``). ``strided``: windows begin every ``stride``
tokens and the last ``stride`` tokens of each are scored, so every token counts once and has at least n_ctx − stride
tokens before it.  The first n_ctx − stride tokens of the text serve only as context.  Both read the keys and values of
their context from the cache, so the figure depends on its format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from fidelab.axes.base import OVER_CONTROL, Axis, AxisInputs, AxisScore, AxisSettings, part_name, request_of
from fidelab.axes.rows import CHUNK, compare_item, estimator_of, item_rows, logits, not_measurable
from fidelab.captures.pair import Pair
from fidelab.captures.requests import Prefill, Request
from fidelab.core import Estimator
from fidelab.core.errors import CaptureError, InputError
from fidelab.metrics.divergence import kl_by_position
from fidelab.metrics.perplexity import PerplexityPair, compare_nll, exponential, row_nll
from fidelab.results.measurement import Coordinates, Definition, Metric
from fidelab.results.numbers import format_amount, format_score
from fidelab.results.plots import Curve

_DEFAULT_CONTEXTS = (512, 2048)
_UNREPORTED = "the server does not report the actual token at {} of {} positions; those where it does are likely ones"
_DEFAULT_ROWS = 8192  # rows per context by default, as KLD's 32 windows of 512 have

_RATIO = Definition(
    "ln_ratio", "nats", "lower", "ln(PPL of the configuration / PPL of the reference) on the same tokens."
)
_STDERR = Definition("stderr", "nats", None, "Standard error of the ln ratio.", name="std. error")
_CHANGE = Definition(  # ln_ratio already compares
    "ppl_change",
    "share",
    "lower",
    "PPL of the configuration / PPL of the reference - 1.",
    name="PPL change",
    null_value=None,
)
_PPL = Definition("ppl", about="Perplexity of the configuration.", name="PPL")
_REFERENCE_PPL = Definition("reference_ppl", about="Perplexity of the reference.", name="reference PPL")

Floats = NDArray[np.float64]


class PerplexitySettings(AxisSettings):
    """Contexts and the scored rows; part of the comparability key."""

    contexts: tuple[Annotated[int, Field(ge=8)], ...] | None = Field(
        default=None, min_length=1, description="tokens per window, several in one run; 512 and 2048 where they fit"
    )
    mode: Literal["chunked", "strided"] = Field(
        default="chunked", description="last half of windows that do not overlap, or each token once"
    )
    stride: int | None = Field(default=None, ge=1, description="strided: tokens between windows; a quarter by default")
    windows: int | None = Field(default=None, ge=1, description="windows per context; about 8,192 rows by default")

    place: Literal["spread", "start"] | None = Field(
        default=None, description="chunked: windows spread over the documents (default), or from the text's start"
    )

    @model_validator(mode="after")
    def _check_stride(self) -> Self:
        if self.place == "spread" and self.mode == "strided":
            raise ValueError("strided windows start at the text's beginning: omit place")
        if self.stride is not None and self.mode == "chunked":
            raise ValueError("stride is for mode strided")
        if self.stride is not None and self.stride >= min(self.contexts or _DEFAULT_CONTEXTS):
            raise ValueError(f"stride {self.stride} must be shorter than every context")
        return self


class Perplexity(Axis):
    """ln(PPL of the candidate / PPL of the reference) on the same tokens, nats; a part per context.

    See docs/metrics/distributions.md#perplexity.
    """

    name: ClassVar[str] = "perplexity"
    title: ClassVar[str] = "Perplexity: what does text cost through this cache?"
    Settings: ClassVar[type[AxisSettings]] = PerplexitySettings
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="nats", better="lower")
    reads_prompts: ClassVar[bool] = True
    quick: ClassVar[Mapping[str, Any]] = {"contexts": (512,), "windows": 8}
    settings: PerplexitySettings

    def requests(self, inputs: AxisInputs) -> Mapping[str, Request]:
        have = len(inputs.tokenizer.encode(inputs.text.content))
        return {str(n_ctx): self._cut(inputs, n_ctx, have) for n_ctx in self._contexts(inputs, have)}

    def score_parts(self, pairs: Mapping[str, Pair], seed: int) -> AxisScore:
        if (nothing := not_measurable(pairs.values())) is not None:
            return nothing
        parts = {int(part): _Rows.of(pairs[part]) for part in sorted(pairs, key=int, reverse=True)}
        comparisons = {n_ctx: compare_nll(rows.ref, rows.test, rows.clusters, seed) for n_ctx, rows in parts.items()}
        longest = next(iter(parts.values()))
        settings = next(iter(pairs.values())).ref.manifest["settings"]
        lost = sum(rows.unreported for rows in parts.values())
        total = sum(len(rows.ref) for rows in parts.values())
        at_longest = comparisons[max(comparisons)]
        return AxisScore(
            num=longest.test - longest.ref,
            den=np.ones(len(longest.ref)),
            clusters=longest.clusters,
            usable=np.isfinite(longest.test - longest.ref) & (lost == 0),
            bounds=(-math.inf, math.inf),
            identical=all(rows.identical for rows in parts.values()),
            not_measurable=_UNREPORTED.format(lost, total) if lost else "",
            nll_difference=True,
        ).with_measurement(
            cluster="text unit",
            summary=_summary(at_longest.ppl_test, at_longest.log_ratio),
            reference_summary=_summary(at_longest.ppl_ref),
            metrics=tuple(metric for n_ctx, pair in comparisons.items() for metric in _metrics(n_ctx, pair)),
            plots=tuple(_curve(n_ctx, rows) for n_ctx, rows in sorted(parts.items())),
            facts={
                "mode": settings["mode"],
                "contexts": [
                    {"n_ctx": n_ctx, "n_positions": pair.n_rows, "n_failed": pair.n_failed}
                    for n_ctx, pair in sorted(comparisons.items())
                ],
            },
            n_items=sum(pair.n_rows for pair in comparisons.values()),
            n_failed=sum(pair.n_failed for pair in comparisons.values()),
        )

    def figures(self, pair: Pair) -> Iterable[tuple[int, Mapping[str, NDArray[Any]]]] | None:
        request = pair.ref.request
        if not isinstance(request, Prefill):
            return None
        sides = ((t, _item_nll(pair, request, r, t)) for r, t in pair.items)
        return ((t, {"nll_ref": ref, "nll_test": test}) for t, (ref, test, _) in sides)

    def _contexts(self, inputs: AxisInputs, have: int) -> list[int]:
        """Return the requested contexts, or the default ones that fit the model and the text, in ascending order."""
        limit = inputs.max_positions
        if self.settings.contexts is not None:
            asked = sorted(set(self.settings.contexts))
            if limit is not None and asked[-1] > limit:
                raise InputError(
                    f"perplexity: context {asked[-1]} is beyond the model's limit of {limit} positions; "
                    "shorten axes.perplexity.contexts"
                )
            return asked
        fitting = [n_ctx for n_ctx in _DEFAULT_CONTEXTS if n_ctx <= have and (limit is None or n_ctx <= limit)]
        if not fitting:
            room = f"text {inputs.text.name} has {have} tokens" if limit is None or limit > have else f"limit {limit}"
            raise InputError(f"perplexity: no room for a context of 512 ({room}); set axes.perplexity.contexts")
        return fitting

    def _cut(self, inputs: AxisInputs, n_ctx: int, have: int) -> Prefill:
        from fidelab.inputs.corpus import make_windows

        s = self.settings
        strided = s.mode == "strided"
        step = (s.stride or n_ctx // 4) if strided else n_ctx
        room = (have - n_ctx) // step + 1
        wanted = s.windows or min(max(1, _DEFAULT_ROWS // (step if strided else n_ctx // 2)), max(1, room))
        if wanted > room:
            raise InputError(
                f"perplexity: context {n_ctx} needs {(wanted - 1) * step + n_ctx} tokens (windows: {wanted}), but text "
                f"{inputs.text.name} has {have}: fewer axes.perplexity.windows, shorter contexts or a longer text"
            )
        protocol: Literal["sliding", "half"] = "sliding" if strided else "half"
        cut = make_windows(inputs.tokenizer, inputs.text, n_ctx, wanted, protocol, step, s.place)
        first, last = (n_ctx - 1 - step, n_ctx - 2) if strided else (cut.first, cut.last)
        return Prefill(
            axis=part_name(self.name, str(n_ctx)),
            windows=cut.windows,
            first=first,
            last=last,
            units=tuple(units[first - cut.first : last - cut.first + 1] for units in cut.units),
            settings=(
                ("bos", inputs.tokenizer.bos_id),
                ("mode", s.mode),
                ("n_ctx", n_ctx),
                ("place", cut.place),
                ("stride", step),
            ),
        )


@dataclass(frozen=True, eq=False)
class _Rows:
    """Every scored row of one context: NLL of both sides (nats; NaN where it failed), unit, position in the window.

    ``unreported``: rows of top-k captures in which a side does not report the actual token.
    """

    ref: Floats
    test: Floats
    clusters: NDArray[np.int64]
    positions: NDArray[np.int64]
    unreported: int = 0

    @classmethod
    def of(cls, pair: Pair) -> _Rows:
        request = request_of(pair.ref, Prefill)
        sides = [_item_nll(pair, request, r, t) for r, t in pair.items]
        ref, test = (np.concatenate([side[i] for side in sides]) for i in (0, 1))
        clusters = np.concatenate([np.asarray(request.units[r], dtype=np.int64) for r, _ in pair.items])
        positions = np.tile(np.arange(request.first, request.last + 1), len(pair.items))
        return cls(ref, test, clusters, positions, sum(side[2] for side in sides))

    @property
    def identical(self) -> bool:
        return bool((self.ref == self.test).all())  # NaN equals nothing


def _item_nll(pair: Pair, request: Prefill, r: int, t: int) -> tuple[Floats, Floats, int]:
    """Return the NLL of one window's rows on both sides, over the ids that both have.

    Rows are NaN where a side has none.  The last value is the number of rows whose actual token a side does not report.
    """
    n = request.n_rows
    ref, test = np.full(n, np.nan), np.full(n, np.nan)
    if item_rows(pair.ref, r) != n or item_rows(pair.test, t) != n:
        return ref, test, 0
    if columns := pair.test.figures(t, pair.ref):
        if not columns.keys() >= {"nll_ref", "nll_test"}:
            raise CaptureError(f"capture {pair.test.folder} holds other figures; delete it and capture again")
        return columns["nll_ref"], columns["nll_test"], 0
    targets = np.asarray(request.windows[r][request.first + 1 : request.last + 2], dtype=np.int64)
    if estimator_of(pair) is Estimator.TOPK:
        rows = compare_item(pair, r, t, targets)
        finite = np.isfinite(rows.nll_ref) & np.isfinite(rows.nll_test)
        return rows.nll_ref, rows.nll_test, int((~finite & ~rows.failed).sum())
    for start in range(0, n, CHUNK):
        at = slice(start, min(start + CHUNK, n))
        p, q = logits(pair.ref, r, at.start, at.stop), logits(pair.test, t, at.start, at.stop)
        common = min(p.shape[1], q.shape[1])
        ref[at], test[at] = (row_nll(side[:, :common], targets[at]) for side in (p, q))
    return ref, test, 0


def _metrics(n_ctx: int, pair: PerplexityPair) -> tuple[Metric, ...]:
    cell: Coordinates = {"context": n_ctx}
    factor = exponential(pair.log_ratio)
    ends = None if pair.interval is None else [exponential(end) for end in pair.interval]
    span = None if ends is None or ends[0] is None or ends[1] is None else (ends[0] - 1, ends[1] - 1)
    return (
        _RATIO(pair.log_ratio, pair.interval, cell=cell),
        _STDERR(pair.stderr, cell=cell),
        _CHANGE(None if factor is None else factor - 1, span, cell=cell),
        _PPL(pair.ppl_test, pair.ppl_test_interval, cell=cell),
        _REFERENCE_PPL(pair.ppl_ref, pair.ppl_ref_interval, cell=cell),
    )


def _summary(ppl: float | None, log_ratio: float | None = None) -> str:
    """Return a text such as ``PPL 17.2, +0.4%``; empty if the figure is not finite."""
    if ppl is None:
        return ""
    factor = exponential(log_ratio)
    change = "" if factor is None else f", {format_score(100 * (factor - 1), signed=True)}%"
    return f"PPL {format_amount(ppl)}{change}"


def _curve(n_ctx: int, rows: _Rows) -> Curve:
    bins = kl_by_position(rows.positions, rows.test - rows.ref)  # means of any quantity per span of positions
    return Curve(
        key=f"perplexity.{n_ctx}",
        title=f"Cost in log-likelihood by position, context {n_ctx}",
        x_label="position in the window (tokens)",
        y_label="NLL of the configuration − NLL of the reference (nats)",
        x=tuple((low + high) / 2 for low, high in zip(bins.edges, bins.edges[1:], strict=False)),
        y=bins.means,
    )
