"""Axes on captures of the top tokens alone: lower bounds, labelled as such, and nothing that they cannot bear."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fidelab.axes.base import AxisScore
from fidelab.axes.forced import ForcedDecode
from fidelab.axes.kld import KLD
from fidelab.axes.perplexity import Perplexity
from fidelab.axes.trajectory import Trajectory
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Forced, Generate, Prefill, Request
from fidelab.core import Estimator
from fidelab.metrics.composite import verdict
from tests.axes.captures import make_arm, make_capture

V, ROWS = 8, 6
PIECES = [f"<{i}>" for i in range(V)]
Rows = NDArray[np.float64]


def _capture(store: Path, name: str, request: Request, answers: Sequence[dict[str, Any]]) -> Capture:
    return make_capture(store / name, request, answers, make_arm(name, "openai"), pieces=PIECES, estimator="topk")


def _logprobs(seed: int, n: int = ROWS) -> Rows:
    scores = np.random.default_rng(seed).normal(size=(n, V))
    return np.asarray(scores - np.log(np.exp(scores).sum(-1, keepdims=True)))


def _top(rows: Rows, k: int, also: Sequence[int] = ()) -> dict[str, Any]:
    """The k likeliest of each row, and one more token where given; id -1 fills up."""
    ids = np.full((len(rows), k + 1), -1, dtype=np.int32)
    values = np.full((len(rows), k + 1), -np.inf, dtype=np.float32)
    for i, row in enumerate(rows):
        best = [*np.argsort(-row)[:k].tolist()]
        best += [token for token in also[i : i + 1] if token not in best]
        ids[i, : len(best)], values[i, : len(best)] = best, row[best]
    return {"topk_ids": ids, "topk_logprobs": values}


WINDOW = tuple(i % V for i in range(ROWS + 2))
PREFILL = Prefill("kld", (WINDOW, WINDOW[::-1]), 1, ROWS, ((0,) * ROWS, (1,) * ROWS))
REF, TEST = [_logprobs(seed) for seed in (0, 1)], [_logprobs(seed) for seed in (2, 3)]
ACTUAL = [window[2:] for window in PREFILL.windows]


def _kld(tmp_path: Path, k: int, test: Sequence[Rows] = TEST) -> AxisScore:
    ref, cand = (
        _capture(tmp_path, name, PREFILL, [_top(r, k, a) for r, a in zip(rows, ACTUAL, strict=True)])
        for name, rows in (("auto", REF), ("fp8", test))
    )
    return KLD(KLD.Settings()).score(Pair.match(ref, cand), 0)


def _true(ref: Sequence[Rows], test: Sequence[Rows]) -> float:
    p, q = np.concatenate(ref), np.concatenate(test)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("k", [1, 3, 5])
def test_kld_is_a_lower_bound(k: int, tmp_path: Path) -> None:
    score = _kld(tmp_path, k)
    mean = score.found.metric("mean")
    assert mean is not None
    assert (mean.bound, mean.better, score.found.facts["estimator"]) == (True, None, Estimator.TOPK)
    assert 0 < (mean.value or 0) < _true(REF, TEST)


def test_kld_over_all_tokens_is_the_kl(tmp_path: Path) -> None:
    score = _kld(tmp_path, V)
    assert score.found.value("mean") == pytest.approx(_true(REF, TEST), abs=1e-5)
    p, q = np.concatenate(REF), np.concatenate(TEST)
    assert score.found.value("top1") == (p.argmax(-1) == q.argmax(-1)).mean()
    actual = np.concatenate(ACTUAL)[:, None]
    change = np.exp(np.take_along_axis(q, actual, 1)) - np.exp(np.take_along_axis(p, actual, 1))
    assert score.found.value("rms_dp") == pytest.approx(np.sqrt((change**2).mean()), rel=1e-5)


def test_flips_of_reported_tokens_are_those_of_the_whole_rows(tmp_path: Path) -> None:
    score = _kld(tmp_path, V)
    p, q = np.concatenate(REF), np.concatenate(TEST)
    margin = p.max(-1) - p[np.arange(len(p)), q.argmax(-1)]
    assert score.found.value("confident_flips") == (margin >= 0.1).mean() > 0


def test_a_bound_has_no_score_and_no_excess(tmp_path: Path) -> None:
    score = _kld(tmp_path, 3)
    assert (score.bound, score.found.value("score")) == (True, None)
    assert score.excess_over(score, 0) is None
    assert verdict(None, 0, len(score.num)).label == "no verdict"


def test_equal_reports_are_no_proof_of_equal_distributions(tmp_path: Path) -> None:
    score = _kld(tmp_path, 3, REF)
    assert (score.num == 0).all()
    assert not score.identical


def test_a_position_without_report_has_failed(tmp_path: Path) -> None:
    empty = _top(TEST[0], 3)
    empty["topk_ids"][2] = -1
    ref = _capture(tmp_path, "auto", PREFILL, [_top(rows, 3) for rows in REF])
    cand = _capture(tmp_path, "fp8", PREFILL, [empty, _top(TEST[1], 3)])
    score = KLD(KLD.Settings()).score(Pair.match(ref, cand), 0)
    assert np.flatnonzero(~score.usable).tolist() == [2]
    assert score.measurement().n_failed == 1


def test_perplexity_is_that_of_the_actual_tokens(tmp_path: Path) -> None:
    score = _perplexity(tmp_path, ACTUAL)
    p, q, actual = np.concatenate(REF), np.concatenate(TEST), np.concatenate(ACTUAL)[:, None]
    gap = np.take_along_axis(p, actual, 1) - np.take_along_axis(q, actual, 1)
    assert not score.not_measurable
    assert score.mean() == pytest.approx(gap.mean(), abs=1e-6)


def test_perplexity_of_the_likely_tokens_alone_is_not_measurable(tmp_path: Path) -> None:
    score = _perplexity(tmp_path, [(), ()])
    assert "does not report the actual token at" in score.not_measurable
    assert score.mean() is None


def _perplexity(tmp_path: Path, also: Sequence[Sequence[int]]) -> AxisScore:
    settings = (("bos", None), ("mode", "chunked"), ("n_ctx", 8), ("stride", 8))
    request = Prefill("perplexity.8", PREFILL.windows, 1, ROWS, PREFILL.units, settings)
    ref, cand = (
        _capture(tmp_path, name, request, [_top(r, 3, a) for r, a in zip(rows, also, strict=True)])
        for name, rows in (("auto", REF), ("fp8", TEST))
    )
    return Perplexity(Perplexity.Settings()).score_parts({"8": Pair.match(ref, cand)}, 0)


def test_forced_decode_says_at_least(tmp_path: Path) -> None:
    request = Forced("forced.kl", ((1,), (2,)), (tuple(range(ROWS)), tuple(range(ROWS))))
    ref, cand = (
        _capture(tmp_path, name, request, [_top(r, 3) for r in rows]) for name, rows in (("auto", REF), ("fp8", TEST))
    )
    score = ForcedDecode(ForcedDecode.Settings()).score(Pair.match(ref, cand), 0)
    first = score.found.metrics[0]
    assert (first.name, first.bound) == ("mean KL", True)
    assert 0 < (first.value or 0) < _true(REF, TEST)
    assert score.found.value("score") is None


@pytest.mark.parametrize(("token", "known"), [("second", True), ("last", False)])
def test_a_margin_is_known_where_the_candidates_token_is_reported(token: str, known: bool, tmp_path: Path) -> None:
    request = Generate("trajectory", ((1,),), 4, (), settings=(("n_predict", 4), ("template", "raw")))
    ranked = np.argsort(-REF[0][:4], axis=-1)
    forked = int(ranked[1, 1] if token == "second" else ranked[1, -1])
    ids = ranked[:, 0].astype(np.int32)
    ref = _capture(tmp_path, "auto", request, [{"ids": ids, **_top(REF[0][:4], 3)}])
    other = np.array([ids[0], forked, *ids[2:]], dtype=np.int32)
    cand = _capture(tmp_path, "fp8", request, [{"ids": other}])
    [texts] = [
        p for p in Trajectory(Trajectory.Settings()).score(Pair.match(ref, cand), 0).found.plots if p.kind == "texts"
    ]
    margin = f"margin {REF[0][1].max() - REF[0][1][forked]:.3g} nats" if known else "one side ends"
    assert [pair.label for pair in texts.pairs] == [f"prompt 0, token 1: {margin}"]
