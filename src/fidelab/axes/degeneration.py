"""Axis degeneration: the token at which a long greedy text begins to degenerate, if it does.

See docs/metrics/generated-text.md#degeneration.

Small models loop under greedy decoding with any cache, so an onset counts only if it is more than 32 tokens before the
reference's.  Greedy decoding is chaotic: rounding can move a text into or out of a loop by chance.  Loops and
repetition therefore downgrade the verdict only if more prompts get worse than better (McNemar's exact test, p ≤ 0.05).
Noise where the reference has none always downgrades it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from fidelab.axes.base import OVER_CONTROL, Axis, AxisInputs, AxisScore, AxisSettings, answered, request_of, texts
from fidelab.axes.forced import greedy_probe
from fidelab.captures.pair import Pair
from fidelab.captures.requests import Generate
from fidelab.metrics.degeneration import (
    EARLIER,
    Onset,
    degeneration_onset,
    distinct_floor,
    is_earlier,
    loop_onset,
    still_clean,
)
from fidelab.metrics.intervals import RatioItems, mcnemar_exact, ratio_estimate, ratio_interval
from fidelab.results.measurement import Definition, Metric, Unit, key_of
from fidelab.results.plots import Curve, TablePlot, TextPair

_MAX_SHOWN_ONSETS = 8  # onsets per arm for which the report shows the text
_BEFORE, _AFTER = 48, 64  # tokens of that text before and after the onset
_POINTS = 64  # points of the curve
_CHANCE = 0.05  # of McNemar's test; from here on, more prompts that get worse than better are no chance

_EARLIER = Definition(
    "degenerate_earlier",
    "share",
    "lower",
    f"Share of prompts that degenerate over {EARLIER} tokens before the reference.",
    null_value=None,  # as many may degenerate later: their test lowers the verdict
)
_LATER = Definition(
    "degenerate_later",
    "share",
    None,
    f"Share of prompts on which the reference degenerates over {EARLIER} tokens earlier.",
)
_P = Definition(
    "p_of_earlier_against_later", "p", None, "McNemar's exact test of prompts that degenerate earlier against later."
)


def _side_definitions(whose: str, suffix: str = "") -> tuple[Definition, ...]:
    def of(what: str, unit: Unit, about: str) -> Definition:
        return Definition(key_of(f"{what}{suffix}"), unit, None, about, name=f"{what}{suffix}")

    return (
        of("degenerate", "count", f"Texts {whose} that degenerate."),
        of("median onset", "tokens", f"Median tokens before a text {whose} degenerates."),
        of("tokens after onset", "share", f"Share of the tokens {whose} that lie behind an onset."),
        of("median length", "tokens", f"Median tokens of a text {whose}."),
    )


_OWN, _REFERENCE = _side_definitions("of the configuration"), _side_definitions("of the reference", ", reference")


class DegenerationSettings(AxisSettings):
    """Prompt format and length of the continuation; part of the comparability key except for ``batch``."""

    n_predict: int = Field(default=1024, ge=1, description="tokens generated per prompt; known failures start at 400")
    limit: int | None = Field(default=8, ge=1, description="first prompts only")
    template: Literal["chat", "raw"] = Field(default="chat", description="the model's chat template, or plain text")
    batch: int = Field(default=16, ge=1, description="prompts decoded together")


@dataclass(frozen=True)
class _Text:
    """One generation without its stop token, and its onset of degeneration."""

    ids: Sequence[int]
    onset: Onset | None

    @property
    def tokens_after_onset(self) -> int:
        """Tokens from the onset on."""
        return 0 if self.onset is None else len(self.ids) - self.onset.at


@dataclass(frozen=True)
class _Item:
    """A prompt as both sides continued it."""

    number: int
    ref: _Text
    test: _Text

    @property
    def harmed(self) -> bool:
        return is_earlier(self.test.onset, self.ref.onset)

    @property
    def spared(self) -> bool:
        """The reference degenerates earlier than the candidate."""
        return is_earlier(self.ref.onset, self.test.onset)


class Degeneration(Axis):
    """Share of prompts on which the candidate's text degenerates earlier than the reference's.

    A sequence that ends is judged up to its end: stopping is not degeneration.
    See docs/metrics/generated-text.md#degeneration.
    """

    name: ClassVar[str] = "degeneration"
    title: ClassVar[str] = "Degeneration: does long text turn into loops or noise?"
    Settings: ClassVar[type[AxisSettings]] = DegenerationSettings
    covers: ClassVar[str] = "generated text"
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="share", better="lower")
    quick: ClassVar[Mapping[str, Any]] = {"limit": 4, "n_predict": 384}
    settings: DegenerationSettings

    def request(self, inputs: AxisInputs) -> Generate:
        return greedy_probe(inputs, self.name, self.settings)

    def score(self, pair: Pair, seed: int) -> AxisScore:
        items, usable = _judged(pair), answered(pair)
        good = [item for item, ok in zip(items, usable, strict=True) if ok]
        harmed = [item for item in good if item.harmed]
        noise = any(item.test.onset and item.test.onset.kind == "noise" for item in harmed)
        spared = sum(item.spared for item in good)
        more = len(harmed) > spared and mcnemar_exact(len(harmed), spared) <= _CHANCE
        sound = [item for item in good if not _degenerates_early(item.ref)]
        broken = sum(_degenerates_early(item.test) for item in sound)
        where = f"in {broken} of {len(sound)} prompts that the reference begins well"
        fault = f"garbage within the first {EARLIER} tokens {where}"
        faults = (f"all its {len(good)} greedy texts degenerate within the first {EARLIER} tokens",)
        score = AxisScore(
            num=np.array([item.harmed for item in items], dtype=np.float64),
            den=np.ones(len(items)),
            clusters=np.array([item.number for item in items], dtype=np.int64),
            usable=usable,
            bounds=(0.0, 1.0),
            identical=bool(usable.all()) and all(pair.ref.ids(r) == pair.test.ids(t) for r, t in pair.items),
            proportion=True,
        ).with_measurement(
            downgrades=(_sentence(harmed, len(good)),) if noise or more else (),
            fails=(fault,) if 2 * broken > len(sound) else (),
            reference_faults=faults if good and not sound else (),
        )
        degenerate = [item for item in good if item.test.onset]
        ranked = sorted(degenerate, key=lambda item: (not item.harmed, item.number))[:_MAX_SHOWN_ONSETS]
        around = (_around(item, item.test.onset, pair) for item in ranked if item.test.onset)

        def cells(text: _Text) -> tuple[int | str | None, ...]:
            onset = text.onset
            return (len(text.ids), onset.at, onset.kind) if onset else (len(text.ids), None, "clean")

        table = TablePlot(
            title="Onset by prompt",
            columns=("prompt", "reference tokens", "onset", "kind", "candidate tokens", "onset", "kind", "earlier"),
            rows=tuple((i.number, *cells(i.ref), *cells(i.test), "yes" if i.harmed else "no") for i in good),
            note=f"earlier: by more than {EARLIER} tokens. Small models loop in greedy decoding whatever their cache.",
        )
        most = int(pair.ref.manifest["settings"]["n_predict"])
        lengths = sorted({round(n) for n in np.linspace(0, most, min(_POINTS, most) + 1)})
        shares: list[float | None] = [None] * len(lengths)
        if good:
            shares = list(still_clean([item.test.onset for item in good], lengths).tolist())
        curve = Curve(
            key="degeneration-clean",
            title="Share of prompts still clean",
            x_label="generated tokens",
            y_label="share of prompts",
            x=tuple(map(float, lengths)),
            y=tuple(shares),
        )
        clusters = [item.number for item in good]
        return score.with_measurement(
            metrics=(
                _EARLIER(score.mean(), score.mean_interval(seed)),
                _LATER(spared / len(good) if good else None),
                _P(mcnemar_exact(len(harmed), spared)),
                *_side(_OWN, [item.test for item in good], clusters, seed),
                *_side(_REFERENCE, [item.ref for item in good], clusters, seed),
            ),
            cluster="prompt",
            summary=f"{len(harmed)} of {len(good)} earlier" if good else "",
            reference_summary=f"{sum(item.ref.onset is not None for item in good)} of {len(good)} degenerate"
            if good
            else "",
            plots=(curve, table, *texts("Around the onset", around)),
            facts=pair.ref.manifest["settings"],
        )


def _judged(pair: Pair) -> list[_Item]:
    """Both sides' texts with their onsets.

    The lowest distinct-token ratio comes from the prompts and the reference's texts up to their loops.
    """
    request = request_of(pair.ref, Generate)
    vocab = pair.ref.vocabulary.size
    written = [_unended(pair.ref.ids(r), request.stop) for r in range(len(request.prompts))]
    floor = distinct_floor([*request.prompts, *(ids[: loop_onset(ids)] for ids in written)])

    def judged(ids: Sequence[int], item: int) -> _Text:
        return _Text(ids, degeneration_onset(ids, request.prompts[item], vocab, floor))

    return [_Item(r, judged(written[r], r), judged(_unended(pair.test.ids(t), request.stop), r)) for r, t in pair.items]


def _unended(ids: Sequence[int], stop: Sequence[int]) -> Sequence[int]:
    return ids[:-1] if ids and ids[-1] in stop else ids


# --------------------------------------------------------------------------------------------- judgement


def _degenerates_early(text: _Text) -> bool:
    return text.onset is not None and text.onset.at < EARLIER


def _sentence(items: Sequence[_Item], n: int) -> str:
    at = round(float(np.median([item.test.onset.at for item in items if item.test.onset])))
    onsets = [item.ref.onset.at for item in items if item.ref.onset]
    reference = f"in {len(onsets)} of these, from token ~{round(float(np.median(onsets)))}" if onsets else "none"
    return f"garbage from token ~{at} in {len(items)} of {n} prompts (reference: {reference})"


# ------------------------------------------------------------------------------------- plots and texts


def _side(
    definitions: Sequence[Definition], texts: Sequence[_Text], clusters: Sequence[int], seed: int
) -> Iterator[Metric]:
    degenerate, onset, after, length = definitions
    lost = RatioItems.of(
        [text.tokens_after_onset for text in texts], [float(len(text.ids)) for text in texts], clusters
    )
    onsets = [text.onset.at for text in texts if text.onset]
    yield degenerate(len(onsets))
    yield onset(float(np.median(onsets)) if onsets else None)
    yield after(ratio_estimate(lost), ratio_interval(lost, seed, bounds=(0.0, 1.0), proportion=True))
    yield length(float(np.median([len(text.ids) for text in texts])) if texts else None)


def _around(item: _Item, onset: Onset, pair: Pair) -> TextPair:
    span = slice(max(0, onset.at - _BEFORE), onset.at + _AFTER)
    reference = "clean" if item.ref.onset is None else f"{item.ref.onset.kind} from token {item.ref.onset.at}"
    return TextPair(
        label=f"prompt {item.number}, tokens {span.start}–{span.stop - 1}",
        reference=pair.ref.text(item.ref.ids[span]),
        candidate=pair.test.text(item.test.ids[span]),
        note=f"candidate: {onset.kind} from token {onset.at}; reference: {reference}",
    )
