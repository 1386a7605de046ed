"""KL divergence over the full vocabulary at every scored position, at one or several contexts.

See docs/metrics.md#mean-kl-divergence and docs/metrics.md#windows-and-contexts.

``windows`` is the number of windows of the shortest context.  Longer contexts have fewer windows, so that about as many
positions are scored, but at least six: documents are the resampling clusters, and a long window rarely spans several.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from fidelab.axes.base import (
    OVER_CONTROL,
    SCORE,
    Axis,
    AxisInputs,
    AxisScore,
    AxisSettings,
    part_name,
    request_of,
    spread,
)
from fidelab.axes.groups import STRUCTURE, by_group, domains, structure_labels
from fidelab.axes.rows import compare_item, estimator_of, figures_of, floored_item, kl_score, not_measurable
from fidelab.captures.pair import Pair
from fidelab.captures.requests import Prefill, Request
from fidelab.core import Estimator, canonical_json
from fidelab.metrics.composite import Band, verdict
from fidelab.metrics.concentration import breaking_cost, largest_cluster_share, largest_items_share, unseen_rate
from fidelab.metrics.divergence import (
    RowComparison,
    kl_by_confidence,
    kl_by_position,
    summarise_divergences,
    summarise_flips,
    summarise_kl,
)
from fidelab.metrics.equivalence import KL_MARGIN, MAX_LOOKS
from fidelab.metrics.intervals import RatioItems, ratio_estimate, ratio_interval, standard_error
from fidelab.metrics.perplexity import unigram_nll
from fidelab.results.measurement import DOMAIN, Definition, Metric
from fidelab.results.numbers import format_percent
from fidelab.results.plots import Curve

_DEFAULT_CONTEXTS = (512, 2048)
_MIN_CONTEXT = 8  # tokens
_MIN_WINDOWS = 6  # windows of a longer context: fewer resampling clusters give wide intervals and weak verdicts
_LEAST_ACCURACY = 0.05  # of greedy predictions: token frequencies alone reach about 5% on English text
_MIN_JUDGED_ROWS = 60  # 60 misses in a row have a probability below 5% at an accuracy of 5%
_QUANTILES = ("median", "p90", "p95", "p99", "p999", "max")

_METRICS = (
    Definition("mean", "nats", "lower", "Mean KL divergence from the reference per scored position."),
    Definition("stderr", "nats", None, "Standard error of the mean.", name="std. error"),
    Definition("median", "nats", "lower", "Median KL of a position."),
    Definition("p90", "nats", "lower", "90th percentile of the KL of a position."),
    Definition("p95", "nats", "lower", "95th percentile of the KL of a position."),
    Definition("p99", "nats", "lower", "99th percentile of the KL of a position."),
    Definition("p999", "nats", "lower", "99.9th percentile of the KL of a position.", name="p99.9"),
    Definition("max", "nats", "lower", "Largest KL of one position."),
    Definition(
        "top1",
        "share",
        "higher",
        "Share of positions whose most likely token is the reference's.",
        name="same top token",
    ),
    Definition(
        "confident_flips",
        "share",
        "lower",
        "Share of positions whose most likely token changed although the reference prefers its own by 0.1 nats "
        "or more.",
    ),
    Definition(
        "rms_dp", "share", "lower", "Root mean square change of the actual next token's probability.", name="RMS Δp"
    ),
    Definition(
        "largest_document",
        "share",
        None,
        "Share of the KL that the document with most of it carries.",
        name="largest document",
    ),
    Definition(
        "largest_positions",
        "share",
        None,
        "Share of the KL that the largest 1% of positions carry.",
        name="largest 1% of positions",
    ),
    Definition(
        "unseen_documents",
        "share",
        None,
        "Rate of a kind of document of which the text may hold none by chance (5%): 3/n of n documents.",
        name="unseen kinds",
    ),
    Definition(
        "breaking_document",
        "nats",
        None,
        f"Mean KL of one more document of average length with which the mean would reach {KL_MARGIN:g} nats.",
        name="document to the margin",
    ),
    Definition(
        "cut",
        "share",
        None,
        "Mean probability of the ids that one side alone has, which KL leaves out; of vocabularies of different size.",
        name="cut off",
    ),
    Definition(
        "reverse_kl", "nats", "lower", "Mean KL divergence of the reference from the arm, KL(Q‖P).", name="reverse KL"
    ),
    Definition("jsd", "nats", "lower", "Mean Jensen–Shannon divergence; at most log 2.", name="Jensen–Shannon"),
    Definition(
        "tv",
        "share",
        "lower",
        "Mean total variation; the rest is the share of the arm's sampled tokens that the reference would accept.",
        name="total variation",
    ),
    Definition(
        "overlap",
        "share",
        "higher",
        "Mean share of the reference's ten most likely tokens among the arm's.",
        name="top-10 overlap",
    ),
    Definition("k3", "nats", "lower", "Mean of r - 1 - log r over the text's own tokens, r = P/Q, as trainers log it."),
    Definition("chi2", "ratio", "lower", "Mean variance of P/Q over the arm's own tokens.", name="χ²"),
    Definition(
        "rollout",
        "tokens",
        "higher",
        "Length of the arm's responses at which importance weights halve the effective sample size.",
        name="rollout length",
    ),
    Definition(
        "compat",
        "nats",
        None,
        "The mean over top tokens alone, with -30 for those that one side does not list.",
        name="top-k KLD",
    ),
    SCORE,
)
KLD_METRICS = {definition.key: definition for definition in _METRICS}
"""The axis's metrics by key: the field of :class:`KLSummary`, :class:`Flips` or :class:`Divergences` with the value."""

