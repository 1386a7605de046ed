"""The reference's right answers, fed to every arm: the signed loss against closed forms, and its coverage."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fidelab.axes.right_answers import signed_loss
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Prefill
from fidelab.metrics.divergence import compare_rows
from tests.present import present
from tests.run.harness import Done, run_fake

PROBLEMS = [(f"Question number {n}: how many?", 11 + n) for n in range(8)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Eight problems of which the reference answers six rightly; the candidates answer as it does."""
    cwd = tmp_path_factory.mktemp("right")
    records = [{"question": question, "answer": f"so #### {value}"} for question, value in PROBLEMS]
    (cwd / "problems.jsonl").write_text("\n".join(map(json.dumps, records)))
    answers = [[question, f"it is {value if n < 6 else 99}."] for n, (question, value) in enumerate(PROBLEMS)]
    (cwd / "answers.json").write_text(json.dumps(answers))
    axes = {"gsm8k": {"data": "problems.jsonl", "shots": 0, "n_predict": 32}}
    done = run_fake(cwd, axes, ["tilt[q=0.6]", "tilt[q=0.4]"], engine_args={"answers": "answers.json"})
    assert done.code == 0, done.err
    return done


def test_only_right_answers_are_fed_each_behind_its_prompt(done: Done) -> None:
    [folder] = (done.cwd / "runs" / "captures").glob("*exact*/gsm8k.right-*-r0")
    request = Capture(folder).request
    assert isinstance(request, Prefill)
    words = [bytes(token for token in window if token).decode() for window in request.windows]
    assert [text.endswith(f"it is {value}.") for text, (_, value) in zip(words, PROBLEMS[:6], strict=True)] == [
        True
    ] * 6
    for window, own in zip(request.windows, request.positions, strict=True):
        assert own == tuple(range(own[0], len(window) - 1))
        assert bytes(window[own[0] + 1 : own[0] + 6]) == b"it is"


@pytest.mark.parametrize("q", [0.6, 0.4])
def test_the_signed_loss_tells_a_change_that_hurts_from_one_that_does_not(q: float, done: Done) -> None:
    """All letters are ids of the first half, which has the probability q in place of a half."""
    axis = done.axis(f"tilt[q={q}]", "gsm8k")
    assert axis.value("signed_loss") == pytest.approx(math.log(0.5 / q), abs=1e-6)
    distance = 0.5 * math.log(0.5 / q) + 0.5 * math.log(0.5 / (1 - q))
    assert axis.value("kl_of_right_answers") == pytest.approx(distance, abs=1e-6)
    assert (axis.value("lost"), axis.value("gained")) == (0, 0)


def test_the_interval_of_the_signed_loss_holds_its_level_over_answers_of_different_length() -> None:
    """95% nominal over 30 answers; 600 draws have a standard error of 0.9 points."""
    rng = np.random.default_rng(5)
    inside = 0
    for draw in range(600):
        lengths = rng.integers(5, 60, 30)
        clusters = np.repeat(np.arange(30), lengths)
        level = np.repeat(0.02 + 0.05 * rng.normal(size=30), lengths)  # per answer
        change = level + 0.3 * rng.normal(size=len(clusters))
        p = np.full((len(clusters), 4), math.log(0.25))
        q = np.log(np.full((len(clusters), 4), 0.25))
        q[:, 0] -= change  # the right token is id 0
        rows = compare_rows(p, q, np.zeros(len(clusters), dtype=np.int64))
        rows.nll_test[:] = rows.nll_ref + change  # the change itself, before normalisation
        signed = present(signed_loss(rows, clusters, draw))
        assert signed.interval is not None
        inside += signed.interval[0] <= 0.02 <= signed.interval[1]
    assert 0.92 <= inside / 600 <= 0.98
