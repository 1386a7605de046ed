"""Perplexity: its windows, its figures on captures made by hand, whole runs, and Transformers on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import yaml
from numpy.typing import NDArray

from fidelab.axes.base import AxisInputs, AxisScore
from fidelab.axes.perplexity import Perplexity
from fidelab.captures.pair import Pair
from fidelab.captures.requests import Prefill
from fidelab.core.errors import InputError
from fidelab.engines.hf.adapter import HFEngine
from fidelab.inputs.texts import Text, load_text
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import Model, resolve
from fidelab.results.measurement import Measurement
from tests.axes.captures import make_arm, make_capture
from tests.engines import tiny
from tests.run.harness import Done, refused, run_fake

V = 8
Rows = NDArray[np.float64]


def _inputs(content: str, limit: int | None = None, bos: int | None = None) -> AxisInputs:
    fake = replace(Tokenizer.load(resolve("fake")), bos_id=bos)
    return AxisInputs(fake, Text("t", content, (), ""), (), limit)


def _probes(content: str, limit: int | None = None, bos: int | None = None, **settings: Any) -> dict[str, Prefill]:
    found = Perplexity(Perplexity.Settings(**settings)).requests(_inputs(content, limit, bos))
    return {part: request for part, request in found.items() if isinstance(request, Prefill)}


def _scored(request: Prefill, step: int) -> list[int]:
    """Index in the text of every predicted token, window by window."""
    rows = range(request.first, request.last + 1)
    return [w * step + row + 1 for w in range(len(request.windows)) for row in rows]


def test_chunked_scores_the_last_half_of_each_window() -> None:
    [(part, request)] = _probes("x" * 64, contexts=[16]).items()
    assert (part, request.axis) == ("16", "perplexity.16")
    assert (request.first, request.last, len(request.windows)) == (8, 14, 4)


def test_strided_scores_each_token_once_with_enough_context() -> None:
    [request] = _probes("abcdefghij" * 6, contexts=[16], mode="strided", stride=4).values()
    assert _scored(request, 4) == list(range(12, 60))
    assert request.first + 1 >= 16 - 4
    assert [len(units) for units in request.units] == [4] * len(request.windows)


def test_strided_rows_belong_to_the_document_of_the_token_they_predict() -> None:
    text = Text("t", "A" * 14 + "B" * 10, (0, 14), "")
    axis = Perplexity(Perplexity.Settings.model_validate({"contexts": [16], "mode": "strided", "stride": 4}))
    [request] = axis.requests(replace(_inputs(""), text=text)).values()
    assert isinstance(request, Prefill)
    assert request.units == ((1, 1, 2, 2), (2,) * 4, (2,) * 4)


def test_windows_start_with_bos_where_the_tokenizer_adds_one() -> None:
    for mode in ("chunked", "strided"):
        [request] = _probes("x" * 64, bos=1, contexts=[16], mode=mode).values()
        assert {window[0] for window in request.windows} == {1}
        assert dict(request.settings)["bos"] == 1


def test_default_contexts_are_those_that_fit_and_windows_score_about_8192_rows_of_the_same_text() -> None:
    assert list(_probes("x" * 4096)) == ["512", "2048"]
    assert list(_probes("x" * 2047)) == list(_probes("x" * 4096, limit=1024)) == ["512"]
    requests = _probes("x" * 40_000)
    assert {part: len(request.windows) for part, request in requests.items()} == {"512": 32, "2048": 8}
    assert {len(p.windows) * len(p.windows[0]) for p in requests.values()} == {16_384}
    strided = _probes("x" * 40_000, mode="strided", contexts=[512])
    assert [len(p.windows) * p.n_rows for p in strided.values()] == [8192]


@pytest.mark.parametrize(
    ("settings", "limit", "says"),
    [
        ({"contexts": [128]}, None, r"context 128 needs 128 tokens \(windows: 1\), but text t has 100"),
        ({"contexts": [16], "windows": 7}, None, r"context 16 needs 112 tokens \(windows: 7\), but text t has 100"),
        ({"contexts": [16, 64]}, 32, "context 64 is beyond the model's limit of 32 positions"),
        ({}, None, r"no room for a context of 512 \(text t has 100 tokens\)"),
    ],
)
def test_what_does_not_fit_is_said_with_its_setting(settings: dict[str, Any], limit: int | None, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        _probes("x" * 100, limit, **settings)
    assert "axes.perplexity." in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("{stride: 4}", "stride is for mode strided"),
        ("{mode: strided, contexts: [16, 32], stride: 16}", "stride 16 must be shorter than every context"),
        ("{mode: strided, place: spread}", "strided windows start at the text's beginning: omit place"),
        ("{contexts: []}", "contexts"),
        ("{contexts: [4]}", "contexts"),
        ("{mode: strode}", "'chunked' or 'strided'"),
    ],
)
def test_settings_that_cannot_be_exit_2_in_one_line(lines: str, says: str, tmp_path: Path) -> None:
    assert says in refused(run_fake(tmp_path, {"perplexity": yaml.safe_load(lines)}, ["exact"]))


def _probe(n_ctx: int, n_windows: int = 6) -> Prefill:
    windows = tuple(tuple((3 * w + i * i) % V for i in range(n_ctx)) for w in range(n_windows))
    first, last = n_ctx // 2, n_ctx - 2
    clusters = tuple((w,) * (last - first + 1) for w in range(n_windows))
    return Prefill(f"perplexity.{n_ctx}", windows, first, last, clusters, (("mode", "chunked"), ("n_ctx", n_ctx)))


def _score(tmp_path: Path, sides: Mapping[int, tuple[Sequence[Rows], Sequence[Rows]]], head: Rows | None = None) -> Any:
    """The axis' score of log scores (or states, with a head) per context: reference and candidate, by window."""
    weights = None if head is None else {"weight": head.astype(np.float32)}
    kind = "logprobs" if head is None else "hidden"
    pairs = {}
    for n_ctx, (ref, test) in sides.items():
        request = _probe(n_ctx, len(ref))
        made = []
        for name, rows in (("f32", ref), ("int4", test)):
            stored = [{kind: x.astype(np.float32)} for x in rows]
            made.append(make_capture(tmp_path / f"{name}-{n_ctx}", request, stored, make_arm(name), head=weights))
        pairs[str(n_ctx)] = Pair.match(*made)
    return Perplexity(Perplexity.Settings()).score_parts(pairs, 0)


