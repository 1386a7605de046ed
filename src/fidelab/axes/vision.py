"""Axis vision: whether answers about images stay the same, and whether the model still uses the image. See
docs/metrics.md#vision.

Every question is asked greedily with its image.  The reference's answers are then given to all arms after three
prompts: with the right image, with a wrong one, and without any.  The KL of the arm's distributions from the
reference's, given the right image, is the loss; the KL within one arm between right and wrong image, and between right
and no image, is its dependence on the image.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fidelab.axes.answers import find_names
from fidelab.axes.base import (
    OVER_CONTROL,
    Axis,
    AxisInputs,
    AxisScore,
    AxisSettings,
    answer_text,
    image_files,
    image_messages,
    lost_and_gained,
    part_name,
    texts,
    written_text,
)
from fidelab.axes.rows import compare_item, estimator_of, kl_score, not_measurable
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import ImageForced, ImageGenerate, Request, Tokens
from fidelab.core import Estimator, canonical_json
from fidelab.core.errors import CaptureError, InputError, UnavailableError
from fidelab.inputs.images import (
    MAX_TOTAL_BYTES,
    ImagePrompt,
    PromptTokens,
    drawn_prompts,
    tokens_around,
    traffic_image_prompts,
)
from fidelab.metrics.agreement import first_divergence, positional_agreement
from fidelab.metrics.divergence import RowComparison, summarise_kl
from fidelab.metrics.intervals import RatioItems, mcnemar_exact, ratio_estimate, ratio_interval
from fidelab.results.measurement import Definition, Flag, Metric, Unit
from fidelab.results.numbers import format_kld
from fidelab.results.plots import Plot, TablePlot, TextPair

_ANSWER = "answer"
_RIGHT, _WRONG, _NONE = "right", "wrong", "none"
_FORCED = (_RIGHT, _WRONG, _NONE)
_MAX_SHOWN_ANSWERS = 8  # changed answers that the report shows
_BLIND = 1e-6  # nats: a smaller difference is rounding

_MEAN = Definition(
    "mean_kl", "nats", "lower", "Mean KL divergence per token of text behind the right image.", name="mean KL"
)
_P99 = Definition(
    "p99", "nats", "lower", "99th percentile of the KL of a token behind the right image.", name="99th percentile"
)
_TOP1 = Definition(
    "top1", "share", "higher", "Share of these tokens whose most likely token is the same.", name="same top token"
)
_OTHER = {
    _WRONG: Definition(
        "mean_kl_wrong_image",
        "nats",
        "lower",
        "Mean KL per token of the same text, wrong image.",
        name="mean KL, wrong image",
    ),
    _NONE: Definition(
        "mean_kl_no_image",
        "nats",
        "lower",
        "Mean KL per token of the same text without an image.",
        name="mean KL, no image",
    ),
}
_WORDS = {_WRONG: "wrong image", _NONE: "no image"}


def _by_part(key: str, unit: Unit, about: str, name: str) -> dict[str, Definition]:
    """A definition for the wrong image and one for none."""
    return {
        part: Definition(key.format(part=part), unit, None, about.format(words=words), name=name.format(words=words))
        for part, words in _WORDS.items()
    }


_DEPENDENCE = _by_part(
    "dependence_{part}",
    "nats",
    "Mean KL of this arm's distributions, right image against {words}.",
    "dependence: {words}",
)
_REFERENCE = _by_part(
    "dependence_{part}_reference", "nats", "The same of the reference.", "dependence: {words}, reference"
)
_KEPT = _by_part(
    "dependence_kept_{part}",
    "ratio",
    "This arm's dependence over the reference's, {words}.",
    "dependence kept: {words}",
)
_SAME = Definition("same_answers", "share", "higher", "Share of questions with equal greedy answers throughout.")
_AGREEMENT = Definition(
    "positional_agreement", "share", "higher", "Share of positions of the answers with equal tokens."
)
_ANSWERED = Definition("answers_right", "share", "higher", "Share of the questions of known answer answered right.")
_REF_ANSWERED = Definition("reference_answers_right", "share", None, "The same share of the reference.")
_P = Definition("mcnemar_p", "p", None, "McNemar's exact test of right answers lost against gained.", name="McNemar p")
_QUESTIONS = Definition("questions", "count", None, "Questions with an image that both sides answered.")


class VisionSettings(AxisSettings):
    """Questions and length of answers; part of the comparability key."""

    n_predict: int = Field(default=16, ge=1, description="tokens generated per question")
    limit: int | None = Field(default=None, ge=1, description="first questions only")
    template: Literal["chat", "raw"] = Field(default="chat", description="the model's chat template, or plain text")
    images: Literal["auto", "drawn", "traffic"] = Field(
        default="auto", description="drawn by fidelab, or the log's (--traffic); auto: the log's where it has any"
    )


class Vision(Axis):
    """KL(reference ‖ candidate) after images, the retained dependence on the image, and the answers.

    See docs/metrics.md#vision.
    """

    name: ClassVar[str] = "vision"
    title: ClassVar[str] = "Vision: do answers about images stay, and does the model still look at them?"
    Settings: ClassVar[type[AxisSettings]] = VisionSettings
    excess: ClassVar[Definition] = replace(OVER_CONTROL, unit="nats", better="lower")
    follows: ClassVar[bool] = True
    quick: ClassVar[Mapping[str, Any]] = {"limit": 8}
    settings: VisionSettings

    def requests(self, inputs: AxisInputs) -> Mapping[str, Request]:
        """Return the requests with the questions and their images.

        Raises:
            UnavailableError: If the reference cannot read images, or the log has none.
            InputError: If an image of the log cannot be used, or a question does not fit the model.
        """
        s, asked = self.settings, self._tokenized_prompts(inputs)
        source = "traffic" if asked and not asked[0][0].right else "drawn"
        images, shows = image_files([prompt.images for prompt, _ in asked])
        return {
            _ANSWER: ImageGenerate(
                axis=part_name(self.name, _ANSWER),
                prompts=tuple((*ids.images, *ids.rest) for _, ids in asked),
                max_tokens=s.n_predict,
                stop=inputs.tokenizer.stop_ids,
                batch=1,
                settings=(("images", source), ("n_predict", s.n_predict), ("template", self._template(inputs))),
                rows=False,
                notes=tuple(
                    canonical_json({"id": prompt.id, "right": prompt.right, "others": list(prompt.others)})
                    for prompt, _ in asked
                ),
                images=images,
                shows=shows,
                messages=tuple(image_messages(inputs, prompt.messages) for prompt, _ in asked),
            )
        }

    def follow_up(self, inputs: AxisInputs, reference: Mapping[str, Capture]) -> Mapping[str, Request]:
        answers = reference.get(_ANSWER)
        if answers is None or not isinstance(answers.request, ImageGenerate):
            raise CaptureError("the reference left no answers about images; capture again")
        stop = answers.request.stop  # servers do not read stop tokens after an answer
        ids = [
            tuple(token for token in answers.ids(index) if token not in stop) if item["failed"] is None else ()
            for index, item in enumerate(answers.items)
        ]
        return self._forced(inputs, ids)

    def foreseen(self, inputs: AxisInputs) -> Mapping[str, Request]:
        n = len(self._tokenized_prompts(inputs))
        return self._forced(inputs, [(0,) * self.settings.n_predict] * n)

    def available(self, inputs: AxisInputs) -> int:
        return len(self._prompts(inputs))

    def score_parts(self, pairs: Mapping[str, Pair], seed: int) -> AxisScore:
        if _ANSWER not in pairs:
            raise CaptureError("the questions about images were not asked; capture again")
        answers = _Answers.of(pairs[_ANSWER])
        forced = {part: pairs[part] for part in _FORCED if part in pairs}
        if not_measurable(forced.values()) is not None:
            return _answers_only_score(answers, pairs[_ANSWER], forced, seed)
        if forced.keys() != {*_FORCED}:
            raise CaptureError("the text after the right, wrong and no image was not sent to both arms; capture again")
        found = {part: _rows(pair) for part, pair in forced.items()}
        rows, clusters = found[_RIGHT]
        bound = estimator_of(forced[_RIGHT]) is Estimator.TOPK
        score = kl_score(rows, clusters, bound=bound)
        summary = summarise_kl(rows.kl, rows.failed, rows.top1, rows.dp)
        others = {part: kl_score(*found[part], bound=bound) for part in (_WRONG, _NONE)}
        dependence = {part: _Dependence.of(forced, part) for part in (_WRONG, _NONE)}
        return replace(
            score, identical=bool(answers.same.all()) and all(one.identical for one in (score, *others.values()))
        ).with_measurement(
            metrics=(
                *(() if bound else (score.score(seed),)),
                _MEAN(summary.mean, score.mean_interval(seed), bound=bound, headline=bound),
                _P99(summary.p99, bound=bound),
                _TOP1(summary.top1),
                *(_OTHER[part](other.mean(), other.mean_interval(seed), bound=bound) for part, other in others.items()),
                *(metric for part, found in dependence.items() for metric in found.metrics(part, seed, bound)),
                *answers.metrics(seed),
            ),
            cluster="image",
            summary=_summary(format_kld(summary.mean, bound=bound) if summary.mean is not None else "", answers),
            reference_summary=answers.reference_summary,
            plots=(*_table(pairs[_ANSWER], answers), *_texts(pairs[_ANSWER], answers)),
            flags=tuple(_flags(dependence, seed)),
            facts=pairs[_ANSWER].ref.manifest["settings"],
        )

    # ------------------------------------------------------------------------------------------ asking

    def _template(self, inputs: AxisInputs) -> str:
        return "raw" if self.settings.template == "raw" else inputs.tokenizer.template

    def _prompts(self, inputs: AxisInputs) -> tuple[ImagePrompt, ...]:
        s, traffic = self.settings, inputs.traffic
        own = () if traffic is None or s.images == "drawn" else traffic_image_prompts(traffic)
        if s.images == "traffic" and not own:
            name = "there is no log" if traffic is None else f"{traffic.name} shows none"
            raise UnavailableError(f"axes.vision.images=traffic takes the images of a log (--traffic): {name}")
        return own or drawn_prompts()

    def _tokenized_prompts(self, inputs: AxisInputs) -> list[tuple[ImagePrompt, PromptTokens]]:
        """Return the questions, and their tokens with and without images."""
        s = self.settings
        if inputs.no_images:
            raise UnavailableError(f"vision: {inputs.no_images}")
        asked = []
        for prompt in self._prompts(inputs)[: s.limit]:
            try:
                ids = tokens_around(inputs.tokenizer, prompt.messages, s.template, inputs.placeholder)
            except InputError as error:
                raise InputError(f"vision: question {prompt.id!r}: {error}") from None
            if (
                inputs.max_positions is not None
                and len(ids.images) + len(ids.rest) + s.n_predict > inputs.max_positions
            ):
                raise InputError(
                    f"vision: question {prompt.id!r} and axes.vision.n_predict={s.n_predict} do not fit the model's "
                    f"{inputs.max_positions} positions"
                )
            asked.append((prompt, ids))
        size = sum(map(len, {image for prompt, _ in asked for image in (*prompt.images, *prompt.wrong)}))
        if size > MAX_TOTAL_BYTES:
            raise InputError(
                f"vision: the images of {len(asked)} questions have {size >> 20} MiB, at most {MAX_TOTAL_BYTES >> 20} "
                "are asked in one run: ask fewer with axes.vision.limit"
            )
        return asked

    def _forced(self, inputs: AxisInputs, answers: Sequence[Tokens]) -> dict[str, Request]:
        """Return requests with the same text after the right image, a wrong one, and none."""
        s, asked = self.settings, self._tokenized_prompts(inputs)
        if len(asked) != len(answers):
            raise CaptureError(f"the reference answered {len(answers)} questions about images, not {len(asked)}")
        written = [inputs.tokenizer.decode(answer) for answer in answers]
        requests: dict[str, Request] = {}
        for part in _FORCED:
            chosen = [{_RIGHT: prompt.images, _WRONG: prompt.wrong, _NONE: ()}[part] for prompt, _ in asked]
            images, shows = image_files(chosen)
            requests[part] = ImageForced(
                axis=part_name(self.name, part),
                prompts=tuple(ids.none if part == _NONE else ids.images for _, ids in asked),
                continuations=tuple((*ids.rest, *answer) for (_, ids), answer in zip(asked, answers, strict=True)),
                settings=(("n_predict", s.n_predict), ("shown", part), ("template", self._template(inputs))),
                notes=tuple(
                    canonical_json({"cluster": _digest(prompt.images), "question": len(ids.rest)})
                    for prompt, ids in asked
                ),
                images=images,
                shows=shows,
                messages=tuple(
                    image_messages(
                        inputs, (*prompt.messages, {"role": "assistant", "content": text}), shown=part != _NONE
                    )
                    for (prompt, _), text in zip(asked, written, strict=True)
                ),
            )
        return requests


def _digest(images: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(image).digest() for image in images)).hexdigest()[:16]


# -------------------------------------------------------------------------------------------- scoring


def _rows(pair: Pair) -> tuple[RowComparison, NDArray[np.int64]]:
    """Return all rows of a pair, and the image that each row belongs to."""
    request = pair.ref.request
    if not isinstance(request, ImageForced):
        raise CaptureError("the captures have no text after images; capture again")
    parts = [compare_item(pair, r, t, np.asarray(request.continuations[r], dtype=np.int64)) for r, t in pair.items]
    clusters = _clusters(pair.ref)
    return RowComparison.concat(parts), np.repeat(
        [clusters[r] for r, _ in pair.items], [len(part) for part in parts]
    ).astype(np.int64)


def _clusters(capture: Capture) -> list[int]:
    """Return a number per item; questions about the same image share it."""
    names = [json.loads(note)["cluster"] for note in capture.request.notes]
    return [names.index(name) for name in names]


@dataclass(frozen=True)
class _Dependence:
    """Sums over the tokens of each item [items] of the KL between the right image and another one.

    There is one sum for the reference and one for the arm.
    """

    ref: NDArray[np.float64]
    test: NDArray[np.float64]
    tokens: NDArray[np.float64]
    clusters: NDArray[np.int64]

    @classmethod
    def of(cls, forced: Mapping[str, Pair], part: str) -> _Dependence:
        right, other = forced[_RIGHT], forced[part]
        known = _clusters(right.ref)
        sums: list[tuple[float, float, int, int]] = []
        for (r, t), (other_r, other_t) in zip(right.items, other.items, strict=True):
            request = right.ref.request
            targets = np.asarray(request.continuations[r] if isinstance(request, ImageForced) else (), dtype=np.int64)
            ref = compare_item(Pair(right.ref, other.ref, ()), r, other_r, targets)
            test = compare_item(Pair(right.test, other.test, ()), t, other_t, targets)
            usable = ~(ref.failed | test.failed)
            if usable.any():
                sums.append((float(ref.kl[usable].sum()), float(test.kl[usable].sum()), int(usable.sum()), known[r]))
        columns = list(zip(*sums, strict=True)) or [(), (), (), ()]
        ref_sums, test_sums, tokens = (np.asarray(column, dtype=np.float64) for column in columns[:3])
        return cls(ref_sums, test_sums, tokens, np.asarray(columns[3], dtype=np.int64))

    def retained(self) -> RatioItems:
        """Return the arm's dependence divided by the reference's."""
        return RatioItems(self.test, self.ref, self.clusters)

    @property
    def blind(self) -> bool:
        """Whether the reference's distributions do not change with the image."""
        return bool(len(self.ref)) and float(self.ref.sum() / self.tokens.sum()) < _BLIND

    def metrics(self, part: str, seed: int, bound: bool) -> tuple[Metric, ...]:
        """Return the arm's dependence, the reference's, and the share that is retained.

        Lower bounds give no share.
        """
        sides = []
        for definition, sums in ((_DEPENDENCE[part], self.test), (_REFERENCE[part], self.ref)):
            items = RatioItems(sums, self.tokens, self.clusters)
            interval = ratio_interval(items, seed, bounds=(0.0, math.inf))
            sides.append(definition(ratio_estimate(items), interval, bound=bound))
        if bound or self.blind:
            return tuple(sides)
        interval = ratio_interval(self.retained(), seed, bounds=(0.0, math.inf))
        return (*sides, _KEPT[part](ratio_estimate(self.retained()), interval))