_PLOT_TEXTS = {  # key of the curve: title, label of the x axis, caption
    "position": (
        "KL by position in the window",
        "position in the window, tokens",
        "Rising lines: the cost grows with the context.",
    ),
    "confidence": (
        "KL by the reference's confidence",
        "reference's largest probability",
        "Left: the reference itself is unsure. Loss where the reference is confident matters most.",
    ),
}


class KLDSettings(AxisSettings):
    """Windows and the scored rows; part of the comparability key."""

    windows: int = Field(default=32, ge=1, description="windows of the shortest context")
    n_ctx: int | tuple[int, ...] | None = Field(
        default=None, description="tokens per window, one number or several; 512 and 2048 where model and text allow"
    )
    protocol: Literal["half", "full", "sliding"] = Field(default="half", description="which rows are scored")
    stride: int | None = Field(default=None, ge=1, description="sliding: tokens between windows; n_ctx / 4 by default")
    compat: Literal["refract"] | None = Field(
        default=None, description="also the figure that REFRACT would give from the top tokens of each side"
    )
    k: int = Field(default=20, ge=1, description="compat: tokens per side; 20 and 64 are its backends'")
    place: Literal["spread", "start"] | None = Field(
        default=None, description="half, full: windows spread over the documents (default), or from the text's start"
    )
    looks: tuple[int, ...] = Field(
        default=(),
        max_length=MAX_LOOKS - 1,
        description="windows after which a decided candidate is asked no more; none: every candidate reads all windows",
    )

    @field_validator("n_ctx", mode="before")
    @classmethod
    def _rising(cls, asked: Any) -> Any:
        """Sort contexts and remove repeats, from a single number or a flag's text such as ``512,2048``."""
        values = asked.split(",") if isinstance(asked, str) else asked if isinstance(asked, list | tuple) else [asked]
        if asked is None:
            return None
        try:
            contexts = sorted({int(str(value)) for value in values})
        except ValueError:
            contexts = []
        if not contexts or contexts[0] < _MIN_CONTEXT:
            raise ValueError(f"write tokens per window, at least {_MIN_CONTEXT}, or several: 512,2048")
        return contexts[0] if len(contexts) == 1 else tuple(contexts)

    @field_validator("looks")
    @classmethod
    def _looks_rise(cls, looks: tuple[int, ...]) -> tuple[int, ...]:
        if any(a >= b for a, b in pairwise((0, *looks))):
            raise ValueError(f"write rising numbers of windows, not {list(looks)}")
        return looks

    @property
    def early(self) -> tuple[int, ...]:
        """Windows after each look but the last one."""
        return tuple(look for look in self.looks if look < self.windows)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Windows after which a new capture begins: the looks, or those of a run until decided of the same size."""
        usual = KLD.until_decided
        return self.early or (usual["looks"] if self.windows == usual["windows"] else ())


class KLD(Axis):
    """KL(reference ‖ candidate), nats, after the same context through each arm's own cache; a part per context.

    A single context is the part ``""``.  An arm's metrics and items are those of its worst context: by the band that
    its upper end and its failed positions give, then by the upper end.  For top-k rows KL is a
    lower bound without a score.  See docs/metrics.md#mean-kl-divergence.
    """

    name: ClassVar[str] = "kld"
    title: ClassVar[str] = "KLD: how far do the next-token distributions move?"
    Settings: ClassVar[type[AxisSettings]] = KLDSettings
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="nats", better="lower")
    in_composite: ClassVar[bool] = True
    distributions: ClassVar[bool] = True
    quick: ClassVar[Mapping[str, Any]] = {"windows": 8, "n_ctx": 512}
    until_decided: ClassVar[Mapping[str, Any]] = {"windows": 32, "looks": (8, 16)}
    settings: KLDSettings

    def requests(self, inputs: AxisInputs) -> Mapping[str, Request]:
        # Default contexts that the text or the model does not allow are left out
        s, asked = self.settings, self._contexts()
        sizes = {n_ctx: self._window_count(n_ctx, s.windows) for n_ctx in asked}
        have, limit = len(inputs.tokenizer.encode(inputs.text.content)), inputs.max_positions
        if s.early:  # the whole text may be too short for a decision
            fewest = {n_ctx: min(size, self._window_count(n_ctx, s.early[0])) for n_ctx, size in sizes.items()}
            sizes = {n_ctx: max(fewest[n_ctx], min(size, have // n_ctx)) for n_ctx, size in sizes.items()}
        if s.n_ctx is None:
            sizes = {
                n_ctx: windows
                for n_ctx, windows in sizes.items()
                if n_ctx == asked[0] or (n_ctx * windows <= have and (limit is None or n_ctx <= limit))
            }
        parts = {n_ctx: "" if len(sizes) == 1 else str(n_ctx) for n_ctx in sizes}
        requests: dict[str, Request] = {}
        for n_ctx, part in parts.items():
            whole = self._cut(inputs, part, n_ctx, sizes[n_ctx])
            # a capture's windows, together with those of the earlier ones, are evenly spread
            earlier = [self._window_count(n_ctx, n) for n in self.settings.cuts]
            sets = [list(range(sizes[n_ctx]))]
            for size in reversed(earlier):
                later = sets[0]
                sets.insert(0, [later[i] for i in spread(len(later), (min(size, len(later)) - 0.5) / len(later))])
            for cut, items in enumerate([sorted({*now} - {*before}) for before, now in pairwise(([], *sets))]):
                name = f"{part}+{cut}" if cut else part
                if items:
                    some = whole if len(items) == sizes[n_ctx] else whole.select(items)
                    requests[name] = replace(some, axis=part_name(self.name, name))
        return requests

    @property
    def n_looks(self) -> int:
        return 1 + len(self.settings.early)

    def look(self, part: str) -> int:
        return _cut_of(part) if self.settings.early else 0

    def _contexts(self) -> tuple[int, ...]:
        n_ctx = self.settings.n_ctx
        return (n_ctx,) if isinstance(n_ctx, int) else n_ctx or _DEFAULT_CONTEXTS

    def _window_count(self, n_ctx: int, windows: int) -> int:
        """Return the number of windows of a context, given the number of windows of the shortest one."""
        return min(windows, max(_MIN_WINDOWS, round(windows * self._contexts()[0] / n_ctx)))

    def _cut(self, inputs: AxisInputs, part: str, n_ctx: int, windows: int) -> Prefill:
        from fidelab.inputs.corpus import make_windows

        s, text = self.settings, inputs.text
        cut = make_windows(inputs.tokenizer, text, n_ctx, windows, s.protocol, s.stride, s.place)
        ids, vocab = np.asarray(inputs.tokenizer.encode(text.content)), len(inputs.tokenizer.pieces())
        numbers = sorted({document for units in cut.units for document in units}) if cut.unit == "document" else []
        named = tuple((document, name) for document in numbers if (name := text.domain_of(document)))
        # The tokens that the rows `first` … `last` predict, as far as the window holds them
        scored = (np.asarray(window[cut.first + 1 : cut.last + 2], dtype=np.int64) for window in cut.windows)
        return Prefill(
            axis=part_name(self.name, part),
            windows=cut.windows,
            first=cut.first,
            last=cut.last,
            units=cut.units,
            settings=(
                ("bos", inputs.tokenizer.bos_id),
                *((("domains", named),) if named else ()),
                ("n_ctx", n_ctx),
                ("place", cut.place),
                ("protocol", s.protocol),
                ("stride", cut.stride),
                ("unit", cut.unit),
            ),
            notes=tuple(
                canonical_json({"unigram_nll": float(unigram_nll(ids, tokens, vocab).mean())}) for tokens in scored
            ),
        )

    def score_parts(self, pairs: Mapping[str, Pair], seed: int) -> AxisScore:
        looks: dict[str, list[Pair]] = {}
        for part in sorted(pairs, key=_cut_of):
            looks.setdefault(part.partition("+")[0], []).append(pairs[part])
        scores = {part: self._score(some, seed) for part, some in looks.items()}
        unmeasurable = next((score for score in scores.values() if score.not_measurable), None)
        if unmeasurable is not None:
            return unmeasurable
        parts = dict(sorted(scores.items(), key=lambda item: _context(item[1])))
        part, worst = max(parts.items(), key=lambda item: _badness(item[1]))
        columns = {name: [score.positions[name] for score in parts.values()] for name in worst.positions}
        by_context = [
            metric.model_copy(update={"cell": {"context": _context(score)}, "headline": False})
            for score in (parts.values() if len(parts) > 1 else ())
            for key in ("mean", "top1")
            if (metric := score.found.metric(key)) is not None
        ]
        computed_from = ("n_ctx", "n_clusters", "n_documents", "windows", "at_most")
        sizes = [
            {name: score.found.facts[name] for name in computed_from if name in score.found.facts}
            | {"n_positions": len(score.num)}
            for score in parts.values()
        ]
        return replace(
            worst,
            identical=all(score.identical for score in parts.values()),
            positions={name: np.concatenate(values) for name, values in columns.items()},
            part=part,
            parts=parts,
        ).with_measurement(metrics=(*worst.found.metrics, *by_context), facts={**worst.found.facts, "contexts": sizes})

    def score(self, pair: Pair, seed: int) -> AxisScore:
        """Score one context."""
        return self._score([pair], seed)

    def _score(self, pairs: Sequence[Pair], seed: int) -> AxisScore:
        """Score one context from a pair for each of its captures, in order."""
        first, asked = pairs[0], [request_of(pair.ref, Prefill) for pair in pairs]
        if (nothing := not_measurable(pairs)) is not None:
            return nothing
        rows = RowComparison.concat(
            [rows for pair, request in zip(pairs, asked, strict=True) for _, rows in _compared(pair, request)]
        )
        before = np.cumsum([0, *(len(pair.ref.items) for pair in pairs)])
        order = [before[look] + r for look, pair in enumerate(pairs) for r, _ in pair.items]
        [request, *_] = asked
        windows = np.repeat(np.asarray(order, dtype=np.int32), request.n_rows)
        positions = np.tile(np.arange(request.first, request.last + 1, dtype=np.int32), len(order))
        units = [request.units[r] for pair, request in zip(pairs, asked, strict=True) for r, _ in pair.items]
        clusters = np.concatenate([np.asarray(own, dtype=np.int64) for own in units])
        score = kl_score(rows, clusters, bound=any(estimator_of(pair) is Estimator.TOPK for pair in pairs))
        compat = self._compat(pairs, score, seed)
        documents = first.ref.manifest["settings"].get("unit") == "document"
        grouped = tuple(self._groups(pairs, rows, score, seed))
        n_clusters, n_ctx = score.n_clusters, len(request.windows[0])
        read = tuple(accumulate(len(pair.items) for pair in pairs))
        by_position, by_confidence = kl_by_position(positions, rows.kl), kl_by_confidence(rows.confidence, rows.kl)
        return replace(
            score,
            right=(rows.right_ref, rows.right_test),
            probability_loss=-rows.dp,
            looks=read if self.settings.early else read[-1:],
            positions={
                "window": windows,
                "position": positions,
                "n_ctx": np.full(len(rows), n_ctx, dtype=np.int32),
                "kl": rows.kl,
                "top1_agrees": rows.top1,
                "reference_confidence": rows.confidence,
                "margin": rows.margin.astype(np.float32),
            },
        ).with_measurement(
            reference_faults=_reference_faults(pairs, rows),
            cluster="document" if documents else "block",
            metrics=(*_metrics(score, rows, seed), *compat, *grouped),
            plots=(
                kl_curve("position", by_position.edges, by_position.means),
                kl_curve("confidence", by_confidence.edges, by_confidence.means),
            ),
            facts={
                "estimator": str(estimator_of(first)),
                "n_ctx": n_ctx,
                "n_clusters": n_clusters,
                "n_documents": n_clusters if documents else None,
                "windows": len(order),
                **({"at_most": self._window_count(n_ctx, self.settings.windows)} if self.settings.early else {}),
                **({"compat": self.settings.compat, "k": self.settings.k} if compat else {}),
            },
        )

    def compared(self, pair: Pair) -> Iterable[tuple[int, int, NDArray[np.int64]]]:
        request = pair.ref.request
        return ((r, t, _targets(request, r)) for r, t in pair.items) if isinstance(request, Prefill) else ()

    def figures(self, pair: Pair) -> Iterable[tuple[int, Mapping[str, NDArray[Any]]]] | None:
        if self.settings.compat is not None or not isinstance(pair.ref.request, Prefill):
            return None
        return ((item, figures_of(rows)) for item, rows in _compared(pair, pair.ref.request))

    def _groups(self, pairs: Sequence[Pair], rows: RowComparison, score: AxisScore, seed: int) -> Iterator[Metric]:
        """Yield the metrics by domain and by structure, for texts whose documents have domains."""
        named = {tuple(one) for pair in pairs for one in pair.ref.manifest["settings"].get("domains") or ()}
        if not named or score.bound:
            return
        mean, top1 = KLD_METRICS["mean"], KLD_METRICS["top1"]
        asked = ((pair, request_of(pair.ref, Prefill)) for pair in pairs)
        structures = [structure_labels(p, [q.windows[r] for r, _ in p.items], q.first, q.last) for p, q in asked]
        labels = {
            DOMAIN: domains(score.clusters, {int(document): str(name) for document, name in named}),
            STRUCTURE: np.concatenate(structures),
        }
        for coordinate, groups in labels.items():
            if len(groups) == len(rows):
                yield from by_group(
                    coordinate, groups, rows, score.clusters, mean, top1, seed, identical=score.identical
                )

    def _compat(self, pairs: Sequence[Pair], score: AxisScore, seed: int) -> tuple[Metric, ...]:
        if self.settings.compat is None or score.bound:
            return ()
        values = np.concatenate([floored_item(pair, *at, self.settings.k) for pair in pairs for at in pair.items])
        known = np.isfinite(values)
        if len(values) != len(score.num) or not known.any():
            return ()
        items = RatioItems.of(values[known], 1.0, score.clusters[known])
        return (KLD_METRICS["compat"](ratio_estimate(items), ratio_interval(items, seed)),)


def _reference_faults(pairs: Sequence[Pair], rows: RowComparison) -> tuple[str, ...]:
    """Return why the reference is unusable: it predicts the text no better than word frequencies, or hardly ever.

    See docs/metrics.md#the-reference-itself.
    """
    known = np.isfinite(rows.nll_ref)
    if known.sum() < _MIN_JUDGED_ROWS:
        return ()
    notes = [json.loads(pair.ref.request.notes[r]) for pair in pairs if pair.ref.request.notes for r, _ in pair.items]
    faults = []
    nll = float(rows.nll_ref[known].mean())
    if notes and nll >= (unigram := float(np.mean([note["unigram_nll"] for note in notes]))):
        faults.append(
            f"it predicts this text no better than token frequencies do ({nll:.2f} nats per token, a unigram model "
            f"{unigram:.2f})"
        )
    if (right := float(np.nanmean(rows.right_ref))) < _LEAST_ACCURACY:
        faults.append(f"its most likely token is the text's next one at {format_percent(right)} of positions")
    return tuple(faults)


def _badness(score: AxisScore) -> tuple[int, float]:
    """Return the sort key of a context: its band, then the upper end of its mean KL.

    Without an interval, the mean itself takes the place of the upper end.
    """
    mean, interval = score.found.value("mean"), score.found.ci("mean")
    upper = interval[1] if interval is not None else math.inf if mean is None else mean
    band = verdict(upper, int((~score.usable).sum()), len(score.usable)).band
    assert band is not None
    return list(Band).index(band), upper


def _context(score: AxisScore) -> int:
    """Tokens per window."""
    n_ctx = score.found.facts["n_ctx"]
    assert isinstance(n_ctx, int)
    return n_ctx


def _cut_of(part: str) -> int:
    """Return the number of a context's capture, counted from 0; each further capture adds windows."""
    return int(part.partition("+")[2] or 0)


