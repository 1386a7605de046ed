"""Metrics and plots of axis toolcalls: answers judged and paired, and the rows on the tokens of the right calls.

See docs/metrics/generated-text.md#tool-calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fidelab.axes.base import AxisScore
from fidelab.axes.graded import ACCURACY, MAX_SHOWN_ITEMS, GradedItem, graded_score, share_of
from fidelab.axes.right_answers import signed_loss
from fidelab.axes.rows import kl_score
from fidelab.inputs.toolcalls.judge import KINDS, Judgement
from fidelab.metrics.divergence import RowComparison, summarise_kl
from fidelab.metrics.intervals import PairedDifference, RatioItems, mcnemar_exact, ratio_estimate, ratio_interval
from fidelab.results.measurement import Definition, Metric
from fidelab.results.numbers import format_kld
from fidelab.results.plots import Plot, TablePlot, TextPair, Texts

_MAX_SHOWN_CHARS = 2000  # of a text in the report
_UNFINISHED = "unfinished"
_SIGNIFICANT = 0.05  # p of answers that are cut on one side alone
_NO_ANSWER = Judgement("no call", "no answer")

_KL = Definition(
    "mean_kl", "nats", "lower", "Mean KL divergence per token of the right calls.", name="mean KL", banded=True
)
_P99 = Definition("p99", "nats", "lower", "99th percentile of the KL of a token.", name="99th percentile")
_FLIPS = Definition(
    "flips",
    "share",
    "lower",
    "Share of tokens of the right calls whose most likely token is not the reference's.",
    null_value=None,
)
_TOKENS = Definition("tokens", "count", None, "Tokens of the right calls that were compared.")
_FAILED = Definition("failed_tokens", "count", None, "Tokens of the right calls whose rows are unusable.")
_CUT = Definition("unfinished", "count", None, "Answers of the configuration that the token budget cut before a call.")
_REFERENCE_CUT = Definition(
    "unfinished_in_the_reference", "count", None, "Answers of the reference that the token budget cut before a call."
)
_SHARES = {
    "several calls": Definition("parsed", "share", "higher", "Share of the answers with calls that can be read."),
    "invalid arguments": Definition(
        "right_function", "share", "higher", "Share of the answers with one call, of the right function."
    ),
    "wrong arguments": Definition(
        "valid_arguments", "share", "higher", "Share of the answers whose arguments, too, are valid by the schema."
    ),
}
"""The first kind of answer that counts for each."""
_PAIRED = ("score", "difference", "margin_of_error", "mcnemar_p", "lost", "gained")
"""Metrics that say nothing where the reference gets too few calls right."""


@dataclass(frozen=True)
class Answer:
    """Output of one side: its ids, its text, and what became of it; ``unfinished``: cut before any call."""

    ids: Sequence[int]
    text: str = ""
    judgement: Judgement = _NO_ANSWER
    unfinished: bool = False

    @property
    def right(self) -> bool:
        return self.judgement.kind == KINDS[-1]

    @property
    def kind(self) -> str:
        """One of :data:`KINDS`, or ``unfinished``."""
        return _UNFINISHED if self.unfinished else self.judgement.kind


@dataclass(frozen=True)
class Item(GradedItem[Answer]):
    """One call on both sides; ``index``: its dialogue.  A pair with an unfinished answer counts neither way."""

    id: str
    depth: int

    @property
    def failed(self) -> bool:
        return not (self.ref.ids and self.test.ids) or self.ref.unfinished or self.test.unfinished

    @property
    def outcome(self) -> str:
        cut = self.ref.ids and self.test.ids and self.failed
        return _UNFINISHED if cut else super().outcome


@dataclass(frozen=True)
class TokenRows:
    """Rows on the tokens of one right call; ``bound``: their KL is a lower bound."""

    dialogue: int
    depth: int
    rows: RowComparison
    bound: bool


class _Alone(AxisScore):
    """The score of token rows: its items are nats, so that it has no difference in points."""

    def excess_over(self, control: AxisScore, seed: int) -> PairedDifference | None:
        return None


def toolcalls_score(
    items: Sequence[Item], tokens: Sequence[TokenRows], seed: int, facts: Mapping[str, Any]
) -> AxisScore:
    """Return the score of the judged calls, with the figures of token rows beside it.

    Token rows stand alone where the reference gets too few calls right for a loss to be seen.
    """
    judged = graded_score(
        items,
        seed,
        noun="right call",
        verb="makes",
        name="accuracy of tool calls",
        unfinished="were cut before a call: raise axes.toolcalls.n_predict",
        more=(),
        plots=_plots(items),
    )
    known = [item.ref for item in items if item.ref.ids]
    able = f"{sum(answer.right for answer in known)} of {len(known)} right"
    row_score = _row_score(tokens) if tokens else None
    row_metrics = tuple(_row_metrics(tokens, seed))
    same = all(item.ref.ids and item.ref.ids == item.test.ids for item in items)
    same = same and (row_score is None or row_score.identical)
    answered = [item for item in items if item.ref.ids and item.test.ids]
    metrics = (*judged.found.metrics, *_metrics(items, answered))
    shared: dict[str, Any] = {"cluster": "dialogue", "facts": dict(facts)}
    if not judged.not_measurable or row_score is None or not row_score.usable.any():
        failed = len(items) - len(answered)
        return replace(judged, identical=same).with_measurement(
            **shared,
            metrics=(*metrics, *row_metrics),
            n_failed=failed,
            reference_summary=able if known else "",
            summary="; ".join(filter(None, (judged.found.summary, _cut_text(answered)))),
            downgrades=(*judged.found.downgrades, *_cut_more(answered)),
        )
    mean = ratio_estimate(row_score.items())
    said = "" if mean is None else f"{format_kld(mean, bound=row_score.bound)} nats on the right calls"
    return replace(row_score, identical=same).with_measurement(
        **shared,
        metrics=(*row_metrics, *(metric for metric in metrics if metric.key not in _PAIRED)),
        plots=judged.found.plots,
        summary="; ".join(filter(None, (said, _cut_text(answered)))),
        reference_summary=able,
    )


# ------------------------------------------------------------------------------------------------------------- judged


def _metrics(items: Sequence[Item], answered: Sequence[Item]) -> Iterator[Metric]:
    usable = [item for item in items if not item.failed]
    for kind, share in _SHARES.items():
        reached = [_Reached(KINDS.index(item.test.kind) >= KINDS.index(kind)) for item in usable]
        yield share(*share_of(reached))
    yield _CUT(sum(item.test.unfinished for item in answered))
    yield _REFERENCE_CUT(sum(item.ref.unfinished for item in answered))
    depths = sorted({item.depth for item in items})
    for depth in depths if len(depths) > 1 else ():
        yield ACCURACY(*share_of([item.test for item in usable if item.depth == depth]), cell={"depth": depth})


@dataclass(frozen=True)
class _Reached:
    """Whether an answer got as far as one kind of judgement."""

    right: bool
    ids: Sequence[int] = (0,)
    unfinished: bool = False


def _cut_more(answered: Sequence[Item]) -> tuple[str, ...]:
    """The harm of an arm whose answers are cut significantly more often than the reference's: no accuracy shows it."""
    own = sum(item.test.unfinished and not item.ref.unfinished for item in answered)
    theirs = sum(item.ref.unfinished and not item.test.unfinished for item in answered)
    if own <= theirs or mcnemar_exact(own, theirs) > _SIGNIFICANT:
        return ()
    return (f"{own - theirs} more of {len(answered)} tool calls stay unfinished",)


