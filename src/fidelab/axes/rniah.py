"""Retrieval: does the candidate find the same facts in a long text as the reference?

See docs/metrics/generated-text.md#retrieval.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

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
    answer_text,
    answered,
    lost_and_gained,
    notes_of,
    part_name,
    select_groups,
    written_text,
)
from fidelab.axes.rniah_plots import Trial, needle_plots
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate, Request, Timed
from fidelab.core import canonical_json
from fidelab.core.errors import InputError, UsageError
from fidelab.core.paths import expand
from fidelab.inputs.haystack import load_haystack
from fidelab.inputs.needles import FIXED_CODE, Needles, Style, build_prompt, draw_needles
from fidelab.metrics.intervals import PairedDifference
from fidelab.metrics.retrieval import (
    Cells,
    accuracy_difference,
    chance_score,
    judged,
    retrieval_interval,
    retrieval_score,
    returned,
)
from fidelab.results.measurement import Definition, Metric

_SHORT_LENGTHS = (512, 2048, 4096)  # for models of up to 8,192 positions
_LONG_LENGTHS = tuple(4096 << k for k in range(6))  # up to 131,072 tokens by default; longer prompts must be requested
_LEAST_PREDICT, _AROUND = 24, 8  # tokens of an answer, and tokens besides the codes
_HARM_POINTS = -5.0  # points; see docs/metrics/verdicts.md#verdicts

_DIFFERENCE = Definition("accuracy_difference", "points", "higher", "Accuracy minus the reference's, paired.")
_LOST = Definition("lost", "count", None, "Prompts in which the configuration finds fewer needles than the reference.")
_FOUND = Definition("found_by_the_reference", "count", None, "Prompts in which the reference finds a needle.")
_CHANCE = Definition("score_expected_by_chance", "points", None, "Mean score of a configuration that does not differ.")
_ACCURACY = Definition("accuracy", "share", "higher", "Share of needles that the configuration finds.")
_REFERENCE = Definition(
    "reference_accuracy", "share", None, "Share of needles that the reference finds.", name="reference's accuracy"
)
_INFORMATIVE = Definition("informative_cells", "count", None, "Lengths and positions at which the reference finds any.")
_CELLS = Definition("cells", "count", None, "Lengths and positions asked.")
_REFRACT = Definition("score_refract", "points", "higher", "The score by REFRACT's definition.", name="score (REFRACT)")
_SCORE_INFORMATIVE = Definition(
    "score_informative_cells",
    "points",
    "higher",
    "The score over the informative cells alone.",
    name="score (informative cells)",
)


class RNIAHSettings(AxisSettings):
    """Needles, positions and prompts; part of the comparability key except for ``batch``."""

    lengths: Literal["auto"] | tuple[int, ...] = Field(
        default="auto", description="prompt lengths in tokens; auto: 4096, 8192 … that fit, of small models 512 … 4096"
    )
    positions: tuple[float, ...] = Field(
        default=(0.1, 0.5, 0.9), min_length=1, description="where the needle lies, 0 (first token) … 1 (last)"
    )
    trials: int = Field(default=3, ge=1, le=50, description="haystacks per length and position")
    style: Literal["auto", "question", "cloze"] = Field(
        default="auto", description="how it is asked; auto: question where the reference answers it, else cloze"
    )
    needles: int = Field(default=1, ge=1, le=8, description="different needles in one prompt, all to be returned")
    distractors: int = Field(default=0, ge=0, le=36, description="near-identical sentences with other codes (hard)")
    haystack: str = Field(default="default", description="default, wikitext-2 or a UTF-8 file that is long enough")
    compat: Literal["refract"] | None = Field(
        default=None, description="refract: its fixed needle, and uninformative cells count as perfect"
    )
    seed: int = Field(default=0, ge=0, description="seed of codes and of the generated part of the haystack")
    batch: int = Field(default=4, ge=1, description="prompts decoded together")

    @field_validator("haystack")
    @classmethod
    def _from_any_folder(cls, name: str) -> str:
        return name if name in ("default", "wikitext-2") else str(expand(name))

    @field_validator("positions")
    @classmethod
    def _inside(cls, positions: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 <= position <= 1 for position in positions):
            raise ValueError("positions lie between 0 and 1")
        return tuple(sorted(set(positions)))

    @field_validator("lengths", mode="before")
    @classmethod
    def _rising(cls, lengths: Any) -> Any:
        values = [lengths] if isinstance(lengths, int) else lengths
        if values == "auto":
            return values
        if not isinstance(values, list | tuple) or not values or any(type(length) is not int for length in values):
            raise ValueError("write auto, or token counts such as [512, 2048]")
        return tuple(sorted(set(values)))

    @model_validator(mode="after")
    def _check_compat(self) -> Self:
        if self.compat and (self.needles > 1 or self.distractors):
            raise ValueError("compat: refract has one fixed needle: leave out needles and distractors")
        return self


class RNIAH(Axis):
    """Share of hidden facts that the candidate loses, by prompt length and position.

    The score, which enters the composite, is one-sided.  It is below 100 even for arms that do not differ; the figure
    "score expected by chance" shows by how much.  The accuracy difference has a sign and averages 0 without a
    difference.  It can lower the verdict by a band by itself.

    There is one part, ``main``.  With style ``auto``, the reference is first asked the shortest length as a
    ``question``. Its answers decide how ``main`` asks all arms.  See docs/metrics/generated-text.md#retrieval.
    """

    name: ClassVar[str] = "rniah"
    title: ClassVar[str] = "R-NIAH: is a fact still found in a long prompt?"
    Settings: ClassVar[type[AxisSettings]] = RNIAHSettings
    covers: ClassVar[str] = "retrieval"
    follows: ClassVar[bool] = True
    reference_only: ClassVar[tuple[str, ...]] = ("question",)
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="points", better="higher")
    in_composite: ClassVar[bool] = True
    quick: ClassVar[Mapping[str, Any]] = {"lengths": (512, 2048)}
    settings: RNIAHSettings

    def requests(self, inputs: AxisInputs) -> Mapping[str, Request]:
        asked = self._plan(inputs)
        if self.settings.style == "auto":
            return {"question": asked.request("question", "question", asked.lengths[:1])}
        return {"main": asked.request("main", self.settings.style, asked.lengths)}

    def follow_up(self, inputs: AxisInputs, reference: Mapping[str, Capture]) -> Mapping[str, Request]:
        if self.settings.style != "auto" or "question" not in reference:
            return {}
        asked, first = self._plan(inputs), reference["question"]
        notes = enumerate(notes_of(first))
        answered = any(_returned(first, item, note, self.settings.compat) for item, note in notes)
        style: Style = "question" if answered else "cloze"
        return {"main": asked.request("main", style, asked.lengths)}

    def foreseen(self, inputs: AxisInputs) -> Mapping[str, Request]:
        if self.settings.style != "auto":
            return {}
        asked = self._plan(inputs)
        return {"main": asked.request("main", "question", asked.lengths)}

    def repeated(self, request: Request, share: float) -> Request | None:
        """Return whole cells, so that the trials of one length and position stay together."""
        if isinstance(request, Timed):
            return None
        places = [(note["length"], note["position"]) for note in map(json.loads, request.notes)]
        return select_groups(request, places, share)

    def score_parts(self, pairs: Mapping[str, Pair], seed: int) -> AxisScore:
        pair = pairs["main"]
        compat = _setting(pair, "compat")
        trials = sorted(_trials(pair, compat), key=lambda t: (*t.place, t.trial))
        return _scored(trials, _setting(pair, "style"), compat, seed)

    def _plan(self, inputs: AxisInputs) -> _Plan:
        s, tokenizer = self.settings, inputs.tokenizer
        drawn = draw_needles(s.trials, s.needles, s.distractors, s.seed)
        if s.compat:
            drawn = (Needles((FIXED_CODE,)),) * s.trials
        longest = max(len(tokenizer.encode(f" {code}")) for needles in drawn for code in needles.codes)
        n_predict = max(_LEAST_PREDICT, _AROUND + (longest + 3) * s.needles)
        return _Plan(s, inputs, drawn, n_predict, _lengths(s, inputs, n_predict))


@dataclass(frozen=True)
class _Plan:
    """The prompts to ask: needles by trial, tokens to predict, lengths."""

    settings: RNIAHSettings
    inputs: AxisInputs
    drawn: Sequence[Needles]
    n_predict: int
    lengths: tuple[int, ...]

    def request(self, part: str, style: Style, lengths: Sequence[int]) -> Generate:
        """Return the request with every length, position and trial, in this order."""
        s, tokenizer = self.settings, self.inputs.tokenizer
        haystack = load_haystack(s.haystack, tokenizer, max(lengths), s.trials, s.seed)
        prompts, notes = [], []
        for length in lengths:
            for position in s.positions:
                for trial, needles in enumerate(self.drawn):
                    prompt = build_prompt(
                        tokenizer,
                        haystack,
                        needles,
                        style=style,
                        length=length,
                        position=position,
                        trial=trial,
                        trials=s.trials,
                    )
                    prompts.append(prompt.ids)
                    note = {"length": length, "position": position, "trial": trial, "style": style}
                    notes.append(canonical_json({**note, "codes": needles.codes, "wrong": needles.wrong}))
        template = tokenizer.template if style == "question" else "raw"
        settings = {
            "compat": s.compat,
            "distractors": s.distractors,
            "n_predict": self.n_predict,
            "needles": s.needles,
            "seed": s.seed,
            "style": style,
            "template": template,
            "trials": s.trials,
        }
        return Generate(
            axis=part_name(RNIAH.name, part),
            prompts=tuple(prompts),
            max_tokens=self.n_predict,
            stop=tokenizer.stop_ids,
            batch=s.batch,
            settings=tuple(settings.items()),
            rows=False,
            notes=tuple(notes),
        )


def _lengths(settings: RNIAHSettings, inputs: AxisInputs, n_predict: int) -> tuple[int, ...]:
    """Return the lengths to ask, in ascending order.

    Raises:
        InputError: If none of the default lengths fits.
        UsageError: If a requested length does not fit.
    """
    limit = inputs.max_positions
    most = None if limit is None else limit - n_predict
    name = inputs.tokenizer.model.name
    if settings.lengths == "auto":
        usual = _SHORT_LENGTHS if limit is None or limit <= 2 * _LONG_LENGTHS[0] else _LONG_LENGTHS
        fitting = tuple(length for length in usual if most is None or length <= most)
        if not fitting:
            raise InputError(
                f"rniah: {name} has {limit} positions; the shortest default length, {usual[0]}, does not fit with "
                f"{n_predict} tokens of answer: set axes.rniah.lengths"
            )
        return fitting
    for length in settings.lengths:
        if most is not None and length > most:
            raise UsageError(
                f"rniah: length {length} with {n_predict} tokens of answer is beyond the limit of {name}, "
                f"{limit} positions: at most {max(0, most)}"
            )
    return settings.lengths


# ---------------------------------------------------------------------------------------------- scoring


def _setting(pair: Pair, name: str) -> Any:
    return pair.ref.manifest["settings"][name]


def _returned(capture: Capture, item: int, note: Mapping[str, Any], compat: str | None) -> float:
    """Return the share 0 … 1 of the needles that an answer returns; compat mode includes its reasoning."""
    text = written_text(capture, item) if compat else answer_text(capture, item)
    # The answer to a cloze ends with its sentence; after it models repeat the haystack, distractors included.
    if note["wrong"] and note["style"] == "cloze":
        text = judged(text)
    return returned(text, note["codes"], note["wrong"], compat)


def _trials(pair: Pair, compat: str | None) -> list[Trial]:
    """Return the requests with the answers of both sides."""
    notes, trials = notes_of(pair.ref), []
    for (ref, test), well in zip(pair.items, answered(pair), strict=True):
        note = notes[ref]
        trial = Trial(
            length=note["length"],
            position=note["position"],
            trial=note["trial"],
            codes=tuple(note["codes"]),
            base=_returned(pair.ref, ref, note, compat),
            cand=_returned(pair.test, test, note, compat),
            texts=(written_text(pair.ref, ref), written_text(pair.test, test)),
            failed=not well,
            same=pair.ref.ids(ref) == pair.test.ids(test),
        )
        trials.append(trial)
    return trials


@dataclass(frozen=True, eq=False, kw_only=True)
class _RetrievalScore(AxisScore):
    """Items are trials, worth 0 … 1 on the candidate's side (``num``) and the reference's (``base``)."""

    base: NDArray[np.float64]
    cell: NDArray[np.int64]
    compat: str | None

    def by_cell(self) -> Cells:
        """Group the usable trials by cell."""
        return Cells(self.base[self.usable], self.num[self.usable], self.cell[self.usable])

    def score(self, seed: int, *, headline: bool = True) -> Metric:
        """Return the score by :func:`retrieval_score`; null if the reference finds nothing."""
        if self.not_measurable:
            return SCORE(None, headline=headline)
        cells = self.by_cell()
        return SCORE(
            retrieval_score(cells, self.compat), retrieval_interval(cells, compat=self.compat), headline=headline
        )

    def excess_over(self, control: AxisScore, seed: int) -> PairedDifference | None:
        """Return the accuracy minus the control's over the trials usable on both sides (points)."""
        both = self.usable & control.usable if len(self.num) == len(control.num) else self.usable[:0]
        if not both.any():
            return None
        return accuracy_difference(Cells(control.num[both], self.num[both], self.cell[both]), seed)