def _flags(dependence: Mapping[str, _Dependence], seed: int) -> list[Flag]:
    flags = []
    for part, found in dependence.items():
        if found.blind:
            text = f"the reference's distributions do not change with the image (right against {_WORDS[part]})"
            flags.append(Flag(kind="blind", text=f"{text}: it does not look at it"))
            continue
        kept = ratio_interval(found.retained(), seed, bounds=(0.0, math.inf))
        if kept is not None and kept[1] < 1:
            text = f"this arm keeps {kept[0]:.0%}–{kept[1]:.0%} of the reference's dependence on the image"
            flags.append(Flag(kind="dependence", text=f"{text} (right against {_WORDS[part]})"))
    return flags


@dataclass(frozen=True)
class _Answers:
    """The greedy answers of both sides, item by item; ``right``: [items, 2] of 1, 0, and NaN where that is unknown."""

    items: tuple[tuple[int, int], ...]
    ids: tuple[tuple[list[int], list[int]], ...]
    usable: NDArray[np.bool_]
    right: NDArray[np.float64]

    @classmethod
    def of(cls, pair: Pair) -> _Answers:
        ids, usable, right = [], [], []
        for r, t in pair.items:
            note = json.loads(pair.ref.request.notes[r])
            ids.append((pair.ref.ids(r), pair.test.ids(t)))
            usable.append(pair.ref.items[r]["failed"] is None and pair.test.items[t]["failed"] is None)
            sides = ((pair.ref, r), (pair.test, t))
            right.append([_judge_answer(answer_text(*side), note) if usable[-1] else math.nan for side in sides])
        return cls(pair.items, tuple(ids), np.array(usable, dtype=bool), np.array(right).reshape(-1, 2))

    @property
    def same(self) -> NDArray[np.bool_]:
        return np.array([ref == test for ref, test in self.ids], dtype=bool)

    @property
    def known(self) -> NDArray[np.bool_]:
        """Whether both answers can be judged."""
        return np.asarray(~np.isnan(self.right).any(axis=1), dtype=bool)

    @property
    def reference_summary(self) -> str:
        known = self.known
        return f"answers {int(self.right[known, 0].sum())} of {int(known.sum())} right" if known.any() else ""

    def metrics(self, seed: int) -> tuple[Metric, ...]:
        usable, known = self.usable, self.known
        same = RatioItems.of(self.same[usable].astype(float), 1.0, np.flatnonzero(usable))
        pairs = [first_divergence(*ids) for ids, ok in zip(self.ids, usable, strict=True) if ok]
        judged: tuple[Metric, ...] = ()
        if known.any():
            ref, test = self.right[known].T
            items = RatioItems.of(test, 1.0, np.flatnonzero(known))
            judged = (
                _ANSWERED(float(test.mean()), ratio_interval(items, seed, bounds=(0.0, 1.0), proportion=True)),
                _REF_ANSWERED(float(ref.mean())),
                _P(mcnemar_exact(int((ref > test).sum()), int((test > ref).sum()))),
            )
        return (
            _SAME(ratio_estimate(same), ratio_interval(same, seed, bounds=(0.0, 1.0), proportion=True)),
            _AGREEMENT(positional_agreement(pairs)),
            *judged,
            _QUESTIONS(int(usable.sum())),
        )


