"""The worst places of an arm: its largest KLs with the text before and both sides' choices, however rows were kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fidelab.axes.kld import KLD
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill
from fidelab.captures.store import drop_rows
from fidelab.results.plots import Places
from tests.axes.captures import make_arm, make_capture

WORDS = ("the", "▁train", "▁goes", "▁to", "▁Lyon", "▁Paris", "▁and", "▁back")
WINDOWS = ((0, 1, 2, 3, 5, 6, 7), (1, 2, 3, 4, 6, 7, 0))
ROWS = 5  # positions 1 to 5 of each window
REQUEST = Prefill("kld", WINDOWS, 1, ROWS, ((0,) * ROWS, (1,) * ROWS), (("unit", "document"),))
LYON, PARIS = 4, 5


def log_probabilities(likely: int, share: float) -> NDArray[np.float64]:
    """A row that gives ``share`` to one token, and the rest to the others in equal parts."""
    row = np.full(len(WORDS), (1 - share) / (len(WORDS) - 1))
    row[likely] = share
    return np.asarray(np.log(row))


def pair(folder: Path, estimator: str = "logprobs") -> Pair:
    """All rows are equal, but for two: after "goes to" (window 0), and a smaller loss in window 1."""
    ref = np.tile(log_probabilities(LYON, 0.8), (2, ROWS, 1))
    test = ref.copy()
    test[0, 2], test[1, 0] = log_probabilities(PARIS, 0.9), log_probabilities(LYON, 0.6)
    captures = []
    for name, rows in (("f32", ref), ("int4", test)):
        answers = [{"logprobs": window.astype(np.float32)} for window in rows]
        if estimator == "topk":
            ids = np.tile(np.arange(len(WORDS), dtype=np.int32), (ROWS, 1))
            answers = [{"topk_ids": ids, "topk_logprobs": window.astype(np.float32)} for window in rows]
        captures.append(
            make_capture(folder / name, REQUEST, answers, make_arm(name), pieces=WORDS, estimator=estimator)
        )
    return Pair.match(*captures)


def places(found: Pair) -> Places:
    """What the axis shows of the worst places."""
    [shown] = [p for p in KLD(KLD.Settings()).score(found, 0).found.plots if isinstance(p, Places)]
    return shown


@pytest.mark.parametrize("estimator", ["logprobs", "topk"])
def test_the_worst_place_has_the_text_before_it_and_both_choices(estimator: str, tmp_path: Path) -> None:
    worst, second = places(pair(tmp_path, estimator)).places
    assert (worst.window, worst.position, worst.actual.strip()) == (0, 3, "Paris")
    assert worst.before.split() == ["the", "train", "goes", "to"]
    assert worst.reference is not None
    assert worst.candidate is not None
    assert (worst.reference.text.strip(), worst.candidate.text.strip()) == ("Lyon", "Paris")
    assert (worst.reference.probability, worst.candidate.probability) == pytest.approx((0.8, 0.9))
    assert worst.kl > second.kl > 0
    assert (second.window, second.position) == (1, 1)
    assert second.reference is not None
    assert second.candidate is not None
    assert second.reference.text == second.candidate.text


def test_choices_stay_when_rows_are_dropped(tmp_path: Path) -> None:
    found = pair(tmp_path)
    expected = places(found)
    figures = KLD(KLD.Settings()).figures(found)
    assert figures is not None
    drop_rows(found, figures)
    again = Pair.match(Capture(tmp_path / "f32"), Capture(tmp_path / "int4"))
    assert not again.test.has_rows()
    assert places(again) == expected


def test_an_arm_without_a_loss_has_no_worst_places(tmp_path: Path) -> None:
    found = pair(tmp_path)
    same = Pair.match(found.ref, found.ref)
    assert not [p for p in KLD(KLD.Settings()).score(same, 0).found.plots if isinstance(p, Places)]
