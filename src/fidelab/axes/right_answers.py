"""The reference's right answers, fed to every arm: whether the change makes right tokens less likely.

See docs/metrics/generated-text.md#signed-loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fidelab.axes.base import Axis, AxisInputs, AxisScore, part_name
from fidelab.axes.rows import compare_item, figures_of
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate, Prefill, Request, Tokens
from fidelab.metrics.divergence import RowComparison
from fidelab.metrics.intervals import RatioItems, ratio_estimate, ratio_interval
from fidelab.results.measurement import Coordinates, Definition, Metric

RIGHT = "right"
"""The part of an axis that feeds right answers."""

_SIGNED = Definition(
    "signed_loss",
    "nats",
    "lower",
    "Mean of log p - log q over the tokens of right answers: positive where they become less likely.",
)
_KL = Definition("kl_of_right_answers", "nats", "lower", "Mean KL divergence over the same tokens.")
_TOKENS = Definition("right_tokens", "count", None, "Tokens of right answers that were fed.")


class AnswersAxis(Axis):
    """An axis of one request for text, whose right answers in the reference are also fed to every arm.

    Its settings have ``signed``, the largest number of these answers.
    """

    follows: ClassVar[bool] = True

    def right(self, capture: Capture) -> Iterator[tuple[int, Tokens]]:
        """Yield number and token ids of each right answer of a capture."""
        raise NotImplementedError(f"test {self.name} must implement right()")

    def follow_up(self, inputs: AxisInputs, reference: Mapping[str, Capture]) -> Mapping[str, Request]:
        capture = reference.get("")
        answers = () if capture is None else self.right(capture)
        return right_answers(self.name, capture, islice(answers, self.settings.signed))

    def foreseen(self, inputs: AxisInputs) -> Mapping[str, Request]:
        asked = self.request(inputs)
        if not isinstance(asked, Generate):
            return {}
        longest = (0,) * asked.max_tokens
        prompts = range(min(self.settings.signed, len(asked.prompts)))
        return foreseen_answers(self.name, asked, ((item, longest) for item in prompts))

    def compared(self, pair: Pair) -> Iterable[tuple[int, int, NDArray[np.int64]]]:
        return compared_answers(pair)

    def figures(self, pair: Pair) -> Iterable[tuple[int, Mapping[str, NDArray[Any]]]] | None:
        return answer_figures(pair)

    def score_parts(self, pairs: Mapping[str, Pair], seed: int) -> AxisScore:
        score = self.score(pairs[""], seed)
        signed = signed_metrics(pairs.get(RIGHT), seed)
        return score.with_measurement(metrics=(*score.found.metrics, *signed)) if signed else score


def right_answers(axis: str, reference: Capture | None, answers: Iterable[tuple[int, Tokens]]) -> dict[str, Request]:
    """Return the request for the rows behind the tokens of some answers; nothing without one.

    Each answer is read in one prefill after its prompt.

    Args:
        axis: its name.
        reference: capture of the prompts.
        answers: number of the prompt, and the token ids of its right answer.
    """
    if reference is None or not isinstance(reference.request, Generate):
        return {}
    return foreseen_answers(axis, reference.request, answers)


def foreseen_answers(axis: str, asked: Generate, answers: Iterable[tuple[int, Tokens]]) -> dict[str, Request]:
    """Return the same request for prompts that are not answered yet."""
    prompts, chosen = asked.prompts, [(item, ids) for item, ids in answers if ids]
    if not chosen:
        return {}
    places = [tuple(range(len(prompts[item]) - 1, len(prompts[item]) + len(ids) - 1)) for item, ids in chosen]
    request = Prefill(
        axis=part_name(axis, RIGHT),
        windows=tuple((*prompts[item], *ids) for item, ids in chosen),
        first=min(own[0] for own in places),
        last=max(own[-1] for own in places),
        units=tuple((item,) * len(own) for (item, _), own in zip(chosen, places, strict=True)),
        settings=(("answers", RIGHT),),
        positions=tuple(places),
    )
    return {RIGHT: request}


def compared_answers(pair: Pair) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Yield the items of a pair of right answers with their tokens; nothing for other pairs."""
    request = pair.ref.request
    if isinstance(request, Prefill) and request.positions:
        yield from ((r, t, _tokens(request, r)) for r, t in pair.items)


def answer_figures(pair: Pair) -> Iterable[tuple[int, Mapping[str, NDArray[Any]]]] | None:
    """Return the figures that take the place of rows; ``None`` for other pairs."""
    if not isinstance(pair.ref.request, Prefill):
        return None
    return ((t, figures_of(compare_item(pair, r, t, tokens))) for r, t, tokens in compared_answers(pair))


def signed_metrics(pair: Pair | None, seed: int) -> tuple[Metric, ...]:
    """Return the signed loss and the KL over the tokens of right answers; nothing without them."""
    compared = [] if pair is None else [*compared_answers(pair)]
    if pair is None or not compared:
        return ()
    rows = RowComparison.concat([compare_item(pair, r, t, tokens) for r, t, tokens in compared])
    clusters = np.concatenate([np.full(len(tokens), r, dtype=np.int64) for r, _, tokens in compared])
    if (signed := signed_loss(rows, clusters, seed)) is None:
        return ()
    known = np.isfinite(rows.nll_ref) & np.isfinite(rows.nll_test)
    usable, found = known & np.isfinite(rows.kl), [signed]
    if usable.any():
        kl = RatioItems.of(rows.kl[usable], 1.0, clusters[usable])
        found.append(_KL(ratio_estimate(kl), ratio_interval(kl, seed, bounds=(0.0, float("inf")))))
    return (*found, _TOKENS(int(known.sum())))


def signed_loss(
    rows: RowComparison, clusters: NDArray[np.int64], seed: int, cell: Coordinates | None = None
) -> Metric | None:
    """Return the mean of log p - log q of the tokens behind compared rows ``[n]``; ``None`` without a known one.

    ``clusters`` [n]: their answers.  Tokens that a side does not report are left out.
    See docs/metrics/generated-text.md#signed-loss.
    """
    signed = rows.nll_test - rows.nll_ref
    known = np.isfinite(signed)
    if not known.any():
        return None
    items = RatioItems.of(signed[known], 1.0, clusters[known])
    return _SIGNED(ratio_estimate(items), ratio_interval(items, seed), cell=cell)


def _tokens(request: Prefill, item: int) -> NDArray[np.int64]:
    window: Sequence[int] = request.windows[item]
    return np.asarray([window[position + 1] for position in request.positions[item]], dtype=np.int64)