def _cut_text(answered: Sequence[Item]) -> str:
    own, theirs = sum(item.test.unfinished for item in answered), sum(item.ref.unfinished for item in answered)
    return f"{own} unfinished, {theirs} in the reference" if own or theirs else ""


def _plots(items: Sequence[Item]) -> tuple[Plot, ...]:
    kinds = [*KINDS[::-1], _UNFINISHED, "no answer"]
    sides = [
        [one.kind if one.ids else kinds[-1] for one in side]
        for side in zip(*((i.ref, i.test) for i in items), strict=True)
    ]
    table = TablePlot(
        title="Tool calls by outcome",
        columns=("outcome", "reference", "candidate"),
        rows=tuple(
            (kind, *(str(side.count(kind)) for side in sides)) for kind in kinds if any(kind in s for s in sides)
        ),
    )
    changed = TablePlot(
        title="Tool calls, call by call",
        columns=("id", "reference", "candidate", "outcome"),
        rows=tuple(
            (_place(item, items), _shown(item.ref), _shown(item.test), item.outcome)
            for item in items
            if item.outcome not in ("both right", "both wrong") or item.ref.judgement != item.test.judgement
        ),
        note="Calls on which both sides agree are left out. A wrong answer is shown by its fault.",
    )
    lost = [item for item in items if item.outcome == "lost"]
    found: tuple[Plot, ...] = (table, changed) if changed.rows else (table,)
    if not lost:
        return found
    pairs = tuple(
        TextPair(
            label=f"call {_place(item, items)}",
            reference=item.ref.text.strip()[:_MAX_SHOWN_CHARS],
            candidate=item.test.text.strip()[:_MAX_SHOWN_CHARS],
            note=item.test.judgement.fault,
        )
        for item in lost[:MAX_SHOWN_ITEMS]
    )
    count = f"{len(lost)}" if len(lost) <= MAX_SHOWN_ITEMS else f"first {MAX_SHOWN_ITEMS} of {len(lost)}"
    return (*found, Texts(title=f"Calls lost ({count})", pairs=pairs))


