"""Axes on captures made by hand: every figure against its definition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fidelab.axes.kld import KLD
from fidelab.axes.trajectory import Trajectory
from fidelab.captures.manifest import capture_key
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.writer import CaptureWriter, store_head
from fidelab.core import Arm, KVSpec, Vocabulary
from fidelab.probes import Generate, Prefill, Probe

V = 8
Rows = NDArray[np.float64]


def _capture(
    store: Path, name: str, probe: Probe, answers: Sequence[dict[str, Any]], head: Rows | None = None
) -> Capture:
    arm = Arm(name, "hf", "m", "m", "0" * 64, KVSpec.parse(name), "float32", "cpu", 1)
    writer = CaptureWriter(store / name, probe, capture_key(arm, probe, {}, 0), arm.record(), Vocabulary(V, "0" * 64))
    for item, arrays in enumerate(answers):
        writer.add(item, arrays)
    if head is not None:
        writer.head(store_head(store, {"weight": head.astype(np.float32)}, None, 1.0))
    return Capture(writer.finish("hidden" if head is not None else "logprobs", {}, {}))


def _prefill(n_windows: int, rows: int = 3) -> Prefill:
    windows = tuple(tuple((w + i) % V for i in range(rows + 2)) for w in range(n_windows))
    return Prefill("kld", windows, 1, rows, tuple((w,) * rows for w in range(n_windows)))


def _rows(seed: int, n: int) -> Rows:
    return np.random.default_rng(seed).normal(size=(n, V))


def _log_softmax(x: Rows) -> Rows:
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


# ------------------------------------------------------------------------------------------------- kld


def test_mean_kl_is_the_mean_over_all_rows(tmp_path: Path) -> None:
    probe, ref, test = _prefill(3), [_rows(w, 3) for w in range(3)], [_rows(9 + w, 3) for w in range(3)]
    p = _capture(tmp_path, "f32", probe, [{"logprobs": x.astype(np.float32)} for x in ref])
    q = _capture(tmp_path, "int4", probe, [{"logprobs": x.astype(np.float32)} for x in test])
    score = KLD(KLD.Settings()).score(Pair.match(p, q), 0)
    log_p, log_q = _log_softmax(np.concatenate(ref)), _log_softmax(np.concatenate(test))
    expected = (np.exp(log_p) * (log_p - log_q)).sum(-1).mean()
    assert score.figures["mean"] == pytest.approx(expected, abs=1e-6)
    assert score.figures["score"] == pytest.approx(100 * math.exp(-expected), abs=1e-4)


def test_hidden_states_times_head_are_the_distribution(tmp_path: Path) -> None:
    probe = _prefill(2)
    head = np.random.default_rng(1).normal(size=(V, 4))
    states = [np.random.default_rng(w).normal(size=(3, 4)) for w in range(4)]
    p = _capture(tmp_path, "f32", probe, [{"hidden": x.astype(np.float32)} for x in states[:2]], head)
    q = _capture(tmp_path, "int4", probe, [{"hidden": x.astype(np.float32)} for x in states[2:]], head)
    score = KLD(KLD.Settings()).score(Pair.match(p, q), 0)
    log_p, log_q = (_log_softmax(np.concatenate(x) @ head.T) for x in (states[:2], states[2:]))
    assert score.figures["mean"] == pytest.approx((np.exp(log_p) * (log_p - log_q)).sum(-1).mean(), abs=1e-5)


def test_rows_are_scored_against_the_token_that_follows_them(tmp_path: Path) -> None:
    probe = _prefill(1)
    ref, test = _rows(0, 3), _rows(1, 3)
    p = _capture(tmp_path, "f32", probe, [{"logprobs": ref.astype(np.float32)}])
    q = _capture(tmp_path, "int4", probe, [{"logprobs": test.astype(np.float32)}])
    score = KLD(KLD.Settings()).score(Pair.match(p, q), 0)
    targets = np.array(probe.windows[0][2:5])
    dp = np.exp(_log_softmax(test))[np.arange(3), targets] - np.exp(_log_softmax(ref))[np.arange(3), targets]
    assert score.figures["rms_dp"] == pytest.approx(np.sqrt((dp**2).mean()), abs=1e-6)


def test_a_nan_row_is_counted_and_left_out(tmp_path: Path) -> None:
    probe, ref = _prefill(2), [_rows(w, 3).astype(np.float32) for w in range(2)]
    broken = [x.copy() for x in ref]
    broken[0][1, 2] = np.nan
    p = _capture(tmp_path, "f32", probe, [{"logprobs": x} for x in ref])
    q = _capture(tmp_path, "int4", probe, [{"logprobs": x} for x in broken])
    figures = KLD(KLD.Settings()).score(Pair.match(p, q), 0).figures
    assert (figures["n_positions"], figures["n_failed"], figures["mean"]) == (6, 1, 0.0)


def test_one_unit_gives_no_interval(tmp_path: Path) -> None:
    probe = _prefill(1)
    p = _capture(tmp_path, "f32", probe, [{"logprobs": _rows(0, 3).astype(np.float32)}])
    q = _capture(tmp_path, "int4", probe, [{"logprobs": _rows(1, 3).astype(np.float32)}])
    assert KLD(KLD.Settings()).score(Pair.match(p, q), 0).figures["mean_ci"] is None


def test_excess_is_the_paired_difference_to_the_control(tmp_path: Path) -> None:
    probe = _prefill(12)
    ref = [_rows(w, 3) for w in range(12)]

    def moved(name: str, by: float) -> Capture:
        noise = [_rows(50 + w, 3) * by for w in range(12)]
        return _capture(
            tmp_path, name, probe, [{"logprobs": (x + n).astype(np.float32)} for x, n in zip(ref, noise, strict=True)]
        )

    p, axis = moved("f32", 0.0), KLD(KLD.Settings())
    candidate, control = (axis.score(Pair.match(p, moved(n, by)), 0) for n, by in (("int4", 0.3), ("bf16", 0.1)))
    difference = candidate.excess_over(control, 0)
    assert difference is not None
    assert difference["mean"] == pytest.approx(candidate.figures["mean"] - control.figures["mean"], abs=1e-12)
    assert difference["ci"][0] > 0


# ------------------------------------------------------------------------------------------ trajectory


def _generate(n: int, max_tokens: int) -> Generate:
    settings = (("n_predict", max_tokens), ("template", "raw"))
    return Generate("trajectory", tuple((1, 2, i) for i in range(n)), max_tokens, (0,), settings=settings)


def _answers(sequences: list[list[int]], margin: float = 1.0) -> list[dict[str, Any]]:
    """Rows in which the emitted token leads the next id by ``margin`` nats."""
    found = []
    for ids in sequences:
        rows = np.full((len(ids), V), -20.0, dtype=np.float32)
        for step, token in enumerate(ids):
            rows[step, token], rows[step, (token + 1) % V] = 0.0, -margin
        found.append({"ids": np.array(ids, dtype=np.int32), "logprobs": rows})
    return found


def _score(tmp_path: Path, ref: list[list[int]], test: list[list[int]], margin: float = 1.0, **settings: str) -> Any:
    probe = _generate(len(ref), max(map(len, ref + test)))
    probe = replace(probe, settings=(*probe.settings, *settings.items()))
    p = _capture(tmp_path, "f32", probe, _answers(ref, margin))
    q = _capture(tmp_path, "int4", probe, _answers(test))
    return Trajectory(Trajectory.Settings()).score(Pair.match(p, q), 0)


def test_a_candidate_that_stops_early_does_not_score_full_marks(tmp_path: Path) -> None:
    figures = _score(tmp_path, [[*range(1, 8), 1, 2, 3]], [[1, 2, 3, 4, 5, 7, 7, 7]]).figures
    assert (figures["score"], figures["score_refract"]) == (50.0, 62.5)


def test_in_compat_mode_the_score_is_the_sources(tmp_path: Path) -> None:
    score = _score(tmp_path, [[*range(1, 8), 1, 2, 3]], [[1, 2, 3, 4, 5, 7, 7, 7]], compat="refract")
    assert score.score() == score.figures["score"] == 62.5


def test_the_score_weighs_prompts_by_their_longest_answer(tmp_path: Path) -> None:
    figures = _score(tmp_path, [[1, 2, 3], [1, 2, 3, 4]], [[1, 2, 3], [1, 2, 5, 4]]).figures
    assert figures["score"] == pytest.approx(100 * 5 / 7)
    assert (figures["exact_match_rate"], figures["median_first_divergence"]) == (0.5, 2.0)
    assert figures["positional_agreement"] == pytest.approx(6 / 7)


@pytest.mark.parametrize(("margin", "share"), [(0.05, 1.0), (0.2, 0.0)])
def test_a_fork_is_a_near_tie_by_the_references_own_margin(tmp_path: Path, margin: float, share: float) -> None:
    assert _score(tmp_path, [[1, 2, 3]], [[1, 3, 3]], margin).figures["near_tie_share"] == share


def test_two_empty_answers_are_a_failed_item(tmp_path: Path) -> None:
    figures = _score(tmp_path, [[], [1, 2]], [[], [1, 2]]).figures
    assert (figures["n_items"], figures["n_failed"], figures["score"]) == (2, 1, 100.0)


def test_full_agreement_has_the_exact_binomial_bound(tmp_path: Path) -> None:
    sequences = [[1, 2, 3] for _ in range(5)]
    low, high = _score(tmp_path, sequences, sequences).figures["ci"]
    assert (low, high) == (pytest.approx(100 * 0.025 ** (1 / 5)), 100.0)
