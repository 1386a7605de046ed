"""Forced decode KLD: on captures made by hand, on the fake engine, and on the embedded model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fidelab.axes.base import AxisInputs, AxisScore
from fidelab.axes.forced import ForcedDecode, greedy_probe
from fidelab.captures.pair import Pair
from fidelab.captures.requests import Forced, Generate
from fidelab.core.errors import InputError
from fidelab.inputs.prompts import Prompt
from fidelab.inputs.texts import Text
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import Model, resolve
from fidelab.results.measurement import Measurement
from fidelab.results.plots import Curve
from fidelab.run.api import compare
from tests.axes.captures import make_arm, make_capture
from tests.run.harness import Done, cli, run_fake, write_inputs

V = 8
GROWTH = "KL growth in 1,000 tokens"
Rows = NDArray[np.float64]
AXIS = ForcedDecode(ForcedDecode.Settings())


def _forced(*lengths: int) -> Forced:
    prompts = tuple((1, 2, i) for i in range(len(lengths)))
    texts = tuple(tuple((i + step) % V for step in range(n)) for i, n in enumerate(lengths))
    return Forced("forced.kl", prompts, texts, (("n_predict", max(lengths)), ("template", "raw")))


def _rows(seed: int, n: int) -> Rows:
    return np.random.default_rng(seed).normal(size=(n, V))


def _stored(rows: Sequence[Rows]) -> list[dict[str, Any]]:
    return [{"logprobs": x.astype(np.float32)} for x in rows]


def _kl(p: Rows, q: Rows) -> Rows:
    log_p, log_q = (np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True))) for x in (p, q))
    return np.asarray((np.exp(log_p) * (log_p - log_q)).sum(-1))


def _score(store: Path, request: Forced, ref: Sequence[Rows], test: Sequence[Rows]) -> AxisScore:
    sides = {"f32": _stored(ref), "int4": _stored(test)}
    p, q = (make_capture(store / name, request, rows, make_arm(name)) for name, rows in sides.items())
    return AXIS.score_parts({"kl": Pair.match(p, q)}, 0)


def _values(score: AxisScore) -> dict[str, Any]:
    return {metric.name: metric for metric in score.found.metrics}


def test_mean_kl_is_over_all_generated_positions(tmp_path: Path) -> None:
    ref, test = [_rows(0, 5), _rows(1, 3)], [_rows(2, 5), _rows(3, 3)]
    score = _score(tmp_path, _forced(5, 3), ref, test)
    expected = _kl(np.concatenate(ref), np.concatenate(test))
    found = _values(score)
    assert found["mean KL"].value == pytest.approx(expected.mean(), abs=1e-6)
    assert found["median KL"].value == pytest.approx(np.median(expected), abs=1e-6)
    assert found["largest KL"].value == pytest.approx(expected.max(), abs=1e-6)
    assert score.found.value("score") == pytest.approx(100 * math.exp(-expected.mean()), abs=1e-4)
    agree = np.concatenate(ref).argmax(-1) == np.concatenate(test).argmax(-1)
    assert found["same top token"].value == pytest.approx(agree.mean())


def test_the_prompt_is_what_the_interval_resamples(tmp_path: Path) -> None:
    ref, test = [_rows(i, 4) for i in range(3)], [_rows(9 + i, 4) for i in range(3)]
    score = _score(tmp_path, _forced(4, 4, 4), ref, test)
    assert score.clusters.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert _score(tmp_path / "one", _forced(4), ref[:1], test[:1]).found.ci("score") is None


def test_the_curve_shows_the_kl_of_each_generated_token(tmp_path: Path) -> None:
    ref, test = [_rows(0, 4), _rows(1, 4)], [_rows(2, 4), _rows(3, 4)]
    [curve] = _score(tmp_path, _forced(4, 4), ref, test).found.plots
    assert isinstance(curve, Curve)
    assert curve.x == (0.0, 1.0, 2.0, 3.0)
    assert curve.y == pytest.approx(np.mean([_kl(ref[i], test[i]) for i in range(2)], axis=0), abs=1e-6)


def test_a_side_that_lacks_rows_fails_all_of_the_prompt_and_a_nan_row_is_left_out(tmp_path: Path) -> None:
    score = _score(tmp_path / "a", _forced(4, 3), [_rows(0, 4), _rows(1, 3)], [_rows(2, 2), _rows(3, 3)])
    assert score.usable.tolist() == [False] * 4 + [True] * 3
    ref, broken = _rows(0, 4), _rows(0, 4)
    broken[2, 1] = np.nan
    score = _score(tmp_path / "b", _forced(4), [ref], [broken])
    assert (score.measurement().n_failed, score.usable.tolist()) == (1, [True, True, False, True])


def test_a_kl_that_jumps_for_good_is_told_with_its_token(tmp_path: Path) -> None:
    ref, test = _rows(0, 80), _rows(0, 80)
    test[50:] = _rows(1, 30)
    found = _values(_score(tmp_path, _forced(80), [ref], [test]))
    assert (found["prompts where KL rises for good"].value, found["rises at token"].value) == (1, 50)


def test_growth_is_the_least_squares_slope_and_the_reach_where_its_line_meets_the_limit(tmp_path: Path) -> None:
    ref = [_rows(i, n) for i, n in enumerate((40, 25, 40))]
    test = [x + 0.002 * np.arange(len(x))[:, None] * _rows(9 + i, len(x)) for i, x in enumerate(ref)]
    found = _values(_score(tmp_path, _forced(40, 25, 40), ref, test))
    kl = np.concatenate([_kl(p, q) for p, q in zip(ref, test, strict=True)])
    slope, start = np.polyfit(np.concatenate([np.arange(len(x)) for x in ref]), kl, 1)
    assert found[GROWTH].value == pytest.approx(1000 * slope, rel=1e-3)
    assert found["tokens until 0.01 nats"].value == pytest.approx((0.01 - start) / slope, rel=1e-3)
    low, high = found[GROWTH].ci
    assert low < 1000 * slope < high


def test_a_kl_that_does_not_grow_never_reaches_the_limit_and_one_beyond_it_has_at_once(tmp_path: Path) -> None:
    rows = [_rows(0, 8), _rows(1, 8)]
    same = _values(_score(tmp_path / "same", _forced(8, 8), rows, rows))
    assert (same[GROWTH].value, same["tokens until 0.01 nats"].value) == (0.0, None)
    far = _values(_score(tmp_path / "far", _forced(8, 8), rows, [_rows(2, 8), _rows(3, 8)]))
    assert far["tokens until 0.01 nats"].value == 0.0
    one = _values(_score(tmp_path / "one", _forced(1), [_rows(0, 1)], [_rows(1, 1)]))
    assert (one[GROWTH].value, one["tokens until 0.01 nats"].value) == (None, None)


def _inputs(*prompts: str, max_positions: int | None = None) -> AxisInputs:
    asked = tuple(Prompt(str(i), "user", ({"role": "user", "content": text},)) for i, text in enumerate(prompts))
    tokenizer = Tokenizer.load(resolve("fake"))
    return AxisInputs(tokenizer, Text("t", "", (), ""), asked, max_positions)


def test_what_the_reference_wrote_is_forced_and_a_failed_prompt_has_nothing(tmp_path: Path) -> None:
    [(part, request)] = AXIS.requests(_inputs("ab", "c", "d")).items()
    assert isinstance(request, Generate)
    assert (part, request.rows) == ("path", False)
    failed = {1: "empty output", 2: "NaN logits at generated token 1"}
    path = make_capture(tmp_path / "f32", request, [[5, 6, 0], [], [7]], make_arm("f32"), failed=failed)
    [(part, forced)] = AXIS.follow_up(_inputs(), {"path": path}).items()
    assert isinstance(forced, Forced)
    assert (part, forced.axis, forced.prompts) == ("kl", "forced.kl", request.prompts)
    assert forced.continuations == ((5, 6, 0), (), ())


def test_a_prompt_too_long_for_the_model_names_the_setting() -> None:
    asked = ForcedDecode.Settings.model_validate({"n_predict": 8, "limit": None, "template": "raw"})
    with pytest.raises(InputError, match=r"prompt '1' has 9 tokens; with axes\.forced\.n_predict=8 .* 16 positions"):
        greedy_probe(_inputs("short", "too long!", max_positions=16), "forced.path", asked)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Eight prompts × 12 tokens: a tilt, a fork of the text, and the reference once more."""
    candidates = ["tilt[q=0.8]", "fork[at=3]", "exact"]
    done = run_fake(tmp_path_factory.mktemp("forced"), {"forced": {"n_predict": 12}}, candidates, floor=0.25)
    assert done.code == 0, done.err
    return done


