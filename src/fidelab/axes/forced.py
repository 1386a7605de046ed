"""Forced decode KLD: the reference's own text, or recorded answers, token by token through each arm's cache.

See docs/metrics/distributions.md#forced-decode-kld.

Prefill KLD reads a cache that was filled by a single forward pass.  Here every token is added to the cache by its own
forward pass, as in generation, and all arms receive the same tokens, so one changed token does not change the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fidelab.axes.base import (
    OVER_CONTROL,
    Axis,
    AxisInputs,
    AxisScore,
    AxisSettings,
    greedy_request,
    part_name,
    prompt_ids,
)
from fidelab.axes.rows import compare_item, estimator_of, figures_of, kl_score, not_measurable
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Forced, Generate, Request
from fidelab.core import Estimator
from fidelab.core.errors import CaptureError, UnavailableError
from fidelab.inputs.conversations import recorded
from fidelab.metrics.degeneration import change_point
from fidelab.metrics.divergence import RowComparison, kl_by_position, summarise_kl
from fidelab.metrics.half_life import HalfLife, half_life
from fidelab.metrics.intervals import RatioItems, ratio_interval
from fidelab.results.measurement import Definition, Metric
from fidelab.results.numbers import format_kld
from fidelab.results.plots import Curve

_BINS = 32  # of positions in the curve
_LIMIT = 0.01  # nats
_HIGH = 0.95  # KL above this quantile counts as high
_PATH, _KL = "path", "kl"

_MEAN = Definition(
    "mean_kl", "nats", "lower", "Mean KL divergence per token of the reference's text.", name="mean KL", banded=True
)
_MEDIAN = Definition("median_kl", "nats", "lower", "Median KL of a token.", name="median KL")
_P99 = Definition("p99", "nats", "lower", "99th percentile of the KL of a token.", name="99th percentile")
_MAX = Definition("largest_kl", "nats", None, "Largest KL of one token.", name="largest KL")
_GROWTH = Definition(
    "kl_growth",
    "nats",
    "lower",
    "1,000 times the slope of the line through the KL against the generated token's number.",
    name="KL growth in 1,000 tokens",
    null_value=None,
)
_REACH = Definition(
    "tokens_until_limit",
    "tokens",
    "higher",
    "Where that line reaches this KL; none where it does not rise.",
    name=f"tokens until {_LIMIT:g} nats",
)
_HALF_LIFE = Definition(
    "half_life",
    "tokens",
    "higher",
    "Generated tokens after which half of all answers differ from the reference's, drawn as alike as can be.",
    name="half-life",
    null_value=None,
)
_TOP1 = Definition(
    "top1", "share", "higher", "Share of tokens whose most likely token is the reference's.", name="same top token"
)
_PROMPTS = Definition("prompts", "count", None, "Prompts whose text was forced.")
_RISES = Definition(
    "prompts_where_kl_rises_for_good",
    "count",
    None,
    "Prompts with a token from which on the KL stays higher.",
    name="prompts where KL rises for good",
)
_RISES_AT = Definition("rises_at_token", "tokens", None, "Median token from which on the KL stays higher.")


class ForcedSettings(AxisSettings):
    """Prompts and length of the forced text; part of the comparability key except for ``batch``."""

    n_predict: int = Field(default=64, ge=1, description="tokens of the reference's own text per prompt")
    limit: int | None = Field(default=16, ge=1, description="first prompts only")
    template: Literal["chat", "raw"] = Field(default="chat", description="the model's chat template, or plain text")
    batch: int = Field(default=16, ge=1, description="prompts that the reference continues together")
    answers: Literal["reference", "recorded"] = Field(
        default="reference", description="whose text is fed: the reference's own, or the log's (--traffic)"
    )
    temperature: float = Field(
        default=0.0, ge=0, lt=100, description="of the reference's text: 0 is greedy, 1 draws from its distribution"
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="draw from the most likely tokens with this share alone")
    seed: int = Field(default=0, ge=0, lt=2**31, description="of what is drawn")


class ForcedDecode(Axis):
    """KL(reference ‖ candidate), nats, at every position of the reference's own text, greedy or sampled.

    The row of token i is the distribution from which the reference drew it: prompt and i tokens are in the cache.
    See docs/metrics/distributions.md#forced-decode-kld.
    """

    name: ClassVar[str] = "forced"
    title: ClassVar[str] = "Forced decode: KL while the reference's own text is fed token by token"
    Settings: ClassVar[type[AxisSettings]] = ForcedSettings
    covers: ClassVar[str] = "generated text"
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="nats", better="lower")
    distributions: ClassVar[bool] = True
    quick: ClassVar[Mapping[str, Any]] = {"limit": 4, "n_predict": 32}
    follows: ClassVar[bool] = True
    reference_only: ClassVar[tuple[str, ...]] = (_PATH,)
    settings: ForcedSettings

    def requests(self, inputs: AxisInputs) -> Mapping[str, Request]:
        s = self.settings
        if s.answers == "recorded":
            return {_KL: self._recorded(inputs)}
        path = greedy_probe(inputs, part_name(self.name, _PATH), s)
        if s.temperature:
            drawn = (("sampling_seed", s.seed), ("temperature", s.temperature), ("top_p", s.top_p))
            path = replace(path, settings=tuple(sorted((*path.settings, *drawn))))
        return {_PATH: path}

    def follow_up(self, inputs: AxisInputs, reference: Mapping[str, Capture]) -> Mapping[str, Request]:
        if self.settings.answers == "recorded":
            return {}
        path = reference.get(_PATH)
        if path is None or not isinstance(path.request, Generate):
            raise CaptureError("the reference left no text to force; capture again")
        ids = (path.ids(i) if item["failed"] is None else [] for i, item in enumerate(path.items))
        return {
            _KL: Forced(
                axis=part_name(self.name, _KL),
                prompts=path.request.prompts,
                continuations=tuple(map(tuple, ids)),
                settings=path.request.settings,
            )
        }

    def _recorded(self, inputs: AxisInputs) -> Forced:
        """Return the first answers of the log, each after the turns before it; longer answers are cut.

        Raises:
            UnavailableError: If there is no log, or it has no answer that fits the model.
        """
        s = self.settings
        if inputs.traffic is None or inputs.traffic.text is not None:
            raise UnavailableError("axes.forced.answers=recorded feeds the answers of a log: --traffic FILE.jsonl")
        found, lost = recorded(inputs.tokenizer, inputs.traffic.conversations)
        room = inputs.max_positions
        fits = [each for each in found if room is None or len(each.prompt) + 1 < room]
        if not fits:
            raise UnavailableError(
                f"forced: none of {len(found) + lost} recorded answers in {inputs.traffic.name} can be fed: the chat "
                f"template writes {lost} otherwise, {len(found)} come after more turns than the model has positions"
            )
        fits = fits[: s.limit]
        return Forced(
            axis=part_name(self.name, _KL),
            prompts=tuple(each.prompt for each in fits),
            continuations=tuple(
                each.answer[: s.n_predict if room is None else min(s.n_predict, room - len(each.prompt))]
                for each in fits
            ),
            settings=(("n_predict", s.n_predict), ("recorded", len(fits)), ("template", inputs.tokenizer.template)),
        )

    def foreseen(self, inputs: AxisInputs) -> Mapping[str, Request]:
        s, name = self.settings, part_name(self.name, _KL)
        if s.answers == "recorded":
            return {}
        prompts = prompt_ids(inputs, s.limit, s.template, s.n_predict, "axes.forced.n_predict")
        return {_KL: Forced(name, prompts, ((0,) * s.n_predict,) * len(prompts))}

    def score_parts(self, pairs: Mapping[str, Pair], seed: int) -> AxisScore:
        if _KL not in pairs or not isinstance(pairs[_KL].ref.request, Forced):
            raise CaptureError("no forced rows: the reference's text was not put to both configurations; capture again")
        return self.score(pairs[_KL], seed)

    def compared(self, pair: Pair) -> Iterable[tuple[int, int, NDArray[np.int64]]]:
        return ((r, t, _targets(pair.ref.request, r)) for r, t in pair.items)

    def figures(self, pair: Pair) -> Iterable[tuple[int, Mapping[str, NDArray[Any]]]] | None:
        return ((item, figures_of(rows)) for item, rows in _compared(pair))

    def score(self, pair: Pair, seed: int) -> AxisScore:
        if (nothing := not_measurable([pair])) is not None:
            return nothing
        parts = [rows for _, rows in _compared(pair)]
        bound = estimator_of(pair) is Estimator.TOPK
        rows, lengths = RowComparison.concat(parts), [len(part) for part in parts]
        clusters = np.repeat(np.array([r for r, _ in pair.items], dtype=np.int64), lengths)
        score = kl_score(rows, clusters, bound=bound)
        positions = np.concatenate([np.arange(n) for n in lengths])
        summary = summarise_kl(rows.kl, rows.failed, rows.top1, rows.dp)
        usable = ~rows.failed & np.isfinite(rows.kl)
        kl, at, of = rows.kl[usable], positions[usable].astype(np.float64), clusters[usable]
        centred = at - at.mean() if len(at) else at
        growth, growth_ci, reach = None, None, None
        if centred.any():
            # centred, else prompts of other lengths lend it their mean
            items = RatioItems(centred * (kl - kl.mean()), centred**2, of)
            slope = float(items.num.sum() / items.den.sum())
            start = float(kl.mean() - slope * at.mean())
            reach = 0.0 if start >= _LIMIT else (_LIMIT - start) / slope if slope > 0 else None
            growth, growth_ci = _per_thousand(slope), ratio_interval(items, seed, transform=_per_thousand)
        half, half_metrics = None if bound else half_life([part.tv for part in parts], seed), list[Metric]()
        if half is not None and math.isfinite(half.tokens):
            ends = half.interval
            open_ = ends if ends is None or math.isfinite(ends[1]) else (ends[0], None)
            caveat = (
                "" if half.measured else f"beyond the {max(lengths):,} tokens that were generated, at their mean rate"
            )
            half_metrics.append(_HALF_LIFE(half.tokens, open_, caveat=caveat))
        jumps = [jump for part in parts if (jump := change_point(part.kl)) is not None]
        bins = kl_by_position(positions, rows.kl, min(_BINS, int(positions.max()) + 1))
        middle = (np.asarray(bins.edges[:-1]) + np.asarray(bins.edges[1:]) - 1) / 2
        return score.with_measurement(
            metrics=(
                *(() if bound else (score.score(seed),)),
                _MEAN(summary.mean, score.mean_interval(seed), bound=bound),
                _MEDIAN(summary.median, bound=bound),
                _P99(summary.p99, bound=bound),
                _MAX(summary.max, bound=bound),
                _GROWTH(growth, growth_ci),
                _REACH(reach),
                *half_metrics,
                _TOP1(summary.top1),
                _PROMPTS(len(parts)),
                _RISES(len(jumps)),
                _RISES_AT(float(np.median(jumps)) if jumps else None),
            ),
            cluster="prompt",
            summary="" if summary.mean is None else _said(format_kld(summary.mean, bound=bound), half),
            plots=(
                Curve(
                    key="forced-kl",
                    title="KL along the reference's text",
                    x_label="generated token",
                    y_label="mean KL, nats",
                    x=tuple(middle.tolist()),
                    y=tuple(mean or None for mean in bins.means),  # a logarithmic axis cannot show 0
                    log_y=True,
                ),
            ),
            facts=pair.ref.manifest["settings"],
        )


def _said(kld: str, half: HalfLife | None) -> str:
    """``0.0064 nats, half of all answers differ after 180 tokens``."""
    if half is None or not math.isfinite(half.tokens):
        return f"{kld} nats"
    return f"{kld} nats, half of all answers differ after {_rounded(half.tokens)} tokens"


def _rounded(tokens: float) -> str:
    """Two digits: an interval is seldom narrower."""
    digits = max(0, math.floor(math.log10(max(tokens, 1))) - 1)
    return f"{round(tokens / 10**digits) * 10**digits:,}"


def greedy_probe(inputs: AxisInputs, axis: str, asked: Any) -> Generate:
    """Return the request for greedy continuations of the first prompts, with token ids only.

    ``asked``: settings with ``n_predict``, ``limit``, ``template`` and ``batch``.

    Raises:
        InputError: If a prompt has no tokens, or is too long for the model.  The message names the setting to change.
    """
    setting = f"axes.{axis.split('.', 1)[0]}.n_predict={asked.n_predict}"
    prompts = prompt_ids(inputs, asked.limit, asked.template, asked.n_predict, setting)
    template = "raw" if asked.template == "raw" else inputs.tokenizer.template
    return greedy_request(inputs, axis, prompts, asked, (("n_predict", asked.n_predict), ("template", template)))


def _compared(pair: Pair) -> Iterator[tuple[int, RowComparison]]:
    """Test items with their rows compared."""
    return ((t, compare_item(pair, r, t, _targets(pair.ref.request, r))) for r, t in pair.items)


def _targets(request: Request, item: int) -> NDArray[np.int64]:
    return np.asarray(request.continuations[item] if isinstance(request, Forced) else (), dtype=np.int64)


def _per_thousand(slope: float) -> float:
    return 1000 * slope