def _scored(trials: Sequence[Trial], style: Style, compat: str | None, seed: int) -> AxisScore:
    places = sorted({trial.place for trial in trials})
    usable = np.array([not trial.failed for trial in trials], dtype=bool)
    score = _RetrievalScore(
        num=np.array([trial.cand for trial in trials], dtype=np.float64),
        den=np.ones(len(trials)),
        clusters=np.arange(len(trials)),
        usable=usable,
        bounds=(0.0, 1.0),
        identical=bool(usable.all()) and all(trial.same for trial in trials),
        proportion=True,
        scale=100.0,
        base=np.array([trial.base for trial in trials], dtype=np.float64),
        cell=np.array([places.index(trial.place) for trial in trials], dtype=np.int64),
        compat=compat,
    )
    score = replace(score, right=(score.base, score.num))
    cells = score.by_cell()
    informative, all_cells = len(cells.informative().numbers()), len(cells.numbers())
    reason, losses = "", list[str]()
    if all_cells and not informative:
        reason = f"the reference found no needle (accuracy 0 in all {all_cells} cells, style {style})"
        reason += ": try style cloze" if style == "question" else ": try shorter lengths or a larger model"
    difference = accuracy_difference(cells, seed) if all_cells else PairedDifference(math.nan, None, 0)
    if difference.interval is not None and difference.interval[1] < _HARM_POINTS:
        lost, least = -difference.estimate, -difference.interval[1]
        losses = [f"R-NIAH: {lost:.0f} points fewer needles found than by the reference (95%: at least {least:.0f})"]
    found = int((cells.base > 0).sum())
    score = replace(score, not_measurable=reason).with_measurement(
        cluster="prompt",
        summary=lost_and_gained(list(zip(cells.base.tolist(), cells.cand.tolist(), strict=True))),
        reference_summary=f"finds {found} of {len(cells.base)}" if all_cells else "",
        downgrades=tuple(losses),
    )
    share = float(cells.base.mean()) if all_cells else None
    return score.with_measurement(
        metrics=(
            score.score(seed),
            _DIFFERENCE(difference.estimate, difference.interval),
            _LOST(int((cells.cand < cells.base).sum())),
            _FOUND(found),
            _CHANCE(None if reason else chance_score(cells, seed, compat=compat)),
            _ACCURACY(score.mean(), score.mean_interval(seed)),
            _REFERENCE(share),
            _INFORMATIVE(informative),
            _CELLS(all_cells),
            _REFRACT(None if reason else retrieval_score(cells, "refract")),
            *((_SCORE_INFORMATIVE(None if reason else retrieval_score(cells)),) if compat else ()),
        ),
        plots=needle_plots(trials, style),
        facts={
            "style": style,
            "compat": compat,
            "uninformative": [
                {"length": length, "position": position}
                for index, (length, position) in enumerate(places)
                if index not in cells.informative().numbers()
            ],
        },
    )