def _compared(pair: Pair, request: Prefill) -> Iterator[tuple[int, RowComparison]]:
    """Test items with their rows compared."""
    return ((t, compare_item(pair, r, t, _targets(request, r))) for r, t in pair.items)


def _targets(request: Prefill, item: int) -> NDArray[np.int64]:
    """Return the actual next token of each row, or -1 if the window has none."""
    after = [*request.windows[item][request.first + 1 : request.last + 2]]
    return np.asarray(after + [-1] * (request.n_rows - len(after)), dtype=np.int64)


def _metrics(score: AxisScore, rows: RowComparison, seed: int) -> tuple[Metric, ...]:
    summary = summarise_kl(rows.kl, rows.failed, rows.top1, rows.dp)
    flips = summarise_flips(rows, score.clusters, identical=score.identical)
    divergences = {} if score.bound else vars(summarise_divergences(rows, score.clusters, seed))
    define = KLD_METRICS
    return (
        define["mean"](summary.mean, score.mean_interval(seed), bound=score.bound, headline=True),
        define["stderr"](standard_error(score.items())),
        *(define[name](getattr(summary, name), bound=score.bound) for name in _QUANTILES),
        define["top1"](summary.top1, flips.top1_ci),
        define["confident_flips"](flips.confident_flips, flips.confident_flips_ci),
        define["rms_dp"](summary.rms_dp),
        *(() if score.bound else _concentration(score)),
        *(define[name](*value) for name, value in divergences.items()),
        *([define["cut"](cut)] if (cut := _cut(rows)) is not None else []),
        *(() if score.bound else (score.score(seed, headline=False),)),
    )


