"""KL divergence over the full vocabulary at every scored position, at one or several contexts.

See docs/metrics/distributions.md#mean-kl-divergence, docs/metrics/distributions.md#windows-and-contexts and
docs/metrics/distributions.md#depth.

``windows`` is the number of windows of the shortest context.  Longer contexts have fewer windows, so that about as many
positions are scored, but at least six: documents are the resampling clusters, and a long window rarely spans several.

With protocol ``depth`` a window is a document, and rows at several depths come from one prefill of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

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
from fidelab.axes.worst import top_columns, worst_places
from fidelab.captures.pair import Pair
from fidelab.captures.requests import CUT_SHORT, Prefill, Request, Tokens
from fidelab.core import Estimator, canonical_json
from fidelab.core.amounts import parse_tokens
from fidelab.core.errors import UsageError
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
from fidelab.results.measurement import DOMAIN, Definition, Flag, Metric
from fidelab.results.numbers import counted, format_percent
from fidelab.results.plots import Curve

if TYPE_CHECKING:
    from fidelab.inputs.tokens import Tokenizer

_DEFAULT_CONTEXTS = (512, 2048)
_DEEPEST = 8192  # tokens of the deepest context that is read unasked
_DEPTH_WINDOWS = 16  # documents per context: two of each of eight kinds
_DEPTH_LOOK = 10  # documents of the first look
_DEPTH_ROWS = 64  # per document and context: 16 documents give about 1,000 positions
MIN_DOCUMENTS = 10  # a kind that is 30% of all documents is missed by 10 of them with a probability of 3%, 0.7^10
"""Documents below which a depth is not decided."""
_PART_WINDOWS = 4  # documents of a capture: what is lost when a run is stopped
_MIN_CONTEXT = 8  # tokens
_MIN_WINDOWS = 6  # windows of a longer context: fewer resampling clusters give wide intervals and weak verdicts
_LEAST_ACCURACY = 0.05  # of greedy predictions: token frequencies alone reach about 5% on English text
_MIN_JUDGED_ROWS = 60  # 60 misses in a row have a probability below 5% at an accuracy of 5%
_BY_CONTEXT = ("mean", "top1", "median", "p95", "p99", "max")  # metrics of each context by itself
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
        "slope",
        "nats",
        None,
        "Change of the KL of a position with each doubling of the tokens before it, within documents.",
        name="per doubling of depth",
    ),
    Definition(
        "reverse_kl",
        "nats",
        "lower",
        "Mean KL divergence of the reference from the configuration, KL(Q‖P).",
        name="reverse KL",
    ),
    Definition("jsd", "nats", "lower", "Mean Jensen–Shannon divergence; at most log 2.", name="Jensen–Shannon"),
    Definition(
        "tv",
        "share",
        "lower",
        "Mean total variation; the rest is the share of the candidate's sampled tokens that the reference accepts.",
        name="total variation",
    ),
    Definition(
        "overlap",
        "share",
        "higher",
        "Mean share of the reference's ten most likely tokens among the configuration's.",
        name="top-10 overlap",
    ),
    Definition("k3", "nats", "lower", "Mean of r - 1 - log r over the text's own tokens, r = P/Q, as trainers log it."),
    Definition("chi2", "ratio", "lower", "Mean variance of P/Q over the configuration's own tokens.", name="χ²"),
    Definition(
        "rollout",
        "tokens",
        "higher",
        "Length of the configuration's responses at which importance weights halve the effective sample size.",
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

    windows: int = Field(
        default=32, ge=1, description="windows of the shortest context; depth: documents per context, 16 by default"
    )
    n_ctx: int | tuple[int, ...] | None = Field(
        default=None,
        description="tokens per window, one number or several; 512 and 2048 where model and text allow; depth: the "
        "longest, and its halves down to 1024",
    )
    rows: int = Field(default=_DEPTH_ROWS, ge=8, description="depth: scored rows per document and context")
    protocol: Literal["half", "full", "sliding", "depth"] = Field(
        default="half", description="which rows are scored; depth: some of each context, from one prefill of a document"
    )
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

    @model_validator(mode="before")
    @classmethod
    def _sizes_of_depth(cls, asked: Any) -> Any:
        """Depth has other default sizes, and does not take settings of windows of one length."""
        if not isinstance(asked, Mapping):
            return asked
        if asked.get("protocol") != "depth":
            if "rows" in asked and asked["rows"] != _DEPTH_ROWS:
                raise ValueError("rows is for protocol depth, the others score all rows")
            return asked
        if asked.get("compat") is not None:
            raise ValueError("compat is for windows of one length, not for protocol depth")
        return {"windows": _DEPTH_WINDOWS, **({} if "windows" in asked else {"looks": (_DEPTH_LOOK,)}), **asked}

    @field_validator("n_ctx", mode="before")
    @classmethod
    def _rising(cls, asked: Any) -> Any:
        """Sort contexts and remove repeats, from a single number or a flag's text such as ``512,2048``."""
        values = asked.split(",") if isinstance(asked, str) else asked if isinstance(asked, list | tuple) else [asked]
        if asked is None:
            return None
        try:
            contexts = sorted({parse_tokens(str(value)) for value in values})
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
    def deep(self) -> bool:
        """Whether rows at several depths come from one prefill of a document."""
        return self.protocol == "depth"

    @property
    def early(self) -> tuple[int, ...]:
        """Windows after each look but the last one."""
        return tuple(look for look in self.looks if look < self.windows)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Windows after which a new capture begins: the looks, or those of a run until decided of the same size."""
        usual = KLD.until_decided
        if self.deep:  # a long prefill that was stopped is lost: captures are small
            return tuple(sorted({*self.early, *range(_PART_WINDOWS, self.windows, _PART_WINDOWS)}))
        return self.early or (usual["looks"] if self.windows == usual["windows"] else ())


class KLD(Axis):
    """KL(reference ‖ candidate), nats, after the same context through each arm's own cache; a part per context.

    A single context is the part ``""``.  An arm's metrics and items are those of its worst context: by the band that
    its upper end and its failed positions give, then by the upper end.  For top-k rows KL is a
    lower bound without a score.  See docs/metrics/distributions.md#mean-kl-divergence.
    """

    name: ClassVar[str] = "kld"
    title: ClassVar[str] = "KLD: how far do the next-token distributions move?"
    Settings: ClassVar[type[AxisSettings]] = KLDSettings
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="nats", better="lower")
    in_composite: ClassVar[bool] = True
    reads_prompts: ClassVar[bool] = True
    distributions: ClassVar[bool] = True
    quick: ClassVar[Mapping[str, Any]] = {"windows": 8, "n_ctx": 512}
    until_decided: ClassVar[Mapping[str, Any]] = {"windows": 32, "looks": (8, 16)}
    settings: KLDSettings

    def requests(self, inputs: AxisInputs) -> Mapping[str, Request]:
        if self.settings.deep:
            return self._deep_requests(inputs)
        # Default contexts that the text or the model does not allow are left out
        s, asked = self.settings, self.contexts()
        sizes = {n_ctx: self.window_count(n_ctx, s.windows) for n_ctx in asked}
        have, limit = len(inputs.tokenizer.encode(inputs.text.content)), inputs.max_positions
        if s.early:  # the whole text may be too short for a decision
            fewest = {n_ctx: min(size, self.window_count(n_ctx, s.early[0])) for n_ctx, size in sizes.items()}
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
            earlier = [self.window_count(n_ctx, n) for n in self.settings.cuts]
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
        if not self.settings.early:
            return 0
        if self.settings.deep:
            end = (*self.settings.cuts, self.settings.windows)[_cut_of(part)]
            return sum(end > look for look in self.settings.early)
        return _cut_of(part)

    def _deep_contexts(self, limit: int | None) -> tuple[int, ...]:
        """The contexts of protocol depth that the model can read.

        Raises:
            UsageError: If there are none.
        """
        from fidelab.inputs.corpus import depths_to

        asked = self.settings.n_ctx
        contexts = asked if isinstance(asked, tuple) else depths_to(asked or min(_DEEPEST, limit or _DEEPEST))
        if not (fitting := tuple(n for n in contexts if limit is None or n <= limit)):
            raise UsageError(f"n_ctx {contexts[0]:,} is beyond the model's limit of {limit:,} positions")
        return fitting

    def _deep_requests(self, inputs: AxisInputs) -> Mapping[str, Request]:
        from fidelab.inputs.corpus import make_depths

        s, text = self.settings, inputs.text
        contexts = self._deep_contexts(inputs.max_positions)
        found = make_depths(inputs.tokenizer, text, contexts, s.windows, s.rows)
        settings = (
            ("bos", inputs.tokenizer.bos_id),
            ("contexts", contexts),
            ("n_ctx", max(found.contexts)),
            ("protocol", s.protocol),
            ("rows", s.rows),
            ("unit", found.unit),
        )
        notes = list(_deep_notes(inputs.tokenizer, found.windows, found.positions))
        requests: dict[str, Request] = {}
        for cut, (begin, end) in enumerate(pairwise((0, *s.cuts, s.windows))):
            at = slice(begin, end)
            if not (windows := found.windows[at]):
                continue
            name, positions, units = f"+{cut}" if cut else "", found.positions[at], found.units[at]
            numbers = sorted({own[0] for own in units}) if found.unit == "document" else []
            named = tuple((number, kind) for number in numbers if (kind := text.domain_of(number)))
            requests[name] = Prefill(
                axis=part_name(self.name, name),
                windows=windows,
                first=min(own[0] for own in positions),
                last=max(own[-1] for own in positions),
                units=units,
                settings=tuple(sorted((*settings, *((("domains", named),) if named else ())))),
                positions=positions,
                notes=tuple(map(canonical_json, notes[at])),
            )
        return requests

    def remarks(self, inputs: AxisInputs, requests: Mapping[str, Request]) -> Iterator[str]:
        """Yield what of the contexts cannot be read or decided, before a run."""
        windows = [window for request in requests.values() for window in request.items()]
        if not (self.settings.deep and windows):
            return
        asked, limit = self.settings.n_ctx, inputs.max_positions
        beyond = [n for n in (asked if isinstance(asked, tuple) else (asked or 0,)) if limit is not None and n > limit]
        if beyond:
            yield f"kld: {', '.join(f'{n:,}' for n in beyond)} tokens are left out, the model reads {limit:,}"
        unit = dict(next(iter(requests.values())).settings)["unit"]
        for n_ctx in self._deep_contexts(limit):
            count = sum(len(window) >= n_ctx for window in windows)
            if count < MIN_DOCUMENTS:
                which = counted(count, "document" if unit == "document" else "window")
                why = "" if count else ", the text has none so long"
                yield f"kld: {n_ctx:,} tokens: {which}{why}: not decided with fewer than {MIN_DOCUMENTS}"
        if unit == "block":
            yield "kld: the text has no documents: intervals are over blocks of windows"

    def contexts(self) -> tuple[int, ...]:
        """Return the tokens per window that are asked for, or the usual ones."""
        n_ctx = self.settings.n_ctx
        return (n_ctx,) if isinstance(n_ctx, int) else n_ctx or _DEFAULT_CONTEXTS

    def window_count(self, n_ctx: int, windows: int) -> int:
        """Return the number of windows of a context, given the number of windows of the shortest one."""
        return min(windows, max(_MIN_WINDOWS, round(windows * self.contexts()[0] / n_ctx)))

    def _cut(self, inputs: AxisInputs, part: str, n_ctx: int, windows: int) -> Prefill:
        from fidelab.inputs.corpus import make_windows

        s, text = self.settings, inputs.text
        assert s.protocol != "depth"
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
        if self.settings.deep:
            return self._score_depths({part: pairs[part] for part in sorted(pairs, key=_cut_of)}, seed)
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
            for key in _BY_CONTEXT
            if (metric := score.found.metric(key)) is not None
        ]
        sizes = [_size(score) for score in parts.values()]
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
        if (nothing := not_measurable(pairs)) is not None:
            return nothing
        scored = _Scored.of(pairs)
        read = tuple(accumulate(len(pair.items) for pair in pairs))
        n_ctx = len(request_of(pairs[0].ref, Prefill).windows[0])
        score = self._measured(pairs, scored, n_ctx, read, seed)
        faults = _reference_faults(pairs, scored.rows)
        most = {"at_most": self.window_count(n_ctx, self.settings.windows)} if self.settings.early else {}
        return score.with_measurement(reference_faults=faults, facts={**score.found.facts, **most})

    def _measured(
        self, pairs: Sequence[Pair], scored: _Scored, n_ctx: int, read: Sequence[int], seed: int
    ) -> AxisScore:
        """Score rows of one context; ``read``: windows after each look."""
        rows = scored.rows
        score = kl_score(rows, scored.clusters, bound=any(estimator_of(pair) is Estimator.TOPK for pair in pairs))
        compat = self._compat(pairs, score, seed)
        documents = pairs[0].ref.manifest["settings"].get("unit") == "document"
        grouped = tuple(_groups(scored, score, seed))
        places = worst_places(pairs, scored.windows, scored.positions, rows)
        by_position, by_confidence = (
            kl_by_position(scored.positions, rows.kl),
            kl_by_confidence(rows.confidence, rows.kl),
        )
        return replace(
            score,
            right=(rows.right_ref, rows.right_test),
            probability_loss=-rows.dp,
            looks=tuple(read) if self.settings.early else tuple(read[-1:]),
            positions={
                "window": scored.windows,
                "position": scored.positions,
                "n_ctx": np.full(len(rows), n_ctx, dtype=np.int32),
                "kl": rows.kl,
                "top1_agrees": rows.top1,
                "reference_confidence": rows.confidence,
                "margin": rows.margin.astype(np.float32),
            },
        ).with_measurement(
            cluster="document" if documents else "block",
            metrics=(*_metrics(score, rows, seed), *compat, *grouped),
            plots=(
                kl_curve("position", by_position.edges, by_position.means),
                kl_curve("confidence", by_confidence.edges, by_confidence.means),
                *([places] if places else []),
            ),
            facts={
                "estimator": str(estimator_of(pairs[0])),
                "n_ctx": n_ctx,
                "n_clusters": score.n_clusters,
                "n_documents": score.n_clusters if documents else None,
                "windows": read[-1],
                **({"compat": self.settings.compat, "k": self.settings.k} if compat else {}),
            },
        )

    def _score_depths(self, named: Mapping[str, Pair], seed: int) -> AxisScore:
        """Score each context from the rows at its depth; see docs/metrics/distributions.md#depth."""
        pairs = list(named.values())
        if (nothing := not_measurable(pairs)) is not None:
            return nothing
        scored = _Scored.of(pairs)
        ends = np.cumsum([len(pair.items) for pair in pairs])  # windows after each capture
        look_of = [self.look(part) for part in named]
        contexts = [int(n) for n in pairs[0].ref.manifest["settings"]["contexts"]]
        scores: dict[str, AxisScore] = {}
        for n_ctx in contexts:
            here = scored.at(n_ctx)
            if not len(here.rows):
                continue
            order = np.unique(here.windows)
            # windows of this depth among those of each look
            after = {look: int((order < end).sum()) for end, look in zip(ends, look_of, strict=True)}
            looks = list(after.values())
            scores[str(n_ctx)] = self._measured(pairs, here, n_ctx, looks, seed)
        documents = {part: score.n_clusters for part, score in scores.items()}
        decided = {part: score for part, score in scores.items() if documents[part] >= MIN_DOCUMENTS}
        parts = decided or scores
        if not parts:  # memory did not suffice for a single depth
            empty = np.empty(0)
            return AxisScore(empty, empty, empty, empty.astype(bool))
        part, worst = max(parts.items(), key=lambda item: _badness(item[1]))
        by_depth = [
            metric.model_copy(update={"cell": {"context": int(name), **metric.cell}, "headline": False})
            for name, score in scores.items()
            for metric in score.found.metrics
            if (not metric.cell and metric.key in _BY_CONTEXT) or {*metric.cell} == {DOMAIN}
        ]
        kinds = _groups(scored, kl_score(scored.rows, scored.clusters, bound=worst.bound), seed)
        own = [metric for metric in worst.found.metrics if not metric.cell]
        slope = () if worst.bound else _slope(scored, seed)
        columns = {name: [score.positions[name] for score in scores.values()] for name in worst.positions}
        facts = {
            **worst.found.facts,
            "protocol": self.settings.protocol,
            **({"kinds": sorted({*scored.labels[DOMAIN]} - {""})} if DOMAIN in scored.labels else {}),
            "contexts": [_size(score) for score in parts.values()],
            "undecided": [
                _size(scores[str(n)]) if str(n) in scores else _nothing_at(n) for n in contexts if str(n) not in decided
            ],
            **({"cut_short": cut} if (cut := _cut_short(pairs)) else {}),
            **({"at_most": self.settings.windows} if self.settings.early else {}),
        }
        return replace(
            worst,
            identical=all(score.identical for score in scores.values()),
            positions={name: np.concatenate(values) for name, values in columns.items()},
            part=part,
            parts=parts,
        ).with_measurement(
            reference_faults=_reference_faults(pairs, scored.rows),
            metrics=(*own, *slope, *kinds, *by_depth),
            flags=_cut_flags(facts.get("cut_short", 0), sum(len(pair.items) for pair in pairs)),
            plots=(_depth_curve(scores), *worst.found.plots[1:]),
            facts=facts,
        )

    def compared(self, pair: Pair) -> Iterable[tuple[int, int, NDArray[np.int64]]]:
        request = pair.ref.request
        return ((r, t, _targets(request, r)) for r, t in pair.items) if isinstance(request, Prefill) else ()

    def figures(self, pair: Pair) -> Iterable[tuple[int, Mapping[str, NDArray[Any]]]] | None:
        if self.settings.compat is not None or not isinstance(pair.ref.request, Prefill):
            return None
        refs = {t: r for r, t in pair.items}
        return (
            (t, figures_of(rows) | top_columns(pair, refs[t], t, rows)) for t, rows in _compared(pair, pair.ref.request)
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


@dataclass(frozen=True)
class _Scored:
    """Compared rows ``[n]`` with the window, the position and the cluster of each; ``pairs``: their captures.

    ``labels``: coordinate → the kind of text or of structure of each row, ``""`` where there is none.
    """

    rows: RowComparison
    windows: NDArray[np.int32]
    positions: NDArray[np.int32]
    clusters: NDArray[np.int64]
    labels: Mapping[str, NDArray[np.object_]]

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> _Scored:
        """Compare the rows of a pair for each capture, in order.  Rows that memory did not suffice for are left out."""
        before = np.cumsum([0, *(len(pair.ref.items) for pair in pairs)])
        items = [
            (pair, request_of(pair.ref, Prefill), int(offset), r, t)
            for pair, offset in zip(pairs, before, strict=False)
            for r, t in pair.items
        ]
        compared = {(id(pair), t): rows for pair in pairs for t, rows in _compared(pair, request_of(pair.ref, Prefill))}
        rows = RowComparison.concat([compared[id(pair), t] for pair, *_, t in items])
        places = [np.asarray(request.rows_of(r), dtype=np.int32) for _, request, _, r, _ in items]
        sizes = [*map(len, places)]
        windows = np.repeat(np.asarray([offset + r for *_, offset, r, _ in items], dtype=np.int32), sizes)
        clusters = np.concatenate([np.asarray(request.units[r], dtype=np.int64) for _, request, _, r, _ in items])
        whole = cls(rows, windows, np.concatenate(places), clusters, {})
        whole = replace(whole, labels=_labels(whole, items))
        kept = np.concatenate(
            [
                np.arange(size) < _rows_left(pair, r, t, size)
                for (pair, _, _, r, t), size in zip(items, sizes, strict=True)
            ]
        )
        return whole if kept.all() else whole.among(kept)

    def among(self, keep: NDArray[np.bool_]) -> _Scored:
        """Return some of the rows."""
        rows = RowComparison(**{name: column[keep] for name, column in vars(self.rows).items()})
        labels = {name: column[keep] for name, column in self.labels.items()}
        return _Scored(rows, self.windows[keep], self.positions[keep], self.clusters[keep], labels)

    def at(self, n_ctx: int) -> _Scored:
        """Return the rows of the depth of a context, of windows that have all of them."""
        here = (self.positions >= n_ctx // 2) & (self.positions < n_ctx - 1)
        windows, counts = np.unique(self.windows[here], return_counts=True)
        whole = windows[counts == counts.max()] if len(counts) else windows
        return self.among(here & np.isin(self.windows, whole))


def _labels(scored: _Scored, items: Sequence[tuple[Pair, Prefill, int, int, int]]) -> dict[str, NDArray[np.object_]]:
    """The kind of text and of structure of each row, for texts whose documents have kinds."""
    named = {tuple(one) for pair, *_ in items for one in pair.ref.manifest["settings"].get("domains") or ()}
    if not named:
        return {}
    structures: list[NDArray[np.object_]] = []
    for pair, request, _, r, _ in items:
        note = json.loads(request.notes[r]) if request.notes else {}
        if request.positions:
            structures.append(np.array(note.get("structure", [""] * len(request.positions[r])), dtype=object))
        else:
            structures.append(structure_labels(pair, [request.windows[r]], request.first, request.last))
    return {
        DOMAIN: domains(scored.clusters, {int(document): str(name) for document, name in named}),
        STRUCTURE: np.concatenate(structures),
    }


def _groups(scored: _Scored, score: AxisScore, seed: int) -> Iterator[Metric]:
    """Yield the metrics by domain and by structure, for texts whose documents have domains."""
    if score.bound:
        return
    mean, top1 = KLD_METRICS["mean"], KLD_METRICS["top1"]
    for coordinate, groups in scored.labels.items():
        if len(groups) == len(scored.rows):
            yield from by_group(
                coordinate, groups, scored.rows, score.clusters, mean, top1, seed, identical=score.identical
            )


def _rows_left(pair: Pair, r: int, t: int, n: int) -> int:
    """Rows of an item for which the memory of both sides sufficed."""
    sides = ((pair.ref, r), (pair.test, t))
    return min(int(side.manifest["facts"].get(CUT_SHORT, {}).get(str(item), n)) for side, item in sides)


def _cut_short(pairs: Sequence[Pair]) -> int:
    """Windows of which memory did not suffice for all rows."""
    return sum(_rows_left(pair, r, t, 1 << 31) < 1 << 31 for pair in pairs for r, t in pair.items)


def _cut_flags(cut: int, windows: int) -> tuple[Flag, ...]:
    """A remark on documents whose deeper rows are missing."""
    if not cut:
        return ()
    return (
        Flag(kind="cut", text=f"{cut} of {windows} documents were read in part: memory or context did not suffice"),
    )


def _nothing_at(n_ctx: int) -> dict[str, Any]:
    """A depth without rows."""
    return {"n_ctx": n_ctx, "n_clusters": 0, "n_documents": 0, "windows": 0, "n_positions": 0}


def _size(score: AxisScore) -> dict[str, Any]:
    """How much a context rests on."""
    computed_from = ("n_ctx", "n_clusters", "n_documents", "windows", "at_most")
    facts = score.found.facts
    return {name: facts[name] for name in computed_from if name in facts} | {"n_positions": len(score.num)}


def _slope(scored: _Scored, seed: int) -> tuple[Metric, ...]:
    """The change of KL per doubling of depth: least squares over the positions of each document, pooled.

    With x = log2 of the tokens before a position and document means taken off, it is Σ(x - x̄)(KL - mean) / Σ(x - x̄)²:
    a ratio of sums by document, as every other estimate.
    """
    usable = ~scored.rows.failed & np.isfinite(scored.rows.kl)
    if not usable.any():
        return ()
    _, index = np.unique(scored.clusters[usable], return_inverse=True)
    counts = np.bincount(index)
    x, y = np.log2(1.0 + scored.positions[usable]), scored.rows.kl[usable]
    x, y = (values - (np.bincount(index, values) / counts)[index] for values in (x, y))
    items = RatioItems.of(x * y, x * x, index)
    return (KLD_METRICS["slope"](ratio_estimate(items), ratio_interval(items, seed)),) if items.den.sum() else ()


def _depth_curve(scores: Mapping[str, AxisScore]) -> Curve:
    """The mean KL of each depth."""
    means = [score.found.value("mean") for score in scores.values()]
    spans = [score.found.ci("mean") for score in scores.values()]
    return Curve(
        key="depth",
        title="KL by depth",
        x_label="tokens before the position, at most",
        y_label="mean KL, nats",
        caption="Rising lines: the cost grows with the context.",
        x=tuple(float(name) for name in scores),
        y=tuple(means),
        low=tuple(None if span is None else span[0] for span in spans),
        high=tuple(None if span is None else span[1] for span in spans),
        log_x=True,
        log_y=True,
        kl=True,
    )


def _deep_notes(
    tokenizer: Tokenizer, windows: Sequence[Tokens], positions: Sequence[Tokens]
) -> Iterator[dict[str, Any]]:
    """Yield what scoring needs of each document: unigram NLL of the rows' next tokens, and their structure."""
    from fidelab.metrics.structure import structures

    every = np.concatenate([np.asarray(window, dtype=np.int64) for window in windows])
    vocab = len(tokenizer.pieces())
    texts = {int(token): tokenizer.decode([int(token)]) for token in np.unique(every)}
    for window, own in zip(windows, positions, strict=True):
        targets = np.asarray([window[i + 1] for i in own], dtype=np.int64)
        kinds = structures([texts[token] for token in window])
        yield {
            "unigram_nll": float(unigram_nll(every, targets, vocab).mean()),
            "structure": [kinds[i + 1] for i in own],
        }


def _reference_faults(pairs: Sequence[Pair], rows: RowComparison) -> tuple[str, ...]:
    """Return why the reference is unusable: it predicts the text no better than word frequencies, or hardly ever.

    See docs/metrics/verdicts.md#the-reference-itself.
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
    seen = np.isfinite(rows.right_ref)  # top tokens alone do not say it
    if seen.any() and (right := float(rows.right_ref[seen].mean())) < _LEAST_ACCURACY:
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
    if request.positions:
        return np.asarray([request.windows[item][i + 1] for i in request.positions[item]], dtype=np.int64)
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

    See docs/metrics/statistics.md#what-an-interval-assumes.
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