def _judge_answer(answer: str, note: Mapping[str, Any]) -> float:
    if not note["right"]:
        return math.nan
    return float(find_names(answer, (note["right"], *note["others"])) == [note["right"]])


def _answers_only_score(answers: _Answers, pair: Pair, forced: Mapping[str, Pair], seed: int) -> AxisScore:
    """Return the score for an engine that cannot score text after images, without KL and dependence."""
    nothing = not_measurable(forced.values())
    same = answers.same
    score = AxisScore(
        num=same.astype(np.float64),
        den=np.ones(len(same)),
        clusters=np.array([r for r, _ in pair.items], dtype=np.int64),
        usable=answers.usable,
        bounds=(0.0, 1.0),
        proportion=True,
        bound=True,
    )
    why = nothing.not_measurable if nothing is not None else ""
    return score.with_measurement(
        metrics=answers.metrics(seed),
        cluster="image",
        summary=_summary("", answers),
        reference_summary=answers.reference_summary,
        plots=(*_table(pair, answers), *_texts(pair, answers)),
        flags=(Flag(kind="answers alone", text=f"neither KL nor dependence on the image: {why}"),),
        facts=pair.ref.manifest["settings"],
    )


def _summary(kl: str, answers: _Answers) -> str:
    known, n = answers.known, int(answers.usable.sum())
    lost = lost_and_gained([(ref, test) for ref, test in answers.right[known]]) if answers.right[known, 0].any() else ""
    same = f"{int(answers.same[answers.usable].sum())} of {n} answers unchanged" if n else ""
    return ", ".join(filter(None, (kl and f"{kl} nats", same, lost)))