def _place(item: Item, items: Sequence[Item]) -> str:
    return item.id if len({one.depth for one in items}) == 1 else f"{item.id} at {item.depth:,}"


def _shown(answer: Answer) -> str:
    if not answer.ids:
        return "no answer"
    return answer.kind if answer.unfinished or answer.right else f"{answer.kind}: {answer.judgement.fault}"


# --------------------------------------------------------------------------------------------------------- token rows


def _joined(tokens: Sequence[TokenRows]) -> RowComparison:
    return RowComparison.concat([one.rows for one in tokens])


def _row_score(tokens: Sequence[TokenRows]) -> AxisScore:
    clusters = np.repeat([one.dialogue for one in tokens], [len(one.rows) for one in tokens]).astype(np.int64)
    score = kl_score(_joined(tokens), clusters, bound=any(one.bound for one in tokens))
    return _Alone(**vars(score))


def _row_metrics(tokens: Sequence[TokenRows], seed: int) -> Iterator[Metric]:
    if not tokens:
        return
    yield from _of_rows(tokens, seed, None)
    depths = sorted({one.depth for one in tokens})
    for depth in depths if len(depths) > 1 else ():
        yield from _of_rows([one for one in tokens if one.depth == depth], seed, {"depth": depth})


def _of_rows(tokens: Sequence[TokenRows], seed: int, cell: dict[str, Any] | None) -> Iterator[Metric]:
    rows, score = _joined(tokens), _row_score(tokens)
    summary = summarise_kl(rows.kl, rows.failed, rows.top1, rows.dp)
    yield _KL(summary.mean, score.mean_interval(seed), bound=score.bound, cell=cell)
    yield _P99(summary.p99, bound=score.bound, cell=cell)
    flips = RatioItems.of(~rows.top1[score.usable], 1.0, score.clusters[score.usable])
    yield _FLIPS(ratio_estimate(flips), ratio_interval(flips, seed, bounds=(0.0, 1.0), proportion=True), cell=cell)
    if not score.bound and (signed := signed_loss(rows, score.clusters, seed, cell)) is not None:
        yield signed
    yield _TOKENS(int(score.usable.sum()), cell=cell)
    if not score.usable.all():
        yield _FAILED(int((~score.usable).sum()), cell=cell)
