"""Axes on captures made by hand: every figure against its definition."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from fidelab.axes.base import AxisInputs, AxisScore
from fidelab.axes.kld import KLD
from fidelab.axes.trajectory import Trajectory
from fidelab.captures.pair import Pair
from fidelab.captures.reader import Capture
from fidelab.captures.requests import Generate, Prefill, Request
from fidelab.core.errors import InputError, UsageError
from fidelab.inputs.texts import Text
from fidelab.inputs.tokens import Tokenizer
from fidelab.models import resolve
from tests.axes.captures import make_arm, make_capture
from tests.present import present

V = 8
Rows = NDArray[np.float64]


def _capture(store: Path, name: str, request: Request, answers: Sequence[dict[str, Any]]) -> Capture:
    return make_capture(store / name, request, answers, make_arm(name))


def _prefill(n_windows: int, rows: int = 3) -> Prefill:
    windows = tuple(tuple((w + i) % V for i in range(rows + 2)) for w in range(n_windows))
    return Prefill("kld", windows, 1, rows, tuple((w,) * rows for w in range(n_windows)))


def _rows(seed: int, n: int) -> Rows:
    return np.random.default_rng(seed).normal(size=(n, V))


def _log_softmax(x: Rows) -> Rows:
    return np.asarray(x - np.log(np.exp(x).sum(-1, keepdims=True)))


def test_rows_are_scored_against_the_token_that_follows_them(tmp_path: Path) -> None:
    request = _prefill(1)
    ref, test = _rows(0, 3), _rows(1, 3)
    p = _capture(tmp_path, "f32", request, [{"logprobs": ref.astype(np.float32)}])
    q = _capture(tmp_path, "int4", request, [{"logprobs": test.astype(np.float32)}])
    score = KLD(KLD.Settings()).score(Pair.match(p, q), 0)
    targets = np.array(request.windows[0][2:5])
    dp = np.exp(_log_softmax(test))[np.arange(3), targets] - np.exp(_log_softmax(ref))[np.arange(3), targets]
    assert score.found.value("rms_dp") == pytest.approx(np.sqrt((dp**2).mean()), abs=1e-6)


def test_one_unit_gives_no_interval(tmp_path: Path) -> None:
    request = _prefill(1)
    p = _capture(tmp_path, "f32", request, [{"logprobs": _rows(0, 3).astype(np.float32)}])
    q = _capture(tmp_path, "int4", request, [{"logprobs": _rows(1, 3).astype(np.float32)}])
    assert KLD(KLD.Settings()).score(Pair.match(p, q), 0).found.ci("mean") is None


def test_a_metric_without_an_interval_is_marked_as_proving_no_change(tmp_path: Path) -> None:
    request = _prefill(3)
    p = _capture(tmp_path, "f32", request, [{"logprobs": _rows(w, 3).astype(np.float32)} for w in range(3)])
    q = _capture(tmp_path, "int4", request, [{"logprobs": _rows(9 + w, 3).astype(np.float32)} for w in range(3)])
    found = KLD(KLD.Settings()).score(Pair.match(p, q), 0).measurement()
    caveats = {metric.name: metric.caveat for metric in found.metrics}
    assert (caveats["mean"], caveats["same top token"], caveats["median"]) == ("", "", "no interval")


def _two_levels(kl: float) -> Rows:
    """A row whose KL from the uniform one is ``kl``: half of the tokens have q / (V / 2) each."""
    q = 0.5 + math.sqrt(1 - math.exp(-2 * kl)) / 2  # kl = -ln(4 q (1 - q)) / 2
    rows: Rows = np.log(np.repeat([2 * q / V, 2 * (1 - q) / V], V // 2))
    return rows


def _at_contexts(tmp_path: Path, kls: dict[int, list[float]], clusters: Sequence[int] | None = None) -> AxisScore:
    """KLD of an arm that costs so much in each window, by context; every window is a document, or ``clusters`` say."""
    pairs = {}
    for n_ctx, costs in kls.items():
        first, last = n_ctx // 2, n_ctx - 2
        owners = clusters or range(len(costs))
        request = Prefill(
            f"kld.{n_ctx}",
            tuple(tuple((w + i) % V for i in range(n_ctx)) for w in range(len(costs))),
            first,
            last,
            tuple((owner,) * (last - first + 1) for owner in owners),
            (("n_ctx", n_ctx), ("unit", "document")),
        )
        rows = last - first + 1
        answers = [np.tile(_two_levels(kl) if kl >= 0 else np.full(V, np.nan), (rows, 1)) for kl in costs]
        sides = (("f32", [np.zeros((rows, V))] * len(costs)), ("int4", answers))
        ref, test = (
            _capture(tmp_path / str(n_ctx), name, request, [{"logprobs": x.astype(np.float32)} for x in side])
            for name, side in sides
        )
        pairs[str(n_ctx)] = Pair.match(ref, test)
    return KLD(KLD.Settings()).score_parts(pairs, 0)


def test_an_arms_figures_are_those_of_the_context_with_the_largest_upper_end(tmp_path: Path) -> None:
    spread = [0.0, 0.06, 0.0, 0.06, 0.0, 0.06, 0.0, 0.06]  # mean 0.03, less than the other's, but a wide interval
    score = _at_contexts(tmp_path, {8: [0.032] * 8, 16: spread})
    short, long = (score.found.metric("mean", {"context": n_ctx}) for n_ctx in (8, 16))
    assert long is not None
    assert present(short).value == pytest.approx(0.032, abs=1e-6)
    assert long.value == pytest.approx(0.03, abs=1e-6)
    assert (long.interval or (0, 0))[1] > (present(short).interval or (0, 0))[1]
    assert (score.found.facts["n_ctx"], score.found.value("mean", {}), score.found.ci("mean", {})) == (
        16,
        long.value,
        long.interval,
    )
    assert score.mean() == long.value
    assert score.mean_interval(0) == long.interval


def test_without_an_interval_the_mean_tells_the_worst_context(tmp_path: Path) -> None:
    score = _at_contexts(tmp_path, {8: [0.02], 16: [0.03], 32: [0.01]})
    assert (score.found.facts["n_ctx"], score.found.ci("mean")) == (16, None)


def test_a_context_in_which_positions_failed_is_worse_than_a_dear_one(tmp_path: Path) -> None:
    score = _at_contexts(tmp_path, {8: [0.04] * 8, 16: [0.001] * 7 + [-1.0]})
    assert (score.found.facts["n_ctx"], score.measurement().n_failed) == (16, 7)


def test_every_context_counts_its_positions_documents_and_windows(tmp_path: Path) -> None:
    score = _at_contexts(tmp_path, {8: [0.01] * 5, 16: [0.02] * 5}, clusters=[1, 1, 2, 3, 3])
    named = ("n_ctx", "n_positions", "n_documents", "windows")
    facts = score.measurement().facts
    assert [tuple(one[name] for name in named) for one in facts["contexts"]] == [(8, 15, 3, 5), (16, 35, 3, 5)]
    assert (facts["n_ctx"], facts["n_documents"]) == (16, 3)


def test_blocks_of_windows_are_not_counted_as_documents(tmp_path: Path) -> None:
    request = replace(_prefill(3), settings=(("unit", "block"),))
    rows = [{"logprobs": _rows(w, 3).astype(np.float32)} for w in range(3)]
    score = KLD(KLD.Settings()).score(
        Pair.match(_capture(tmp_path, "f32", request, rows), _capture(tmp_path, "int4", request, rows)), 0
    )
    assert (score.found.facts["n_documents"], score.found.facts["n_clusters"]) == (None, 3)


def test_only_equal_answers_at_every_context_are_identical(tmp_path: Path) -> None:
    assert _at_contexts(tmp_path / "a", {8: [0.0] * 3, 16: [0.0] * 3}).identical
    assert not _at_contexts(tmp_path / "b", {8: [0.01] * 3, 16: [0.0] * 3}).identical


def test_the_excess_pairs_both_arms_at_the_context_where_this_one_is_worst(tmp_path: Path) -> None:
    candidate = _at_contexts(tmp_path / "a", {8: [0.01] * 8, 16: [0.05] * 8})
    control = _at_contexts(tmp_path / "b", {8: [0.02] * 8, 16: [0.015] * 8})  # its own worst is the other context
    assert control.found.facts["n_ctx"] == 8
    excess = present(candidate.excess_over(control, 0))
    assert excess.estimate == pytest.approx(0.05 - 0.015, abs=1e-6)
    turned = present(control.excess_over(candidate, 0))
    assert turned.estimate == pytest.approx(0.02 - 0.01, abs=1e-6)


def test_an_arm_without_that_context_has_no_excess(tmp_path: Path) -> None:
    both = _at_contexts(tmp_path / "a", {8: [0.01] * 8, 16: [0.05] * 8})
    assert both.excess_over(_at_contexts(tmp_path / "b", {8: [0.01] * 8}), 0) is None


def test_positions_of_all_contexts_are_kept_and_told_apart(tmp_path: Path) -> None:
    columns = _at_contexts(tmp_path, {16: [0.05] * 2, 8: [0.01] * 2}).positions
    assert {name: len(values) for name, values in columns.items()} == dict.fromkeys(columns, 2 * 3 + 2 * 7)
    for n_ctx, kl in ((8, 0.01), (16, 0.05)):
        here = columns["n_ctx"] == n_ctx
        assert columns["kl"][here] == pytest.approx(np.full(here.sum(), kl), abs=1e-6)
        assert set(columns["position"][here]) == set(range(n_ctx // 2, n_ctx - 1))


def _kld_probes(content: str, limit: int | None = None, **settings: Any) -> dict[str, Prefill]:
    inputs = AxisInputs(Tokenizer.load(resolve("fake")), Text("t", content, (), ""), (), limit)
    found = KLD(KLD.Settings.model_validate(settings)).requests(inputs)
    return {part: request for part, request in found.items() if isinstance(request, Prefill)}


def test_the_default_contexts_score_about_as_many_positions_each() -> None:
    windows, rows = Counter[str](), Counter[str]()
    for part, request in _kld_probes("x" * 40_000).items():  # a further part holds the windows of a further look
        context, _, look = part.partition("+")
        assert request.axis == f"kld.{context}" + (f"+{look}" if look else "")
        windows[context] += len(request.windows)
        rows[context] += len(request.windows) * request.n_rows
    assert windows == {"512": 32, "2048": 8}
    assert max(rows.values()) < 1.01 * min(rows.values())


def test_a_longer_context_keeps_six_windows_but_no_more_than_the_shortest_has() -> None:
    for windows, longer in ((1, 1), (4, 4), (6, 6), (8, 6), (24, 6), (40, 10)):
        found = {part: len(request.windows) for part, request in _kld_probes("x" * 60_000, windows=windows).items()}
        assert found == {"512": windows, "2048": longer}


def test_the_default_leaves_out_a_context_that_model_or_text_have_no_room_for() -> None:
    for n, limit, fits in ((6 * 2048, 2048, True), (6 * 2048 - 1, 2048, False), (6 * 2048, 2047, False)):
        assert list(_kld_probes("x" * n, limit, windows=8)) == (["512", "2048"] if fits else [""])


def test_a_context_that_was_asked_for_is_not_left_out() -> None:
    fake, axis = Tokenizer.load(resolve("fake")), KLD(KLD.Settings.model_validate({"n_ctx": "512,2048"}))
    short = replace(fake, model=replace(fake.model, max_positions=1024))
    with pytest.raises(UsageError, match="n_ctx 2048 is beyond the limit of fake"):
        axis.requests(AxisInputs(short, Text("t", "x" * 60_000, (), ""), (), 1024))
    with pytest.raises(InputError, match="6 windows of n_ctx 2048 need 12288"):
        _kld_probes("x" * 10_000, n_ctx="512,2048", windows=8)


@pytest.mark.parametrize("asked", [512, "512", [512], "512,512"])
def test_a_single_context_is_the_axis_itself(asked: object) -> None:
    assert KLD.Settings.model_validate({"n_ctx": asked}).model_dump()["n_ctx"] == 512
    found = _kld_probes("x" * 20_000, n_ctx=asked)
    assert {part: request.axis for part, request in found.items()} == {"": "kld", "+1": "kld.+1", "+2": "kld.+2"}


@pytest.mark.parametrize("asked", ["many", "", "512,", 4, "4,512", 16.5, [], True])
def test_a_context_that_is_not_a_number_of_tokens_is_refused(asked: object) -> None:
    with pytest.raises(ValidationError, match="write tokens per window, at least 8, or several: 512,2048"):
        KLD.Settings.model_validate({"n_ctx": asked})


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
    request = _generate(len(ref), max(map(len, ref + test)))
    request = replace(request, settings=(*request.settings, *settings.items()))
    p = _capture(tmp_path, "f32", request, _answers(ref, margin))
    q = _capture(tmp_path, "int4", request, _answers(test))
    return Trajectory(Trajectory.Settings()).score(Pair.match(p, q), 0)


def test_in_compat_mode_the_score_is_the_sources(tmp_path: Path) -> None:
    score = _score(tmp_path, [[*range(1, 8), 1, 2, 3]], [[1, 2, 3, 4, 5, 7, 7, 7]], compat="refract")
    assert score.found.value("score") == 62.5


def test_two_empty_answers_are_a_failed_item(tmp_path: Path) -> None:
    found = _score(tmp_path, [[], [1, 2]], [[], [1, 2]]).measurement()
    assert (found.n_items, found.n_failed, found.value("score")) == (2, 1, 100.0)