def _axis(run: Done, arm: str) -> Measurement:
    return run.axis(arm, "forced")


def test_a_tilt_costs_what_its_closed_form_says(run: Done) -> None:
    expected = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    axis = _axis(run, "tilt[q=0.8]")
    assert axis.value("mean_kl") == pytest.approx(expected, rel=1e-6)
    assert axis.value("score") == pytest.approx(100 * math.exp(-expected), rel=1e-6)
    assert (axis.n_items, axis.n_failed) == (8 * 12, 0)


def test_the_reference_as_candidate_is_identical_and_the_floor_a_quarter_of_the_prompts(run: Done) -> None:
    assert _axis(run, "exact").status == "identical"
    floor = run.floor("forced")
    assert (floor.n_items, floor.value("score")) == (2 * 12, 100.0)


def test_only_the_reference_writes_the_text(run: Done) -> None:
    folders = sorted(path.parent for path in (run.cwd / "runs" / "captures").rglob("manifest.json"))
    writers = {folder.parent.name for folder in folders if folder.name.startswith("forced.path-")}
    assert len([folder for folder in folders if folder.name.startswith("forced.kl-")]) == 5
    assert [name.rsplit("-", 1)[0] for name in writers] == ["fake-fake-exact"]


@pytest.mark.long
@pytest.mark.model
def test_coarser_caches_cost_more_on_the_references_own_text(smollm2: Model, tmp_path: Path) -> None:
    axes = {"forced": {"limit": 2, "n_predict": 16}}
    arms: dict[str, Any] = {"reference": "f32", "control": "none", "candidates": ["k16v8", "int4"], "floor": 0.0}
    report = compare("smollm2-135m", **arms, axes=axes, dtype="float32", output_dir=str(tmp_path))
    means = [arm.axes["forced"].value("mean_kl") or 0.0 for arm in report.candidates]
    assert 0.0 < means[0] < 0.02
    assert means[1] > 5 * means[0]