def _table(pair: Pair, answers: _Answers) -> tuple[Plot, ...]:
    """Return a table with a line per question, without its words, which may be the user's."""
    ids = [str(json.loads(note)["id"]) for note in pair.ref.request.notes]
    lines = []
    for (r, _), right, same, usable in zip(answers.items, answers.right, answers.same, answers.usable, strict=True):
        verdict = [None if math.isnan(value) else "right" if value else "wrong" for value in right]
        lines.append((ids[r], *verdict, "yes" if same else "no", "" if usable else "failed"))
    return (
        TablePlot(
            title="Questions about images",
            columns=("question", "reference", "candidate", "same answer", "note"),
            rows=tuple(lines),
            note="Right and wrong where the answer is known.",
        ),
    )


def _texts(pair: Pair, answers: _Answers) -> tuple[Plot, ...]:
    changed = [
        item for item, same, ok in zip(answers.items, answers.same, answers.usable, strict=True) if ok and not same
    ]

    pairs = (
        TextPair(
            label=str(json.loads(pair.ref.request.notes[r])["id"]),
            reference=written_text(pair.ref, r),
            candidate=written_text(pair.test, t),
        )
        for r, t in changed[:_MAX_SHOWN_ANSWERS]
    )
    return texts("Answers that changed", pairs)