def _concentration(score: AxisScore) -> Iterator[Metric]:
    """Yield how much the mean rests on few documents and positions; nothing where no position was usable.

    See docs/metrics.md#what-an-interval-assumes.
    """
    if not score.n_clusters:
        return
    items = score.items()
    figures = {
        "largest_document": largest_cluster_share(items),
        "largest_positions": largest_items_share(items.num),
        "unseen_documents": unseen_rate(score.n_clusters),
        "breaking_document": breaking_cost(items, KL_MARGIN),
    }
    yield from (KLD_METRICS[key](value) for key, value in figures.items() if value is not None)


def _cut(rows: RowComparison) -> float | None:
    """Return the mean probability that was cut off, or ``None`` if both vocabularies have the same size."""
    known = rows.cut[np.isfinite(rows.cut)]
    return float(known.mean()) if len(known) else None


def kl_curve(key: str, edges: Sequence[float], means: Sequence[float | None]) -> Curve:
    """Return the curve of the mean KL (nats) per bin, plotted at the middle of each bin.

    ``key``: ``position`` (in the window) or ``confidence`` (the reference's largest probability).  ``edges`` [n + 1],
    ``means`` [n], with ``None`` for an empty bin.
    """
    title, x_label, caption = _PLOT_TEXTS[key]
    return Curve(
        key=key,
        title=title,
        x_label=x_label,
        y_label="mean KL, nats",
        caption=caption,
        x=tuple((low + high) / 2 for low, high in pairwise(edges)),
        y=tuple(means),
        log_y=True,
        kl=True,
    )
