"""Effect of speculation on greedy text, and acceptance of its drafts: counted by the engine, and forecast.

See docs/metrics.md#acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from fidelab.axes.rows import compare_item, estimator_of, item_rows
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.core import Arm, Estimator, looked_up
from fidelab.core.serial import from_json
from fidelab.metrics.agreement import NEAR_TIE
from fidelab.metrics.speculation import expected_length, replay
from fidelab.results.measurement import Flag, Metric
from fidelab.results.speculation import SAMPLED_LENGTH, SAMPLED_RATE, acceptance

COUNTED = "drafts"  # kind of the sentence about drafts
SPECULATION = "speculation"  # in the facts of an answer; kind of the sentence about the text
_NAMED = 3  # changed texts that the sentence names


def speculated(pair: Pair, forks: Sequence[tuple[int, int, float]]) -> tuple[tuple[Metric, ...], tuple[Flag, ...]]:
    """Metrics and sentences of an arm that speculates; empty for other arms.

    ``forks``: for each text that diverges from the reference's, the item, the index, and by how much the reference
    preferred its own token (nats; NaN where one side ends or that is not known).
    """
    facts = pair.test.manifest["facts"].get(SPECULATION)
    if facts is None:
        return (), ()
    drafts, drafted, accepted = (int(facts[name]) for name in ("drafts", "drafted", "accepted"))
    metrics = acceptance(drafts, drafted, accepted)
    if facts["lookup"]:
        metrics += acceptance(*_looked_up(pair.ref, facts), forecast=True)
    return metrics, (Flag(kind=COUNTED, text=in_words(str(facts["method"]), metrics)), _text(pair, forks))


def in_words(method: str, metrics: Sequence[Metric]) -> str:
    """Sentence with the counted and the forecast acceptance."""
    known = {metric.name: metric.value for metric in metrics if metric.value is not None}

    def beside(name: str, form: str) -> str:
        forecast = known.get(f"{name}, forecast")
        return "" if forecast is None else f" (forecast {forecast:{form}})"

    if "accepted" not in known:
        return f"speculation ({method}) drafted no token"
    return (
        f"speculation ({method}): {known['acceptance length']:.2f} tokens per verification"
        f"{beside('acceptance length', '.2f')}, {known['accepted']:.0%} of the drafted tokens accepted"
        f"{beside('accepted', '.0%')}"
    )


def drafted_by(pair: Pair, tokens: int) -> tuple[Metric, ...]:
    """Forecast for a draft model, from its rows and the reference's along the reference's greedy text.

    Greedy: a drafted token is accepted where it is the text's; drafts have ``tokens`` tokens.  None where a side holds
    only the most likely tokens, or no rows.  See docs/metrics.md#acceptance.
    """
    if estimator_of(pair) is Estimator.TOPK:
        return ()
    counts, shared = np.zeros(3, dtype=np.int64), list[np.ndarray[Any, Any]]()
    for r, t in pair.items:
        text, n = pair.ref.ids(r), item_rows(pair.ref, r)
        if n == 0 or not n == item_rows(pair.test, t) == len(text):
            continue
        rows = compare_item(pair, r, t, np.asarray(text, dtype=np.int64))
        shared.append(1 - rows.tv)
        counts += replay(n, partial(_following, (rows.right_test == 1).tolist(), tokens))
    if not counts[0]:
        return ()
    rate = float(np.concatenate(shared).mean())
    drafts, drafted, accepted = map(int, counts)
    sampled = SAMPLED_RATE(rate), SAMPLED_LENGTH(expected_length(rate, tokens))
    return *acceptance(drafts, drafted, accepted, forecast=True), *sampled


def _following(right: Sequence[bool], tokens: int, at: int) -> Sequence[bool]:
    return right[at : at + tokens]


def _looked_up(reference: Capture, facts: Mapping[str, Any]) -> tuple[int, int, int]:
    """Forecast for prompt lookup along the reference's greedy text: tokens drafted, and tokens accepted."""
    shortest, longest = facts["lookup"]
    counts = np.zeros(3, dtype=np.int64)
    for item, prompt in enumerate(reference.request.items()):
        text = reference.ids(item) if reference.items[item]["failed"] is None else []
        whole, known = [*prompt, *text], len(prompt)
        counts += replay(len(text), partial(_proposed, whole, known, (shortest, longest), facts["tokens"]))
    drafts, drafted, accepted = map(int, counts)
    return drafts, drafted, accepted


def _proposed(whole: list[int], known: int, lookup: tuple[int, int], most: int, at: int) -> list[bool]:
    """Whether each token proposed after ``at`` tokens of the text equals the text's."""
    ahead = whole[known + at :]
    return [token == next_ for token, next_ in zip(looked_up(whole[: known + at], lookup, most), ahead, strict=False)]


def _text(pair: Pair, forks: Sequence[tuple[int, int, float]]) -> Flag:
    """Whether the text is the reference's, up to near ties."""
    count = len(pair.items)
    if not forks:
        return Flag(kind=SPECULATION, text=f"the text is the reference's, token for token, on all {count} prompts")
    ties = [margin for _, _, margin in forks if margin < NEAR_TIE]
    real = sorted((fork for fork in forks if not fork[2] < NEAR_TIE), key=lambda fork: (math.isnan(fork[2]), -fork[2]))
    if not real:
        few = f"{len(ties)} of {count} texts part at near ties (the reference's margin is {max(ties):.2g} nats at most)"
        return Flag(kind=SPECULATION, text=f"{few}, the others are the reference's")
    only = _but_for_speculation(pair.ref) == _but_for_speculation(pair.test)
    who = "speculation changed the text" if only else "the text changes"
    places = "; ".join(
        f"at prompt {item}, token {at}, where "
        + ("one side ends" if math.isnan(margin) else f"the reference preferred its token by {margin:.2g} nats")
        for item, at, margin in real[:_NAMED]
    )
    more = f"; and in {len(real) - _NAMED} more texts" if len(real) > _NAMED else ""
    why = "" if only else "; the arm differs in more than speculation: the same arm without it tells which it was"
    return Flag(kind=SPECULATION, text=f"{who} {places}{more}{why}")


def _but_for_speculation(capture: Capture) -> str:
    """Settings of an arm without the options of speculation."""
    arm = from_json(Arm, capture.manifest["asked"])
    own = (capture.manifest["facts"].get(SPECULATION) or {}).get("options", ())
    return replace(arm, options=tuple((key, value) for key, value in arm.options if key not in own)).fingerprint()