def _rows(seed: int, n_ctx: int, n_windows: int = 6, width: int = V) -> list[Rows]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n_ctx - 1 - n_ctx // 2, width)) for _ in range(n_windows)]


def _nll(rows: Sequence[Rows], n_ctx: int) -> Rows:
    """−log softmax of the token after each row, by brute force."""
    found = []
    for window, scores in zip(_probe(n_ctx, len(rows)).windows, rows, strict=True):
        for step, row in enumerate(scores):
            p = np.exp(row) / np.exp(row).sum()
            found.append(-math.log(p[window[n_ctx // 2 + step + 1]]))
    return np.array(found)


def _value(score: AxisScore, name: str, n_ctx: int) -> float | None:
    return score.found.value(name, {"context": n_ctx})


def test_perplexities_and_their_log_ratio_by_brute_force(tmp_path: Path) -> None:
    sides = {n: (_rows(n, n), _rows(n + 1, n)) for n in (16, 32)}
    score = _score(tmp_path, sides)
    for n, (ref, test) in sides.items():
        assert _value(score, "reference_ppl", n) == pytest.approx(math.exp(_nll(ref, n).mean()), rel=1e-6)
        assert _value(score, "ppl", n) == pytest.approx(math.exp(_nll(test, n).mean()), rel=1e-6)
        gap = _nll(test, n) - _nll(ref, n)
        assert _value(score, "ln_ratio", n) == pytest.approx(gap.mean(), abs=1e-6)
        assert _value(score, "ppl_change", n) == pytest.approx(math.expm1(gap.mean()), abs=1e-6)
        error = np.std(gap.reshape(6, -1).mean(axis=1), ddof=1) / math.sqrt(6)
        assert _value(score, "stderr", n) == pytest.approx(error, rel=1e-5)


def test_a_broken_row_is_counted_and_left_out_on_both_sides(tmp_path: Path) -> None:
    ref, test = _rows(1, 16), _rows(2, 16)
    gap = _nll(test, 16) - _nll(ref, 16)
    test[2][3, 0] = np.nan
    score = _score(tmp_path, {16: (ref, test)})
    assert (score.measurement().n_items, score.measurement().n_failed) == (42, 1)
    assert score.mean() == pytest.approx(np.delete(gap, 2 * 7 + 3).mean(), abs=1e-6)
    assert not score.identical


def test_one_other_row_is_not_identical_and_a_wider_candidate_is_cut_to_the_common_ids(tmp_path: Path) -> None:
    short, long, test = _rows(1, 16), _rows(2, 32), _rows(2, 16)
    moved = [row.copy() for row in short]
    moved[5][6, 0] += 1e-3
    assert not _score(tmp_path, {16: (short, moved), 32: (long, long)}).identical
    padded = [np.concatenate([x, np.full((7, 3), 9.0)], axis=1) for x in test]
    means = [_score(tmp_path / name, {16: (short, x)}).mean() for name, x in (("padded", padded), ("test", test))]
    assert means[0] == means[1]


def test_the_curve_shows_the_cost_by_position(tmp_path: Path) -> None:
    ref = [np.zeros((7, V)) for _ in range(6)]
    test = [np.zeros((7, V)) for _ in range(6)]
    for window, rows in zip(_probe(16).windows, test, strict=True):
        rows[6, window[15]] -= 2.0  # position 14 alone becomes worse
    [curve] = _score(tmp_path, {16: (ref, test)}).found.plots
    worse = math.log(V - 1 + math.exp(-2)) + 2 - math.log(V)
    assert curve.key == "perplexity.16"
    assert (min(curve.x) > 8, max(curve.x) < 15) == (True, True)
    assert [value for value in curve.y if value] == [pytest.approx(worse, abs=1e-6)]
    assert next(x for x, y in zip(curve.x, curve.y, strict=True) if y) == pytest.approx(14, abs=0.2)


def test_a_record_can_be_made_of_every_figure(tmp_path: Path) -> None:
    garbage = [np.where(np.arange(V) == 0, 1e5, -1e5) * np.ones((7, V)) for _ in range(6)]  # no finite perplexity
    score = _score(tmp_path, {16: (_rows(1, 16), garbage)})
    axis = score.measurement()
    assert axis.value("ppl") is None
    assert axis.value("ln_ratio") == pytest.approx(score.mean())


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Two contexts on the two-level family, whose reference gives every ASCII byte 1/256."""
    axes = {"perplexity": {"contexts": [16, 64], "windows": 8}, "kld": {"windows": 8, "n_ctx": 16}}
    candidates = ["tilt[q=0.6]", "tilt[q=0.7]", "nan-row[item=1,row=2]", "exact", "masked"]
    return run_fake(tmp_path_factory.mktemp("family"), axes, candidates)


def _axis(done: Done, name: str) -> Measurement:
    return done.axis(name, "perplexity")


def test_a_run_reports_the_closed_forms_at_every_context(family: Done) -> None:
    axis = _axis(family, "tilt[q=0.6]")
    for n in (16, 64):
        assert axis.value("reference_ppl", {"context": n}) == pytest.approx(256, rel=1e-6)
        assert axis.value("ppl", {"context": n}) == pytest.approx(128 / 0.6, rel=1e-6)
        assert axis.value("ln_ratio", {"context": n}) == pytest.approx(math.log(0.5 / 0.6), abs=1e-6)


def test_the_same_format_is_identical_and_a_token_that_never_comes_costs_next_to_nothing(family: Done) -> None:
    same, masked = _axis(family, "exact"), _axis(family, "masked")
    assert same.status == "identical"
    assert same.value("ln_ratio", {"context": 64}) == 0.0
    # the last byte of 256 has no probability: KLD fails, perplexity does not
    assert masked.n_failed == 0
    assert masked.value("ln_ratio", {"context": 16}) == pytest.approx(math.log(255 / 256), abs=1e-6)


def test_a_better_perplexity_beside_a_large_divergence_costs_a_band(family: Done) -> None:
    verdict = family.arm("tilt[q=0.7]")["verdict"]  # 0.087 nats: DEGRADED by itself
    assert verdict["band"] == "FAIL"
    assert any("perplexity seems to improve (−28.6%)" in fact for fact in verdict["because"])


@pytest.fixture
def engine(smollm2: Model) -> Iterator[HFEngine]:
    """The embedded model, opened in this process; torch is afterwards as it was."""
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    yield tiny.opened(smollm2.path)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)


@pytest.mark.full
@pytest.mark.model
def test_perplexity_is_that_of_transformers_on_the_same_windows(
    smollm2: Model, engine: HFEngine, tmp_path: Path
) -> None:
    inputs = AxisInputs(Tokenizer.load(smollm2), load_text("default"), (), smollm2.max_positions)
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32)
    for mode, n_rows in (("chunked", 63), ("strided", 32)):
        axis = Perplexity(Perplexity.Settings.model_validate({"contexts": [128], "windows": 2, "mode": mode}))
        [request] = axis.requests(inputs).values()
        assert isinstance(request, Prefill)
        sink = tiny.Answers()
        answer = engine.answer(request, sink)
        capture = make_capture(
            tmp_path / mode / "f32", request, list(sink.items.values()), make_arm("f32"), head=answer.head
        )
        score = axis.score_parts({"128": Pair.match(capture, capture)}, 0)
        costs = []
        for window in request.windows:
            with torch.no_grad():
                rows = torch.log_softmax(plain(torch.tensor([window])).logits[0].double(), dim=-1)
            costs += [-float(rows[i, window[i + 1]]) for i in range(request.first, request.last + 1)]
        assert len(costs) == 2 * n_rows
        assert _value(score, "ppl", 128) == pytest.approx(math.exp(np.mean(costs)), rel=1e-5)