def test_prompts_of_other_lengths_do_not_lend_the_growth_their_mean(tmp_path: Path) -> None:
    lengths = (60, 60, *(8,) * 9)
    ref = [np.zeros((n, V)) for n in lengths]
    tilted = np.zeros(V)
    tilted[0] = 0.3  # the same KL everywhere
    found = _values(_score(tmp_path, _forced(*lengths), ref, [x + tilted for x in ref]))
    low, high = found[GROWTH].ci
    assert found["mean KL"].value > 1e-3
    assert -1e-3 < low <= high < 1e-3


def test_an_engine_that_cannot_draw_tokens_says_so_in_one_line(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    words = ("--engine", "fake", "--reference", "exact", "--kv", "tilt[q=0.7]", "--axes", "forced")
    done = cli("compare", "fake", *words, "--set", "axes.forced.temperature=1", cwd=tmp_path)
    assert "engine fake cannot draw tokens from a seed here: leave out temperature" in done.err


def test_the_path_of_sampled_text_says_how_it_was_drawn() -> None:
    axis = ForcedDecode(ForcedDecode.Settings.model_validate({"temperature": 0.7, "top_p": 0.9, "seed": 3}))
    [path] = axis.requests(_inputs("a prompt")).values()
    assert isinstance(path, Generate)
    assert path.sampling is not None
    assert (path.sampling.temperature, path.sampling.top_p, path.sampling.seed) == (0.7, 0.9, 3)
    [greedy] = AXIS.requests(_inputs("a prompt")).values()
    assert isinstance(greedy, Generate)
    assert greedy.sampling is None
    assert dict(greedy.settings).keys() == {"n_predict", "template"}  # captures of former versions are still found
